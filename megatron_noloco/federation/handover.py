"""The state of a replica: one that trains gives it to another job out of its memory, whatever their layouts.

    all:     State, now and then: the step that each can give
    taker:   Ask, to the furthest
    giver:   Offer, what the state has; then the rest, and each vector in slabs

A job gives its state at the next boundary between two local steps: its ranks copy the state, and train on while
the copies are moved (`movement`). The speakers of both replicas ask, answer and send; all ranks take part in the
rest.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_noloco.federation.asks import Asks, NotTaken
from megatron_noloco.federation.control import Offer
from megatron_noloco.federation.movement import Movement
from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.federation.passes import FAILURES, run, whole
from megatron_noloco.federation.service import ServiceFailedError
from megatron_noloco.federation.speakers import Receives, Sends
from megatron_noloco.files import outside
from megatron_noloco.job.activity import line_of
from megatron_noloco.job.agreement import found_by_rank_0, of_all_ranks, of_rank_0
from megatron_noloco.outer.vectors import HOST, NOTHING
from megatron_noloco.transport.interface import RankLostError

_SILENCE_SECONDS = 60.0  # after which a giver is given up
_GIVING, _TAKING = 1 << 20, (1 << 20) + 1  # tags inside the replica, beyond those of exchanges
FAST_WEIGHTS = "fast_weights"  # the part that every state has beside those of the outer optimizer


class Part(NamedTuple):
    """What this rank has of a canonical vector, fp32 in host memory; `movement` says where its elements lie."""

    vector: Tensor
    movement: Movement


class State(NamedTuple):
    """The state of a replica after `step` local steps, as one of its ranks has it.

    Attributes:
        facts: for JSON; the speaker's are given.
        parts: by name; all ranks have the same names in the same order.
        rest: what is no such vector; the speaker's is given.
    """

    step: int
    facts: dict[str, Any]
    parts: dict[str, Part]
    rest: bytes = b""


class Keeper(Protocol):
    """What a job does with states. All methods are called on all ranks of the replica."""

    def copy(self, done: int) -> State:
        """Return a copy of the state after `done` local steps."""
        ...

    def room(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Part]:
        """Return where the vectors of these names go; raises UserError where such a state does not fit."""
        ...

    def use(self, state: State) -> None:
        """Continue with a state that has come as a whole. Raises UserError where `rest` does not fit."""
        ...


class Taken(NamedTuple):
    """Whose state was taken over; its bytes on this rank, and how long it took."""

    slot: int
    step: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"taken over from replica {self.slot}: its state after local step {self.step}, "
            f"{self.bytes / 1e6:.1f} MB for this rank in {self.seconds:.1f} s"
        )


class Handover:
    """Gives the state of this replica to others that ask for it, and takes theirs.

    Args:
        transport: of the speaker; None on the other ranks.
    """

    def __init__(self, transport: FederationTransport | None) -> None:
        self._asks = None if transport is None else Asks(transport)
        self._transport = transport
        self._thread = ThreadPoolExecutor(1, "handover")
        self._giving: Future[None] | None = None
        self._sends: Sends | None = None

    # To give

    def trains_from(self, done: int) -> None:
        """Offer the state that this job will have at its first boundary, after `done` local steps."""
        if self._transport is not None:
            self._transport.give(done)

    def wanted(self, done: int) -> bool:
        """Return whether replicas wait for the present state, and it can be copied now. On the speaker."""
        assert self._transport is not None
        self._transport.give(done)
        return bool(self._transport.asked()) and (self._giving is None or self._giving.done())

    def give(self, copy: Callable[[], State]) -> bool:
        """Give the present state to the replicas that wait for it; return whether it could be copied.

        All ranks call it between the same two local steps, where it is `wanted`.
        """
        state = None
        if self._transport is not None:
            self._sends = Sends(self._transport, self._transport.asked())
        with _complaining():  # the training goes on, and the replicas that ask are answered
            state = copy()
        made = all(of_all_ranks(state is not None))
        self._giving = self._thread.submit(self._send, state if made else None, self._sends)
        return made

    def _send(self, state: State | None, sends: Sends | None) -> None:
        # Of the job, or its thread: the main thread learns of it.
        with _complaining(), suppress(RankLostError, ServiceFailedError):
            if self._transport is not None and sends is not None:
                for slot, tag in dict(sends.slots).items():
                    self._transport.offer(slot, _offer(tag, state))
                if state is not None and state.rest:
                    run(sends(range(0), _bytes(state.rest), NOTHING))
            for part in state.parts.values() if state is not None else ():
                run(whole(part.movement, _GIVING, part.vector, None, sends))

    def ended(self) -> None:
        """Give nothing more: there is no further boundary between two steps. Replicas that wait are told so."""
        if self._transport is not None:
            with suppress(ServiceFailedError):  # then the connections are lost, which answers as well
                self._transport.give(0)

    def close(self) -> None:
        """Give nothing more, and end what is given."""
        self.ended()
        if self._sends is not None:
            self._sends.slots.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    # To take

    def take_over(
        self, keeper: Keeper, least: int, seconds: float, tell: Callable[[str], object]
    ) -> Taken | None:
        """Take the state of the replica that is furthest, else of the next one. A collective of the replica.

        A replica whose connection is lost meanwhile is asked once more, when it is there again.

        Args:
            least: local steps that a state must have.
            seconds: for a replica that trains to come to the next boundary between two local steps.
            tell: is called on the speaker with a line about each state that could not be taken.

        Returns None where there is none to take.
        """
        given_up, asked_again, again = set[int](), set[int](), None
        while True:
            started = time.monotonic()
            found, problem = found_by_rank_0(partial(self._choose, least, seconds, given_up, again))
            if found is not None:
                problem, size = self._take(keeper, *found)
                if problem is None:
                    return Taken(found[0], found[1].step, size, time.monotonic() - started)
            if problem is None:
                return None
            again = problem.slot if problem.may_pass and problem.slot not in asked_again else None
            if again is not None:
                asked_again.add(again)
                continue
            given_up.add(problem.slot)
            if self._asks is not None:
                tell(outside(f"the state of replica {problem.slot} was not taken over: {problem.why}"))

    def _choose(
        self, least: int, seconds: float, given_up: Collection[int], again: int | None
    ) -> tuple[tuple[int, Offer] | None, NotTaken | None]:
        """Do as `Asks.choose`, after a slot that was lost has had some seconds to come back."""
        assert self._asks is not None
        if again is not None:
            self._asks.wait_for(again)
        return self._asks.choose(least, seconds, given_up)

    def _take(self, keeper: Keeper, slot: int, offer: Offer) -> tuple[NotTaken | None, int]:
        """Return why a state could not be taken, alike on all ranks, and its bytes on this rank."""
        parts, rest, why = dict[str, Part](), b"", ""
        try:
            parts = keeper.room(offer.facts, offer.vectors)
        except ValueError as error:
            why = line_of(error)
        if whys := [text for text in of_all_ranks(why) if text]:
            return NotTaken(slot, whys[0]), 0
        receives, failure = None, None
        if self._transport is not None:
            receives = Receives(self._transport, slot, offer.tag, _SILENCE_SECONDS)
            failure, rest = self._rest(receives, offer.rest)
        for name in offer.vectors:
            moving = whole(parts[name].movement, _TAKING, None, parts[name].vector, receives)
            moving.failure = failure
            run(moving)
            failure = failure or moving.failure
        lost = isinstance(failure, ConnectionError)
        why, lost, rest = of_rank_0((line_of(failure) if failure else "", lost, rest))
        if not why:
            finite = all(bool(part.vector.isfinite().all()) for part in parts.values())
            why = "" if all(of_all_ranks(finite)) else "its numbers are not finite"
        if not why:
            try:
                keeper.use(State(offer.step, offer.facts, parts, rest))
            except ValueError as error:
                why = line_of(error)
            why = next((text for text in of_all_ranks(why) if text), "")
        size = sum(part.vector.nbytes for part in parts.values()) + len(rest)
        return (NotTaken(slot, why, lost) if why else None), size

    def _rest(self, receives: Receives, size: int) -> tuple[Exception | None, bytes]:
        place = torch.zeros(size, dtype=torch.uint8, device=HOST)
        if not size:
            return None, b""
        try:
            run(receives(range(0), NOTHING, place))
        except FAILURES as failure:
            return failure, b""
        return None, place.numpy().tobytes()


def _offer(tag: int, state: State | None) -> Offer:
    if state is None:
        return Offer(tag)
    return Offer(tag, state.step, state.facts, list(state.parts), len(state.rest))


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@contextmanager
def _complaining() -> Iterator[None]:
    """Write a line about what fails to stderr, and go on."""
    try:
        yield
    except Exception as error:
        sys.stderr.write(f"this rank's state cannot be given: {type(error).__name__}: {line_of(error)}\n")
