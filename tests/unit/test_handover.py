"""State that a rank gives to its counterpart in another job, while both do other things."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Barrier, Event
from typing import NoReturn

import numpy as np
import pytest
import torch

from megatron_noloco.federation import handover as module
from megatron_noloco.federation.counterpart import Standing
from megatron_noloco.federation.handover import Handover, Snapshot
from megatron_noloco.federation.keeping_up import KeepingUp
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.membership import Membership
from megatron_noloco.federation.network import FederationTransport, Network
from megatron_noloco.federation.rendezvous import SharedFolder
from megatron_noloco.federation.takeover import furthest
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings
from megatron_noloco.transport.chunks import DEFAULT_CHUNK_BYTES
from megatron_noloco.transport.interface import ExchangeTimeoutError
from tests.unit.federated import (
    LOCAL,
    PATIENCE,
    RUN,
    SECONDS,
    ask_to_stop,
    committed_with,
    connected,
    swap,
    transport,
    until,
)

NOLOCO = NolocoSettings()
PARTS = [
    np.random.default_rng(length).integers(0, 256, length, np.uint8)
    for length in (3 * DEFAULT_CHUNK_BYTES + 5, 7)  # of more than some chunks, and of less than one
]


class OnDisk:
    """What a rank has saved; `error` is raised instead."""

    def __init__(self, step: int = 20, error: Exception | None = None) -> None:
        self._step, self.error = step, error

    def step(self) -> int:
        if self.error is not None:
            raise self.error
        return self._step

    def read(self) -> Snapshot | None:
        return Snapshot(b"saved", PARTS) if self.step() else None


def of(transport: FederationTransport, saved: OnDisk | None = None) -> Handover:
    made = Handover(transport)
    made.saved = saved
    return made


def taken(taker: Handover, rank: int) -> tuple[bytes, list[bytes]]:
    """Take what a rank gives."""
    tag, description = taker.ask(rank, SECONDS)
    places = [torch.zeros(len(part), dtype=torch.uint8) for part in PARTS]
    taker.take(rank, tag, places)
    return description, [place.numpy().tobytes() for place in places]


EXPECTED = [part.tobytes() for part in PARTS]


@pytest.mark.parametrize("with_keys", [False, True])
def test_what_is_on_disk_arrives_as_it_was(tmp_path: Path, with_keys: bool) -> None:
    """An exchange of the same ranks goes on meanwhile."""
    keys = Keys.make(tmp_path / "key") if with_keys else None
    with connected(tmp_path, 2, slots=3, keys=keys) as (giver, taker):
        of(giver, OnDisk())
        taking = of(taker)
        assert taking.steps(SECONDS) == {0: 20}
        giver.partners.begin(3, 1)
        giver.partners.end(3)
        swap(giver, taker, tag=2 * 10**6)
        assert taken(taking, 0) == (b"saved", EXPECTED)


def test_a_rank_that_has_nothing_or_cannot_read_it_answers_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(tmp_path, 4) as (empty, broken, _, taker):
        of(empty, OnDisk(step=0))
        of(broken, OnDisk(error=ZeroDivisionError("of no kind that was expected")))
        taking = of(taker)
        assert taking.steps(SECONDS) == {}
        for rank in range(3):
            with pytest.raises(ConnectionError, match=f"rank {rank} has no state to give"):
                taking.ask(rank, SECONDS)
        assert taking.steps(SECONDS) == {}, "asked again"
    assert "state cannot be given to rank 3: ZeroDivisionError: of no kind" in capfd.readouterr().err


def live(step: int) -> Callable[[], Callable[[], Snapshot]]:
    def copy() -> Callable[[], Snapshot]:
        parts = [part.copy() for part in PARTS]
        return lambda: Snapshot(str(step).encode(), parts)

    return copy


def between_steps(giver: Handover, done: int, copy: Callable[[], Callable[[], Snapshot]]) -> bool:
    """As in a replica of one rank."""
    return giver.wanted(done) and giver.give(copy)


@contextmanager
def training(giver: Handover) -> Iterator[list[int]]:
    """Local steps of a millisecond in a thread; yields the steps at which the state was copied."""
    copied, ends = list[int](), list[bool]()

    def loop() -> None:
        done = 0
        while not ends:
            if between_steps(giver, done, live(done)):
                copied.append(done)
            done += 1
            time.sleep(1e-3)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(loop)
        try:
            yield copied
        finally:
            ends.append(True)
            running.result()


def test_a_rank_that_trains_gives_its_state_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for several that ask soon after each other; its checkpoint, which is older, is not given."""
    with connected(tmp_path, 3) as (giver, one, other), training(of(giver, OnDisk())) as copied:
        first, second = of(one), of(other)
        until(lambda: first.steps(SECONDS).get(0, 0) > 50)
        step = first.steps(SECONDS)[0]
        description, parts = taken(first, 0)
        assert step <= int(description) <= first.steps(SECONDS)[0]
        assert parts == EXPECTED
        assert taken(second, 0) == (description, EXPECTED)
        assert copied == [int(description)]
        monkeypatch.setattr(module, "_FRESH_SECONDS", 0.0)
        assert int(taken(second, 0)[0]) > int(description)
        assert len(copied) == 2


class Agreement:
    """`agree` of the two ranks of a replica, which are threads."""

    def __init__(self) -> None:
        self._votes: list[Sequence[int]] = []
        self._given = Barrier(2, timeout=SECONDS)

    def __call__(self, votes: Sequence[int]) -> list[int]:
        self._votes.append(votes)
        self._given.wait()
        smallest = [min(pair) for pair in zip(*self._votes[-2:], strict=True)]
        self._given.wait()
        return smallest


def test_the_ranks_of_a_giver_give_their_states_of_one_step(tmp_path: Path) -> None:
    """Though they are asked at different steps, and not at all at others."""
    network = Network(SharedFolder(tmp_path, RUN), RUN, LOCAL)
    settings = FederationSettings(slots=2, rendezvous="file:///x", encryption="none")
    both, ends = Agreement(), Event()

    def loop(giver: Membership) -> None:
        for done in itertools.count():
            giver.between_steps(done, live(done), lambda _: pytest.fail("took"))
            time.sleep(1e-3)
            if giver.transport.partners.agree([not ends.is_set()]) == [0]:
                return

    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                closing(FederationTransport(place, network, PATIENCE, both if rank < 2 else None))
            )
            for rank in range(4)
            for place in [Place(rank // 2, 2, rank=rank, ranks_per_replica=2)]
        ]
        givers = [
            Membership(rank, KeepingUp(rank, NOLOCO, settings), of(rank), NOLOCO, settings)
            for rank in ranks[:2]
        ]
        takers = [of(rank) for rank in ranks[2:]]
        assert all(rank.wait_for(1, SECONDS) for rank in ranks)
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(loop, giver) for giver in givers]
            try:
                until(lambda: takers[1].steps(SECONDS).get(1, 0) > 10)
                step, parts = taken(takers[0], 0)
                until(lambda: takers[1].steps(SECONDS)[1] > int(step) + 10)
                assert taken(takers[1], 1) == (step, parts)
            finally:
                ends.set()
            for one in running:
                one.result(SECONDS)


def test_a_giver_waits_for_no_rank_that_waits_for_its_state(tmp_path: Path) -> None:
    """Neither in an exchange that has begun, nor in what comes later, until that rank begins an exchange."""
    with connected(tmp_path) as (giver, taker), ThreadPoolExecutor(1) as pool:
        giving, taking = of(giver), of(taker)
        partners = giver.partners
        committed = committed_with(giver, lambda *_: 1, 100)
        between_steps(giving, 5, live(5))
        committed.begin(torch.zeros(100), (0, 1), 0, "a test")
        asking = pool.submit(taken, taking, 0)
        started = time.monotonic()
        list(committed.finish())
        assert time.monotonic() - started < SECONDS / 2
        assert committed.report.missed == "replica 1 takes over a state"
        assert partners.standing(1, 1) == (Standing.AWAY, "takes over a state")
        until(
            lambda: between_steps(giving, 6, live(6))
        )  # the question for the state itself may still be on its way
        assert asking.result(SECONDS) == (b"6", EXPECTED)
        taker.partners.begin(1, 0)
        until(lambda: partners.standing(1, 1)[0] == Standing.WAITING)


def test_a_job_that_is_to_stop_takes_nothing(tmp_path: Path) -> None:
    """Also where it waits for the next step of a job that trains."""
    with connected(tmp_path) as (giver, taker):
        between_steps(of(giver), 5, live(5))
        ask_to_stop(taker)
        taking = of(taker)
        assert taking.steps(SECONDS) == {}
        with pytest.raises(ConnectionError, match="this job was asked to stop"):
            taking.ask(0, SECONDS)


def test_without_a_question_nothing_is_copied(tmp_path: Path) -> None:
    with connected(tmp_path) as (giver, _):
        assert not between_steps(of(giver), 5, lambda: pytest.fail("copied"))


def test_a_rank_whose_steps_are_over_gives_what_is_on_disk(tmp_path: Path) -> None:
    """Also to one that asked before."""
    with connected(tmp_path) as (giver, taker), ThreadPoolExecutor(1) as pool:
        giving, taking = of(giver, OnDisk()), of(taker)
        between_steps(giving, 50, live(50))
        assert taking.steps(SECONDS) == {0: 50}
        asking = pool.submit(taken, taking, 0)
        until(lambda: bool(giving._wanted))
        giving.ended()
        assert asking.result(SECONDS) == (b"saved", EXPECTED)
        assert taking.steps(SECONDS) == {0: 20}


def test_after_its_end_a_rank_gives_nothing(tmp_path: Path) -> None:
    """Its thread has ended."""
    with connected(tmp_path) as (giver, taker):
        giving, taking = of(giver, OnDisk()), of(taker)
        assert taking.steps(SECONDS) == {0: 20}
        between_steps(giving, 5, live(5))
        (thread,) = giving._thread._threads
        giving.close()
        thread.join(SECONDS)
        assert not thread.is_alive()
        assert taking.steps(SECONDS) == {}
        with pytest.raises(ConnectionError, match="has no state"):
            taking.ask(0, SECONDS)


def test_a_rank_that_closes_answers_those_that_wait_for_its_next_step(tmp_path: Path) -> None:
    with connected(tmp_path) as (giver, taker), ThreadPoolExecutor(1) as pool:
        giving, taking = of(giver), of(taker)
        between_steps(giving, 5, live(5))
        asked = pool.submit(taking.ask, 0, SECONDS)
        until(lambda: bool(giving._wanted))
        giving.close()
        with pytest.raises(ConnectionError, match="has no state"):
            asked.result(SECONDS / 2)


def test_one_that_asks_for_ever_costs_no_memory(tmp_path: Path) -> None:
    """While the disk does not answer; then it is answered again."""
    disk, answers = Event(), list[int]()

    class Slow(OnDisk):
        def step(self) -> int:
            disk.wait(SECONDS)
            answers.append(1)
            return super().step()

    with connected(tmp_path) as (giver, taker):
        giving, taking = of(giver, Slow()), of(taker)
        for _ in range(100):
            giving._asked(1, 0, False)
        disk.set()
        until(lambda: not giving._waiting[1])
        assert taking.steps(SECONDS) == {0: 20}
        assert len(answers) < 20


def test_a_state_that_cannot_be_copied_stops_no_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(tmp_path) as (giver, taker), ThreadPoolExecutor(1) as pool:
        giving, taking = of(giver), of(taker)
        between_steps(giving, 5, live(5))
        asked = pool.submit(taking.ask, 0, SECONDS)
        until(lambda: bool(giving._wanted))
        between_steps(giving, 6, lambda: raised(MemoryError("no memory for a copy")))
        with pytest.raises(ConnectionError, match="has no state"):
            asked.result(SECONDS / 2)
    assert "rank 0: this rank's state cannot be given: MemoryError: no memory" in capfd.readouterr().err


def raised(error: Exception) -> NoReturn:
    raise error


def test_buffers_must_be_as_long_as_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.5)
    with connected(tmp_path) as (giver, taker):
        of(giver, OnDisk())
        taking = of(taker)
        tag, _ = taking.ask(0, SECONDS)
        places = [torch.zeros(length, dtype=torch.uint8) for length in (40, 7)]
        with pytest.raises(ExchangeTimeoutError):
            taking.take(0, tag, places)
        assert not places[0].any()


def test_a_second_offer_replaces_the_first_and_one_that_trains_takes_none(tmp_path: Path) -> None:
    with connected(tmp_path) as (giver, taker):
        of(giver, OnDisk())
        taking, posted = of(taker), giver.service.protocol.counterparts[1].posted
        for _ in range(5):
            tag, _ = taking.ask(0, SECONDS)
            assert {name: len(sends) for name, sends in posted.items()} == {tag: 2}
        taker.partners.begin(0, 0)
        until(lambda: not posted)


def test_a_giver_that_goes_ends_the_handover(tmp_path: Path) -> None:
    with transport(tmp_path, 1) as taker, ThreadPoolExecutor(1) as pool:
        with transport(tmp_path, 0) as giver:
            assert all(one.wait_for(1, SECONDS) for one in (giver, taker))
            of(giver, OnDisk())
            taking = of(taker)
            tag, _ = taking.ask(0, SECONDS)
            longer = [torch.zeros(9, dtype=torch.uint8) for _ in PARTS]  # never come
            result = pool.submit(taking.take, 0, tag, longer)
            until(lambda: giver.service.protocol.counterparts[1].posted.keys() == set())
        with pytest.raises(ConnectionError, match="rank 0 has gone"):
            result.result()
        with pytest.raises(ConnectionError, match="rank 0 has gone"):
            taking.ask(0, SECONDS)


@pytest.mark.parametrize("answer", [b"", b"\xff", b"[1]", b'{"step": "20"}', b'{"step": true}', b"[" * 9000])
def test_an_answer_that_is_no_step_counts_as_nothing(tmp_path: Path, answer: bytes) -> None:
    with connected(tmp_path) as (giver, taker):
        protocol = giver.service.protocol
        protocol.when_asked = lambda rank, tag, _: protocol.offer(rank, tag, answer, [])
        assert of(taker).steps(SECONDS) == {}


def test_the_furthest_slot_is_chosen_and_of_equal_ones_the_next() -> None:
    place = Place(2, 4, ranks_per_replica=2)
    steps = {0: 30, 1: 30, 2: 40, 6: 40}
    assert furthest(steps, place, least=20) == 3, "the next after slot 2"
    assert furthest(steps, place, 20, {3}) == 1
    assert furthest(steps, place, 20, {1, 3}) == 0
    assert furthest(steps, place, least=41) is None
    assert json.loads(json.dumps(steps))
