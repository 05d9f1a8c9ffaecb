"""Seconds of a stream, with the events of a GPU that is behind the host."""

from itertools import count

import pytest
import torch

from megatron_noloco.pipeline.stream_clock import StreamClock


class Event:
    """Passed when `reached` is; at millisecond 1, 2, 3 and so on, in the order in which they are recorded."""

    numbers = count(1)
    reached = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = next(Event.numbers)

    def query(self) -> bool:
        return self.at <= Event.reached

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "CUDA refuses"
        return float(end.at - self.at)


def test_blocks_count_once_the_stream_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock, taken = StreamClock("cuda"), []
    for reached in (0, 3, 4):  # of a block of three milliseconds, and one inside of it
        with clock.running(), clock.running():
            pass
        Event.reached = reached
        taken.append(clock.take())
    assert taken[0] == 0
    Event.reached = 12
    assert sum(taken) + clock.take() == pytest.approx(3 * 0.004)
    assert clock.take() == 0


def test_the_block_that_the_stream_is_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "numbers", count(1))
    clock, found = StreamClock("cuda"), []
    for what in ("a hop from rank 1", "a hop from rank 2"):
        with clock.running(what):
            pass
    for reached in range(5):
        monkeypatch.setattr(Event, "reached", reached)
        found.append(clock.inside())
    assert found == ["", "a hop from rank 1", "", "a hop from rank 2", ""]
    clock.take()
    assert clock.inside() == ""
