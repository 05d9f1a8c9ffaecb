"""The state that a replica gives to another job, while both do other things."""

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from megatron_noloco.federation.asks import furthest
from megatron_noloco.federation.control import Offer
from megatron_noloco.federation.exchanges import Seen
from megatron_noloco.federation.handover import Handover, Part, State, Taken
from torch import Tensor

from megatron_noloco.federation import control
from megatron_noloco.federation import handover as module
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.federation.partners import Standing
from tests.unit.federated import SECONDS, ask_to_stop, committed_with, connected, lose, swap, until
from tests.unit.fleet import noise

LENGTHS = {"many": 300_000, "few": 7}  # elements: more than some chunks, and less than one
MOVEMENTS = {name: alone(length, slab=100_000) for name, length in LENGTHS.items()}


class Kept:
    """The state of a job of one rank: vectors that are as many as its local steps, and some bytes."""

    def __init__(self, wrong: float = 0.0) -> None:
        self.wrong = wrong
        self.copied: list[int] = []
        self.used: list[State] = []

    def copy(self, done: int) -> State:
        self.copied.append(done)
        parts = {name: Part(vector(name, done) + self.wrong, MOVEMENTS[name]) for name in LENGTHS}
        return State(done, {"who": "a test"}, parts, bytes(range(200)))

    def room(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Part]:
        if facts != {"who": "a test"}:
            raise ValueError("its facts are others")
        return {name: Part(torch.zeros(LENGTHS[name]), MOVEMENTS[name]) for name in names}

    def use(self, state: State) -> None:
        self.used.append(state)


def vector(name: str, done: int) -> Tensor:
    return noise(LENGTHS[name], seed=3) + done


def is_whole(state: State) -> bool:
    return state.rest == bytes(range(200)) and all(
        torch.equal(state.parts[name].vector, vector(name, state.step)) for name in LENGTHS
    )


def between_steps(giver: Handover, done: int, kept: Kept) -> bool:
    """As a job does."""
    return giver.wanted(done) and giver.give(lambda: kept.copy(done))


@contextmanager
def training(transport: FederationTransport, kept: Kept, since: int = 1) -> Iterator[Handover]:
    """Local steps of a millisecond in a thread."""
    ends, giver = threading.Event(), Handover(transport)

    def loop() -> None:
        done = since
        while not ends.is_set():
            between_steps(giver, done, kept)
            done += 1
            time.sleep(1e-3)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(loop)
        try:
            yield giver
        finally:
            ends.set()
            running.result()
            giver.close()


def trains_from(giving: Handover, giver: FederationTransport, taker: FederationTransport) -> None:
    """Have a state to give after five local steps, which the other replica knows."""
    giving.trains_from(5)
    until(lambda: taker.seen()[giver.rank].state.step == 5)


def take(
    taker: Handover, least: int = 1, seconds: float = SECONDS
) -> tuple[Taken | None, State | None, list[str]]:
    """Take the state that is furthest; returns it, and the lines about others."""
    kept, lines = Kept(), list[str]()
    taken = taker.take_over(kept, least, seconds, lines.append)
    return taken, kept.used[0] if kept.used else None, lines


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_job_takes_the_state_of_one_that_trains(tmp_path: Path, with_keys: bool) -> None:
    """An exchange of the same replicas goes on meanwhile."""
    keys = Keys.make(tmp_path / "key") if with_keys else None
    with connected(tmp_path, 2, slots=3, keys=keys) as (one, other), training(one, Kept()):
        until(lambda: Handover(other).take_over(Kept(), 20, SECONDS, print) is not None)
        for rank in (one, other):
            rank.partners.begin(3, 1 - rank.rank)
        until(lambda: not one.seen()[1].state.takes_over)
        swap(one, other, tag=2 * 10**6)
        taken, state, lines = take(Handover(other))
    assert taken is not None
    assert state is not None
    assert (taken.slot, taken.step, lines) == (0, state.step, [])
    assert taken.bytes == 4 * sum(LENGTHS.values()) + 200
    assert is_whole(state)
    assert state.step > 20


def test_those_that_ask_together_are_given_one_copy(tmp_path: Path) -> None:
    with connected(tmp_path, 3) as (giver, *others), ThreadPoolExecutor(2) as pool:
        giving, kept = Handover(giver), Kept()
        assert not between_steps(giving, 5, kept), "nobody has asked"
        until(lambda: all(one.seen()[0].state.step == 5 for one in others))
        asking = [pool.submit(take, Handover(one)) for one in others]
        until(lambda: len(giver.asked()) == 2)
        assert between_steps(giving, 6, kept)
        for one in asking:
            taken, state, _ = one.result(SECONDS)
            assert taken is not None
            assert state is not None
            assert is_whole(state)
        giving.close()
    assert kept.copied == [6]


def test_one_that_has_nothing_answers_at_once(tmp_path: Path) -> None:
    """Before its first local step, and after its last."""
    with connected(tmp_path, 2) as (giver, taker):
        giving, taking = Handover(giver), Handover(taker)
        assert take(taking) == (None, None, [])
        trains_from(giving, giver, taker)
        giving.ended()
        assert take(taking)[:2] == (None, None)


def test_one_that_ends_answers_those_that_wait_for_its_next_step(tmp_path: Path) -> None:
    with connected(tmp_path, 2) as (giver, taker), ThreadPoolExecutor(1) as pool:
        giving = Handover(giver)
        trains_from(giving, giver, taker)
        asking = pool.submit(take, Handover(taker))
        until(lambda: bool(giver.asked()))
        giving.close()
        _, _, lines = asking.result(SECONDS / 2)
    assert lines == ["the state of replica 0 was not taken over: it has no state to give"]


def test_a_giver_waits_for_no_replica_that_waits_for_its_state(tmp_path: Path) -> None:
    """Neither in an exchange that has begun, nor in what comes later, until that replica begins an exchange."""
    with connected(tmp_path) as (giver, taker), ThreadPoolExecutor(1) as pool:
        giving, partners = Handover(giver), giver.partners
        committed = committed_with(giver, lambda *_: 1, 100)
        trains_from(giving, giver, taker)
        committed.begin(torch.zeros(100), (0, 1), 0, "a test")
        asking = pool.submit(take, Handover(taker))
        started = time.monotonic()
        list(committed.finish())
        assert time.monotonic() - started < SECONDS / 2
        assert committed.report.missed == "replica 1 takes over a state"
        assert partners.standing(1, 1) == (Standing.AWAY, "takes over a state")
        until(lambda: between_steps(giving, 6, Kept()))
        taken, _, _ = asking.result(SECONDS)
        assert taken is not None
        taker.partners.begin(1, 0)
        until(lambda: partners.standing(1, 1)[0] == Standing.WAITING)


def test_a_job_that_is_to_stop_takes_nothing(tmp_path: Path) -> None:
    """Also where it waits for the next step of a job that trains."""
    with connected(tmp_path) as (giver, taker):
        giving, taking = Handover(giver), Handover(taker)
        trains_from(giving, giver, taker)
        ask_to_stop(taker)
        assert take(taking) == (None, None, [])
        assert taking._asks is not None
        with pytest.raises(ConnectionError, match="this job was asked to stop"):
            taking._asks.ask(0, SECONDS)


def test_a_state_that_cannot_be_copied_stops_no_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(tmp_path) as (giver, taker), ThreadPoolExecutor(1) as pool:
        giving = Handover(giver)
        trains_from(giving, giver, taker)
        asking = pool.submit(take, Handover(taker))
        until(lambda: giving.wanted(5))
        assert not giving.give(lambda: raised(MemoryError("no memory for a copy")))
        _, _, lines = asking.result(SECONDS / 2)
        assert lines == ["the state of replica 0 was not taken over: it has no state to give"]
    assert "this rank's state cannot be given: MemoryError: no memory" in capfd.readouterr().err


def raised(error: Exception) -> NoReturn:
    raise error


def test_of_states_that_are_of_no_use_none_is_used_and_the_next_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has numbers that are not finite, one is another model's; the third one is fine, and the least far."""

    def another_model(done: int) -> State:
        return Kept().copy(done)._replace(facts={})

    other = Kept()
    monkeypatch.setattr(other, "copy", another_model)
    with (
        connected(tmp_path, 4) as (first, second, third, taker),
        training(first, Kept(wrong=float("inf")), since=20_000),
        training(second, other, since=10_000),
        training(third, Kept()),
    ):
        until(lambda: sum(seen.state.step > 0 for seen in taker.seen().values()) == 3)
        taken, state, lines = take(Handover(taker))
    assert lines == [
        "the state of replica 0 was not taken over: its numbers are not finite",
        "the state of replica 1 was not taken over: its facts are others",
    ]
    assert taken is not None
    assert state is not None
    assert taken.slot == 2
    assert is_whole(state)


def test_one_that_was_started_anew_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trained at step 50,000 when it was asked, and then began again."""
    with connected(tmp_path) as (giver, taker), training(giver, Kept()):
        until(lambda: taker.seen()[0].state.step > 0)
        before = Seen(1, control.State(step=50_000), float("inf"), True)
        monkeypatch.setattr(taker, "seen", lambda: {0: before})
        taken, _, lines = take(Handover(taker), least=40_000)
    assert taken is None
    (line,) = lines
    assert line.startswith("the state of replica 0 was not taken over: it is at local step ")
    assert line.endswith(" by now, as it was started anew")


def test_one_whose_connection_is_lost_meanwhile_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(tmp_path) as (giver, taker), training(giver, Kept()):
        until(lambda: taker.seen()[0].state.step > 0)
        tries = list[int]()

        class Loses(Kept):
            def room(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Part]:
                tries.append(1)
                if len(tries) == 1:
                    lose(taker, 0)
                    until(lambda: not taker.present())
                return super().room(facts, names)

        kept, lines = Loses(), list[str]()
        taken = Handover(taker).take_over(kept, 1, SECONDS, lines.append)
    assert taken is not None
    assert is_whole(kept.used[0])
    assert (len(tries), lines) == (2, [])


def test_one_that_trains_takes_no_state(tmp_path: Path) -> None:
    """What was given to it is given up, so that the next one can be given."""
    with connected(tmp_path) as (giver, taker):
        giving, taking = Handover(giver), Handover(taker)
        trains_from(giving, giver, taker)
        assert taking._asks is not None
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(taking._asks.ask, 0, SECONDS)
            until(lambda: between_steps(giving, 6, Kept()))
            asking.result(SECONDS)
        assert giving._giving is not None
        assert not giving._giving.done()
        taker.partners.begin(0, 0)
        giving._giving.result(SECONDS)


def test_one_that_sends_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.5)

    with connected(tmp_path) as (giver, taker), ThreadPoolExecutor(1) as pool:
        trains_from(Handover(giver), giver, taker)
        asking = pool.submit(take, Handover(taker))
        until(lambda: bool(giver.asked()))
        giver.offer(1, Offer(giver.asked()[1], 20, {"who": "a test"}, ["many"]))
        taken, _, (line,) = asking.result(SECONDS)
    assert taken is None
    assert "no answer from rank 0" in line


def test_the_furthest_slot_is_chosen_and_of_equal_ones_the_next() -> None:
    steps = {0: 30, 1: 40, 3: 40}
    assert furthest(steps, own=2, slots=4, least=20) == 3, "the next after slot 2"
    assert furthest(steps, 2, 4, 20, {3}) == 1
    assert furthest(steps, 2, 4, 20, {1, 3}) == 0
    assert furthest(steps, 2, 4, least=41) is None
