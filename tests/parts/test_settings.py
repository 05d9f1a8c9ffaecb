"""Each setting is defined once; the library and the JSON blocks obey the same definition."""

from typing import Any

import numpy as np
import pytest

from megatron_noloco.config import RunConfig
from megatron_noloco.config.noloco_block import TrainerSettings
from megatron_noloco.errors import UserError
from megatron_noloco.federation.compatibility import run_number
from megatron_noloco.plans.grouping import Sites
from megatron_noloco.settings import (
    PAPER,
    FederationSettings,
    NolocoSettings,
    federation_problems,
    grouping_of,
    groups_problem,
    rho,
    shared,
)
from tests.kit.configs import edited
from tests.kit.golden import check


def test_numbers_of_numpy_are_kept_as_those_of_python() -> None:
    """As JSON needs them, of which the number of a run is made; an integer where a number is meant likewise."""
    given: Any = {"local_steps": np.int64(4), "outer_lr": np.float32(0.5), "outer_momentum": np.int32(0)}
    settings = NolocoSettings(**given, overlap_steps=np.int64(2))  # type: ignore[arg-type]
    expected = NolocoSettings(local_steps=4, outer_lr=0.5, overlap_steps=2)
    assert settings.model_dump_json() == expected.model_dump_json()
    assert run_number(shared(NolocoSettings(outer_lr=1))) == run_number(shared(NolocoSettings()))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (settings, name)
        for settings in (TrainerSettings, FederationSettings)
        for name in settings.model_fields
    ],
)
def test_no_setting_takes_a_value_of_another_type(settings: Any, name: str) -> None:
    """Neither the text of a number, nor a number in place of text or of true, nor true in place of 1."""
    kinds: dict[type, list[Any]] = {bool: [1, "true"], int: [True, "3", 3.0], float: [True, "0.5"], str: [1]}
    for wrong in (*kinds.get(type(getattr(settings(), name)), [True]), b"off", [], {}):
        with pytest.raises(ValueError, match=rf"^{settings.__name__}\.{name}: must be "):
            settings(**{name: wrong})


def test_wrong_setting_reads_alike_in_library_and_file() -> None:
    bounds = [{"fragments": 0}, {"outer_momentum": 1.0}, {"outer_lr": float("inf")}, {"slow_weights": "disk"}]
    for changes in (*bounds, {"local_stpes": 5}, {"overlap": 5}, {"fragments": 9, "local_steps": 3}):
        with pytest.raises(ValueError) as library:
            NolocoSettings(**changes)
        with pytest.raises(UserError) as file:
            RunConfig(**edited({f"noloco.{name}": value for name, value in changes.items()}))
        assert str(library.value).replace("NolocoSettings", "noloco") == str(file.value)
    with pytest.raises(ValueError, match=r"^NolocoSettings\.fragments .*\nNolocoSettings\.overlap_steps .*$"):
        NolocoSettings(local_steps=2, fragments=3, overlap_steps=3)
    NolocoSettings(local_steps=2, fragments=2, overlap_steps=2)


@pytest.mark.parametrize(("overlap_steps", "first", "longest"), [(0, 0, 0), (3, 3, 3), ("auto", 0, 10)])
def test_the_first_and_the_longest_overlap(overlap_steps: Any, first: int, longest: int) -> None:
    noloco = NolocoSettings(overlap_steps=overlap_steps)
    assert (noloco.first_overlap_steps, noloco.longest_overlap_steps) == (first, longest)


SITES = {"recipe": "paper", "pairing": "auto", "outer_momentum": 0.0, "outer_lr": 0.5}


NESTEROV = {"outer_momentum": 0.9, "outer_nesterov": True}
# Settings and replicas; tests/golden/group_lines.txt has what is said of them.
GROUPS: list[tuple[dict[str, Any], int | None]] = [
    ({}, 4),
    ({}, None),
    ({"outer_momentum": 0.9}, 1),  # nothing to drift away from
    ({"outer_momentum": 0.9}, 2),  # one group: DiLoCo
    ({"outer_momentum": 0.9}, 4),
    ({"outer_momentum": 0.9}, None),
    ({"outer_momentum": 0.9, "method": "diloco"}, 4),
    (NESTEROV, 4),  # DiLoCo's usual numbers, in pairs
    (NESTEROV | {"outer_lr": 1.0}, 4),
    ({"group_size": 3}, 2),
    ({"pairing": "cycle"}, 6),
    ({"pairing": "cycle", "group_size": 3}, 6),
    ({"enabled": False, "outer_momentum": 0.9}, 4),
    ({"payload": "int8", "consensus_weight": 1.4}, 4),
    ({"payload": "int4", "consensus_weight": 1.4}, 4),
    ({"method": "diloco", "outer_momentum": 0.95}, 4),
    ({"method": "diloco", "outer_momentum": 0.95, "payload": "int4"}, 4),  # all use the same bits
    ({"method": "diloco", "outer_momentum": 0.95, "payload": "int4"}, 2),
    (SITES | {"sites": 2}, 16),
    (SITES | {"sites": 2}, None),
    (SITES | {"sites": 3}, 16),
    (SITES | {"sites": 2}, 12),
    (SITES | {"sites": ["a", "b"] * 2}, 8),
    (SITES | {"sites": [*"aaab"]}, 4),
    (SITES | {"sites": [*"ab"], "method": "diloco"}, 4),
    (SITES | NESTEROV | {"sites": 2}, 16),
    (SITES | NESTEROV | {"sites": 2, "site_interval": 4}, 16),
]


def test_groups_exist_and_stay_together() -> None:
    """Or a line says why not, with a value that would."""

    def said_of(changes: dict[str, Any], replicas: int | None) -> str:
        return groups_problem(TrainerSettings(**PAPER | changes), replicas) or "accepted"

    check(
        "group_lines",
        ((f"{changes}, {count} replicas", said_of(changes, count)) for changes, count in GROUPS),
    )


def test_sites_are_given_by_number_by_name_or_by_host() -> None:
    by_number = NolocoSettings(sites=2).among(4).sites
    assert by_number == NolocoSettings(sites=["here", "here", "there", "there"]).among(4).sites
    hosts = NolocoSettings(sites="hosts")
    assert by_number == Sites((0, 0, 1, 1), interval=2)
    assert hosts.among(4).sites is None
    for alike in ({"sites": 1}, {"sites": 4}, {"sites": [*"abcd"]}, {"sites": 2, "method": "diloco"}):
        assert NolocoSettings(**alike).among(4).sites is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "replicas", "group_size", "pairing"),
    [
        ({"group_size": 4}, 8, 4, "random"),
        ({"pairing": "cycle"}, 8, 2, "cycle"),
        ({}, 8, 2, "cycle"),
        ({}, 6, 2, "random"),
        ({"group_size": 4}, 4, 4, "random"),
        ({"pairing": "cycle"}, 1, 1, "random"),
        ({"method": "diloco", "pairing": "cycle"}, 6, 6, "random"),
    ],
)
def test_settings_give_the_size_and_the_pairing_of_groups(
    changes: dict[str, Any], replicas: int, group_size: int, pairing: str
) -> None:
    grouping = grouping_of(NolocoSettings(**changes), replicas, seed=7)
    found = (grouping.replicas, grouping.group_size, grouping.pairing, grouping.seed)
    assert found == (replicas, group_size, pairing, 7)


def test_rho_among_all_replicas_in_cycles_and_in_pairs() -> None:
    assert rho(NolocoSettings(**PAPER), 2) == 0.0
    assert rho(NolocoSettings(**PAPER), 8) == pytest.approx(0.7, abs=5e-4)
    assert rho(NolocoSettings(**PAPER | {"pairing": "cycle"}), 8) == pytest.approx(0.633, abs=5e-4)


def test_a_federation_has_a_limit_of_fragments() -> None:
    federation = FederationSettings(rendezvous="file:///shared", key_file="key")
    for fragments, problems in [(1024, 0), (1025, 1)]:
        method = NolocoSettings(fragments=fragments, local_steps=2000)
        assert len(list(federation_problems(federation, method))) == problems


def test_what_the_jobs_of_a_federation_share() -> None:
    own = {"deadline_seconds": 5.0, "slow_weights": "device", "overlap_steps": 2}
    trainers: dict[str, Any] = {"final_average": True, "transport": "mpi"}
    assert shared(TrainerSettings(local_steps=10, **own, **trainers)) == shared(NolocoSettings())  # type: ignore[arg-type]
    assert shared(NolocoSettings(consensus_weight=1.0)) == shared(NolocoSettings())
    assert shared(NolocoSettings(payload="int8")) != shared(NolocoSettings())


@pytest.mark.parametrize(
    ("changes", "replicas", "kept"),
    [
        ({"payload": "int4"}, 8, False),
        ({"payload": "int4", "group_size": 4}, 8, True),
        ({"payload": "int8", "group_size": 4}, 8, False),
        ({"payload": "int4", "method": "diloco"}, 8, True),
        ({"payload": "int4", "method": "diloco"}, 2, False),
        ({"payload": "int4", "group_size": 8, "pairing": "cycle"}, 8, False),  # of 2 x 2 x 2
        ({"payload": "int4", "group_size": 8, "pairing": "cycle"}, 9, True),
    ],
)
def test_rounding_errors_are_kept_in_groups_of_more_than_2(
    changes: dict[str, Any], replicas: int, kept: bool
) -> None:
    assert NolocoSettings(**changes).among(replicas).keeps_rounding == kept
