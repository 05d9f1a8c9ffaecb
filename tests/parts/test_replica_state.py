"""What the trainer takes over of another job's inner optimizer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_noloco.training.replica_state import known_fields

OWN = {"others": {"inner.step": False, "inner.exp_avg": True}}
GIVEN: dict[str, Any] = {"inner.step": 7.0, "inner.exp_avg": None}
VECTORS = {"fast_weights", "slow_weights", "inner.exp_avg"}
values = st.one_of(st.none(), st.integers(), st.floats(), st.booleans(), st.text(), st.lists(st.integers()))


@given(st.dictionaries(st.text(), values), st.sets(st.text()))
def test_what_is_not_kept_here_is_left_out_with_a_line(more: dict[str, Any], vectors: set[str]) -> None:
    found, line = known_fields(OWN, {"others": more | GIVEN, "muon": more}, VECTORS | vectors)
    assert found == {"others": GIVEN}
    assert line.startswith("leaves out ") == bool(more)
    assert all(name in line for name in more)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"inner.step": "7"}, "inner.step"),
        ({"inner.step": True}, "inner.step"),
        ({"inner.step": [7]}, "inner.step"),
        ({"inner.step": None}, "inner.step"),  # a number here
        ({"inner.exp_avg": 7.0}, "inner.exp_avg"),  # a vector here
    ],
)
def test_an_optimizer_starts_anew_where_a_field_cannot_be_read(change: dict[str, Any], name: str) -> None:
    anew = {}, f"starts anew: {name} cannot be read in the state taken over"
    assert known_fields(OWN, {"others": GIVEN | change}, VECTORS | {"inner.step"}) == anew
    missing = {key: value for key, value in GIVEN.items() if key != name}
    assert known_fields(OWN, {"others": missing}, VECTORS) == anew
    anew_too = known_fields({"others": {}}, {"others": GIVEN | {"inner.exp_avg": None}}, set())
    assert anew_too == ({}, "starts anew: inner.exp_avg cannot be read in the state taken over")


def test_an_optimizer_that_keeps_nothing_yet_takes_all() -> None:
    assert known_fields({"others": {}}, {"others": GIVEN}, VECTORS) == ({"others": GIVEN}, "")
    assert known_fields({"others": {}}, {}, VECTORS) == ({"others": {}}, "")
