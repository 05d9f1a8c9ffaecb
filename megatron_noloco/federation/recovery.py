"""The state of a replica: one that trains gives it to another job out of its memory, whatever their layouts.

    giver                                       taker T
    sees the wish for "state/T/offer"           fetches "state/T/offer"
    at the next boundary between two local
    steps its ranks copy the state, train on
    offers what the state has (`Offer`)         allocates, and fetches the pieces in their order
    gathers each piece when it is wanted

A copy goes to all takers that waited for it, to one after the other at full speed. A taker whose connection is
lost fetches again what is missing. Leaders speak; all ranks of both replicas take part in the copy and move the
vectors (`gather`).
"""

import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Annotated, Any, NamedTuple, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_noloco.federation.gather import Gather, Leader, Transfer
from megatron_noloco.federation.members import LARGEST, Members, Text
from megatron_noloco.federation.mesh import Blob, LostError, Member, in_thread
from megatron_noloco.federation.movement import Movement
from megatron_noloco.federation.passing import Passed, contents, pass_on
from megatron_noloco.federation.states import (
    NotTakenError,
    State,
    StateAdapter,
    agreed,
    check_step,
)
from megatron_noloco.files import outside
from megatron_noloco.job.activity import line_of
from megatron_noloco.job.agreement import computed_by_rank_0, gather_from_all_ranks
from megatron_noloco.outer.payload import UnequalError

_ASKED = "state/"
_REST_BYTES = 2**22
_MOST_REST_BYTES = 2**30
_LONGEST_OFFER = 2**21  # bytes
_BOUNDARY_SECONDS = 600.0  # for a giver to come to the next boundary
_CLOSE_SECONDS = 5.0
_NO_STATE = "has no state to give"
_GIVING, _TAKING = 2**20, 2**20 + 2**10  # first tags inside the replica, beyond those of rounds


class Recovery(NamedTuple):
    """Whose state was taken over; its bytes on this rank, and how long it took."""

    slot: int
    step: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"recovered from replica {self.slot}: its state after local step {self.step}, "
            f"{self.bytes / 1e6:.1f} MB for this rank in {self.seconds:.1f} s"
        )


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants"))
class Offer:
    """What a state has.

    Attributes:
        copy: its number at the giver.
        facts: see `State`.
        vectors: their names.
        rest: bytes of what is no vector.
    """

    copy: Annotated[int, Field(ge=0, le=LARGEST)]
    step: Annotated[int, Field(gt=0, le=LARGEST)]
    facts: dict[str, Any]
    vectors: Annotated[list[Text], Field(max_length=64)]
    rest: Annotated[int, Field(ge=0, le=_MOST_REST_BYTES)]


_OFFER = TypeAdapter(Offer)
_Conversation = Generator[tuple[Offer, bytes], Any, None]


class States:
    """Gives the state of this replica to others that ask for it, and takes theirs.

    Args:
        members: of the leader; None on the other ranks.
        steps: local steps of the whole training; None: not known.

    Attributes:
        movement: of a state's vectors, as of those of rounds; `Membership.replica` sets it.
    """

    movement: Movement

    def __init__(self, members: Members | None, steps: int | None = None) -> None:
        self._members, self._steps = members, steps
        self._giving: Future[None] | None = None
        self._copies = count()
        self._closed = False

    # To give

    def trains_from(self, done: int) -> None:
        """Offer the state that this job will have at its first boundary, after `done` local steps.

        0: there is no further boundary.
        """
        if self._members is not None:
            self._members.step = done
            self._members.change()

    def wanted(self, done: int) -> list[Member]:
        """Return which members wait for the present state, if it can be copied now. On the leader."""
        assert self._members is not None
        self._members.check()
        self._members.step = done
        if self.is_giving:
            return []
        asked = self._members.mesh.offers.takers(_ASKED)
        return [taker for taker, name in asked if name == _asked(taker)]

    @property
    def is_giving(self) -> bool:
        """Whether a copy is under way."""
        return self._giving is not None and not self._giving.done()

    def give(self, keeper: StateAdapter, done: int, takers: list[Member]) -> bool:
        """Give the present state to the members that wait for it; return whether it could be copied.

        All ranks call it between the same two local steps, with those that `wanted` has returned.
        """
        state = None
        with _complaining():  # the training goes on, and the replicas that ask are answered
            state = keeper.copy(done)
        made = all(gather_from_all_ranks(state is not None))
        send = partial(self._send, state if made else None, takers)
        spawn = in_thread if self._members is None else self._members.mesh.spawn
        self._giving = spawn(send, "noloco-state")
        return made

    def close(self) -> None:
        """Give nothing more, and end what is given."""
        self._closed = True
        self.trains_from(0)
        if self._giving is not None:
            wait([self._giving], _CLOSE_SECONDS)

    def _send(self, state: State | None, takers: list[Member]) -> None:
        """Send a copy to takers, one after the other; a job of the sender's thread, on all ranks."""
        copy, members = next(self._copies), self._members
        with _complaining():
            if members is not None:
                offer = b"" if state is None else _offer_of(state, copy)
                for taker in takers:
                    members.mesh.offer(_asked(taker), offer)
            if state is not None:
                for taker in takers:
                    self._serve(taker, state, copy)
        if members is not None:
            for taker in takers:
                members.mesh.release(_asked(taker))

    def _serve(self, taker: Member, state: State, copy: int) -> None:
        """Pass a copy on to one taker."""
        gather, vectors = Gather(self.movement, _GIVING), state.vectors.values()
        with _finishing([gather.whole(vector, None) for vector in vectors]) as transfers:
            if self._members is not None:
                pieces = _pieces(state.rest, cast(list[Leader], transfers))
                with suppress(LostError):
                    base = f"{_ASKED}{taker}/{copy}/"
                    pass_on(self._members.mesh, taker, base, pieces, self._why_closed)

    def _why_closed(self) -> str:
        return "gives no state any more" * self._closed

    # To take

    def recover(self, keeper: StateAdapter, least: int, tell: Callable[[str], object]) -> Recovery | None:
        """Take the state of the replica that is furthest, else of the next one. A collective of the replica.

        Args:
            least: local steps that a state must have.
            tell: is called on the leader with a line about each state that could not be taken.

        Returns None where there is none to take.
        """
        given_up = set[int]()
        while True:
            started = time.monotonic()
            slot = computed_by_rank_0(partial(self._choose, least, given_up))
            if slot is None:
                return None
            try:
                step, size = self._take(slot, keeper, least)
            except NotTakenError as error:
                given_up.add(slot)
                if self._members is not None:
                    tell(outside(f"the state of replica {slot} was not taken over: {error}"))
            else:
                return Recovery(slot, step, size, time.monotonic() - started)

    def _choose(self, least: int, given_up: Collection[int]) -> int | None:
        """Return the slot whose state to take; None: there is no such, or this job is to stop. On the leader."""
        assert self._members is not None
        steps = {slot: peer.status.step for slot, peer in self._members.peers().items() if peer.reached}
        if self._steps is not None:  # a step that nobody can have is a lie
            steps = {slot: step for slot, step in steps.items() if step <= self._steps}
        return None if self._members.is_leaving else furthest(steps, self._members.slot, least, given_up)

    def _take(self, slot: int, keeper: StateAdapter, least: int) -> tuple[int, int]:
        """Take the state of a replica, as a whole; return its local step, and its bytes on this rank.

        A collective; raises NotTakenError on all ranks.
        """
        conversation = self._receive(slot, least)
        offer, rest = self._go_on(conversation, None)
        gather = Gather(self.movement, _TAKING)
        try:
            vectors = agreed(lambda: keeper.allocate(offer.facts, offer.vectors))
        except NotTakenError as error:
            self._go_on(conversation, error)
            raise
        with _finishing([gather.whole(None, vectors[name]) for name in offer.vectors]) as transfers:
            self._go_on(conversation, transfers)
        agreed(lambda: keeper.load(State(offer.step, offer.facts, vectors, rest)))
        return offer.step, sum(vector.nbytes for vector in vectors.values()) + len(rest)

    def _receive(self, slot: int, least: int) -> _Conversation:
        """Ask for a state; yield what is before its vectors, and be sent where these go, or why nowhere."""
        assert self._members is not None
        mesh, peer = self._members.mesh, self._members.peer(slot)
        if peer is None:
            raise NotTakenError("it is not there any more")
        fetch, until = mesh.begin(peer.member, _asked(mesh.me)), mesh.clock() + _BOUNDARY_SECONDS
        content = bytes(mesh.result(fetch, until, partial(self._why_no_state, slot)))
        if not content:
            raise NotTakenError("cannot give its state")
        try:
            offer = _OFFER.validate_json(content if len(content) <= _LONGEST_OFFER else b"")
        except ValidationError:
            raise NotTakenError("what it offers is no state") from None
        check_step(offer.step, least, self._steps)
        base = f"{_ASKED}{mesh.me}/{offer.copy}/"
        passed = Passed(mesh, peer.member, base, self._members.why_stopped)
        rest = bytearray()
        for piece in passed.pieces(-(-offer.rest // _REST_BYTES)):
            if len(piece) != min(_REST_BYTES, offer.rest - len(rest)):
                raise UnequalError
            rest += piece
        transfers = yield offer, bytes(rest)
        if isinstance(transfers, NotTakenError):
            raise transfers
        for transfer in cast(list[Leader], transfers):
            passed.into(transfer)
        passed.end()

    def _why_no_state(self, slot: int) -> str:
        """Return why a replica gives no state; "" while it may."""
        assert self._members is not None
        peer = self._members.peer(slot)
        has_state = peer is not None and peer.status.step
        return self._members.why_stopped() or _NO_STATE * (not has_state)

    def _go_on(self, conversation: _Conversation, answer: object) -> Any:
        """Continue the leader's conversation; return on all ranks what it yields. Raises NotTakenError on all."""

        def lead() -> object:
            try:
                return conversation.send(answer)
            except StopIteration:
                return None
            except NotTakenError as error:
                return error
            except UnequalError:
                return NotTakenError("it has another length than it says")
            except LostError as error:
                return NotTakenError(line_of(error))

        found = computed_by_rank_0(lead)
        if isinstance(found, NotTakenError):
            raise found
        return found


def furthest(steps: Mapping[int, int], own: int, least: int, given_up: Collection[int] = ()) -> int | None:
    """Return the slot that can give the latest step; of several, the next one after this job's. None: no slot.

    Args:
        steps: that each slot can give.
        own: slot of this job.
        least: the first step that is worth taking, above 0.
        given_up: slots not to be asked again.
    """
    found = [slot for slot, step in steps.items() if step >= least and slot not in given_up]
    return min(found, key=lambda slot: (-steps[slot], slot < own, slot), default=None)


def _asked(taker: Member) -> str:
    return f"{_ASKED}{taker}/offer"


def _pieces(rest: bytes, transfers: Sequence[Leader]) -> Iterator[Blob]:
    for start in range(0, len(rest), _REST_BYTES):
        yield rest[start : start + _REST_BYTES]
    for transfer in transfers:
        yield from contents(transfer)


def _offer_of(state: State, copy: int) -> bytes:
    return _OFFER.dump_json(Offer(copy, state.step, state.facts, list(state.vectors), len(state.rest)))


@contextmanager
def _finishing(transfers: list[Transfer]) -> Iterator[list[Transfer]]:
    """Bring transfers to their end after the block, whatever has happened in it."""
    try:
        yield transfers
    finally:
        for transfer in transfers:
            transfer.wait()


@contextmanager
def _complaining() -> Iterator[None]:
    """Write a line about what fails to stderr, and go on."""
    try:
        yield
    except Exception as error:
        sys.stderr.write(f"this rank's state cannot be given: {type(error).__name__}: {line_of(error)}\n")
