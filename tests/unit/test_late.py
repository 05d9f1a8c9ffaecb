"""A partner that makes a replica wait is named; an ordinary wait is not."""

import pytest

from megatron_noloco.monitor.monitor import LatePartners
from megatron_noloco.outer import ExchangeReport

PHASE = 100.0  # seconds from one exchange to the next


def found(*rounds: tuple[int, float]) -> list[tuple[int, float] | None]:
    """What replica 0 finds after rounds with (partner, seconds of waiting)."""
    late = LatePartners(0)
    return [
        late.notice(ExchangeReport((0, partner), wait_seconds=wait, started=PHASE * index))
        for index, (partner, wait) in enumerate(rounds)
    ]


def test_a_slow_partner_is_named_whenever_it_is_met() -> None:
    rounds = [(1, 1.0), (2, 3.0), (3, 50.0), (1, 1.0), (3, 52.0)]
    assert found(*rounds) == [None, None, (3, 48.0), None, (3, 50.0)]


def test_its_own_waits_are_not_what_it_is_compared_with() -> None:
    """Else a slow partner that is met in most rounds would be the rule."""
    rounds = [(1, 1.0), (2, 1.0), *[(3, 50.0)] * 40]
    assert found(*rounds)[2:] == [(3, 49.0)] * 40


@pytest.mark.parametrize(("wait", "named"), [(11.9, False), (12.1, True)])
def test_a_tenth_of_the_time_between_exchanges_is_notable(wait: float, named: bool) -> None:
    assert (found((1, 2.0), (2, 2.0), (3, wait))[-1] is not None) == named


def test_where_all_are_equally_late_the_network_is_slow_and_nobody_is_named() -> None:
    assert found(*[(partner, 60.0) for partner in (1, 2, 3, 4, 1, 2)]) == [None] * 6


def test_two_others_must_have_been_met() -> None:
    assert found((1, 0.0), (3, 90.0), (1, 0.0), (3, 90.0)) == [None] * 4


def test_it_forgets_those_met_long_ago() -> None:
    """Twenty partners with waits of their own numbers: the last 16 before the 21st are 5 to 20."""
    rounds = [(partner, float(partner)) for partner in range(1, 21)]
    assert found(*rounds, (99, 100.0))[-1] == (99, 100.0 - 12.5)


def test_a_bye_and_a_larger_group_name_nobody() -> None:
    late = LatePartners(0)
    for index, group in enumerate([(0, 1), (0, 2), (0,), (0, 3, 4)]):
        report = ExchangeReport(group, wait_seconds=99.0 if len(group) > 2 else 0.0, started=PHASE * index)
        assert late.notice(report) is None


def test_a_clone_does_not_know_how_long_its_source_waited() -> None:
    """It merges the exchange that was under way when the replica was saved that it is a clone of."""
    late = LatePartners(4)
    assert late.notice(ExchangeReport((0, 2), wait_seconds=50.0, started=1.0)) is None
