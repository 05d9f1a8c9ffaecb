"""What the ranks of a job agree on."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from megatron_noloco.job import activity, agreement
from megatron_noloco.training import start
from tests.kit.ranks import run_ranks

BEATS = 3


def waits(rank: int, world_size: int) -> tuple[Any, int]:
    """What rank 0 finds after some heartbeats, and how many this rank has heard."""
    heard, enough, broadcast = 0, threading.Event(), agreement._broadcast

    def counted(value: Any) -> Any:
        nonlocal heard
        found = broadcast(value)
        heard += found is None
        if heard == BEATS:
            enough.set()
        return found

    def find() -> str:
        assert enough.wait(60)
        return f"rank {rank}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_HEARTBEAT_SECONDS", 0.01)
        patch.setattr(agreement, "_broadcast", counted)
        found = agreement.computed_by_rank_0(find)
    dist.barrier()
    return found, heard


def test_ranks_hear_from_rank_0_while_it_waits() -> None:
    found = run_ranks(3, waits)
    assert [what for what, _ in found] == ["rank 0"] * 3
    (beats,) = {beats for _, beats in found}
    assert beats >= BEATS


def is_raised(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as raised:
        agreement.computed_by_rank_0(lambda: int(f"of rank {rank}"), ValueError)
    return str(raised.value)


def test_a_known_error_of_rank_0_is_raised_on_all_ranks() -> None:
    why = "invalid literal for int() with base 10: 'of rank 0'"
    assert run_ranks(2, is_raised) == [why] * 2
    assert is_raised(0, 1) == why


def waits_for_data(rank: int, world_size: int, folder: Path) -> tuple[bool, str]:
    """Whether the other host had its dataset when this rank went on, and what its watchdog would say meanwhile."""
    said, waited, made = "", folder / "waited", folder / "made"

    def read_data(*_: Any) -> Any:
        if rank == 1:
            while not waited.exists():
                threading.Event().wait(0.001)
            made.touch()

    def sleep(_: float) -> None:
        nonlocal said
        said = str(activity.now.state)
        waited.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "read_data", read_data)
        patch.setattr(agreement.time, "sleep", sleep)
        start._wait_for_data(Mock())
    there = made.exists()
    dist.barrier()
    return there, said


def test_a_host_waits_for_the_dataset_of_another_and_says_so(tmp_path: Path) -> None:
    (there, said), _ = run_ranks(2, waits_for_data, tmp_path)
    assert there
    assert said == "preparing the data: waiting for other hosts, which prepare theirs"


def all_ways(rank: int, world_size: int) -> list[Any]:
    return [
        agreement.gather_from_all_ranks(rank),
        agreement.broadcast_from_rank_0(rank),
        agreement.computed_by_rank_0(lambda: rank),
        agreement.vote([rank, -rank]),
        agreement.wait_for_all(),
        world_size == 1 or agreement._control() is agreement._control(),
    ]


def test_all_ranks_have_the_same() -> None:
    assert run_ranks(2, all_ways) == [[[0, 1], 0, 0, [0, -1], None, True]] * 2
    assert all_ways(0, 1) == [[0], 0, 0, [0, 0], None, True]
