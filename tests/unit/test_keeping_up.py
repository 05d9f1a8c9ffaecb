"""Where a replica of a federation goes on, and from what."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_noloco.checkpoint import adopt as adopting
from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.adopt import adopt
from megatron_noloco.federation import keeping_up as federation
from megatron_noloco.federation.keeping_up import KeepingUp, Pace, UntrainedError


class Others:
    """A transport whose counterparts have begun these exchanges."""

    def __init__(self, begun: list[int]) -> None:
        self.numbers = begun
        self.told: list[tuple[str, int]] = []
        self.partners = SimpleNamespace(
            begin=lambda number, rank: self.told.append(("begun", number)),
            end=lambda number, void_below: self.told.append(("over", number)),
            agree=lambda yes: yes,
        )

    def begun(self) -> list[int]:
        return self.numbers

    def wait_for(self, others: int, seconds: float) -> bool:
        return len(self.numbers) >= others


def keeping_up(begun: list[int], fragments: int = 1, steps: int | None = 95) -> tuple[KeepingUp, Others]:
    others = Others(begun)
    pace = Pace(10, fragments, rounds_behind=2, start_with=2, longest_seconds=1.0, steps=steps)
    return KeepingUp(others, pace), others  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("begun", "step", "expected"),
    [
        ([], 20, 20),
        ([-1, -1], 20, 20),
        ([2, 2], 20, 20),  # they are in, or at the end of, the same phase
        ([2, 2], 10, 30),  # they are in the phase after round 2, which begins at step 30
        ([1, 1], 10, 10),
        ([2, 2], 11, 11),  # not within a phase
        ([7, 0, 0], 10, 10),  # one that is ahead does not decide
        ([7, 7, 0], 10, 80),
        ([50, 50], 10, 90),  # the last phase is not left out
        ([0, 0], 90, 90),
    ],
)
def test_who_is_behind_half_of_the_others_goes_on_where_they_are(
    begun: list[int], step: int, expected: int
) -> None:
    assert keeping_up(begun)[0].next_step(step) == expected


def test_where_the_end_is_not_known_no_phase_is_the_last() -> None:
    assert keeping_up([50, 50], steps=None)[0].next_step(10) == 510


def test_exchanges_of_fragments_are_counted_by_rounds() -> None:
    assert keeping_up([4 * 3 + 1], fragments=4)[0].next_step(10) == 40


def test_a_replica_tells_where_it_continues() -> None:
    own, others = keeping_up([3])
    assert own.start(40)
    assert others.told == [("begun", 3), ("over", 3)]
    own, others = keeping_up([])
    assert not own.start(0), "one more was to be waited for"
    assert others.told == []


def test_nobody_waits_in_an_exchange_that_was_left_out() -> None:
    own, others = keeping_up([0])
    own.start(10)
    others.numbers, others.told = [7], []
    assert own.next_step(20) == 80
    assert others.told == [("begun", 7), ("over", 7)]


@pytest.mark.parametrize(
    ("begun", "waits"),
    [
        ([[9, 8]], 0),  # of round 8, the last one before step 90
        ([[9, 6], [9, 7], [9, 8]], 2),
        ([[9, 6], [9]], 1),  # it has left
        ([[9, 6]] * 100, 20),  # for a second at most
        ([[]], 0),
    ],
)
def test_at_the_end_those_that_are_there_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, begun: list[list[int]], waits: int
) -> None:
    own, others = keeping_up(begun[0])
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        others.numbers = begun[looks]

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0501 * looks)
    monkeypatch.setattr(federation, "time", clock)
    own.wait_at_end(90)
    assert looks == waits


def test_new_weights_do_not_join_trained_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "_TRAINED_ROUNDS", 5)
    own, others = keeping_up([])
    own.start(0)
    assert own.next_step(10) == 10, "nobody is there"
    others.numbers = [4]
    assert own.next_step(20) == 50, "they have trained little"
    others.numbers = [7]
    with pytest.raises(UntrainedError, match=r"no checkpoint: .* start from a copy of another replica's"):
        own.next_step(20)


@pytest.mark.parametrize("start", [0, 10])
def test_who_has_trained_with_the_others_or_before_may_fall_behind(start: int) -> None:
    own, others = keeping_up([0])
    own.start(start)
    assert own.next_step(10) == 10
    others.numbers = [7]
    assert own.next_step(20) == 80


def steps_of(folder: Path) -> list[int | None]:
    return [catalog.step_of(path) for path in catalog.steps(folder)]


def write_step(checkpoints: Path, step: int) -> Path:
    folder = catalog.step_folder(checkpoints, step)
    (folder / "replica_01").mkdir(parents=True)
    (folder / "replica_01" / "file").write_text(json.dumps(step))
    return folder


def test_the_newest_complete_step_of_another_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, first, second = (tmp_path / f"replica_0{number}" / "checkpoints" for number in range(3))
    write_step(own, 10)
    for step in (20, 30):
        write_step(first, step)
    incomplete = write_step(second, 40)
    monkeypatch.setattr(adopting.catalog, "is_complete", lambda folder: folder != incomplete)
    adopt(own, [first, second], margin=20)
    assert steps_of(own) == [10], "30 is not more than 20 ahead"
    adopt(own, [first, second], margin=5)
    assert steps_of(own) == [30, 10]
    assert (catalog.step_folder(own, 30) / "replica_01" / "file").read_text() == "30"
    adopt(own, [first, second], margin=0)
    assert steps_of(own) == [30, 10]


def test_a_step_that_is_removed_while_it_is_copied_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    write_step(other, 10)

    def gone(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(adopting.catalog, "is_complete", lambda folder: True)
    monkeypatch.setattr(adopting.shutil, "copytree", gone)
    adopt(own, [other], margin=0)
    assert steps_of(own) == []
