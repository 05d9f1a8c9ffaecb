"""The state of a replica: one that trains gives it to another job out of its memory, whatever their layouts.

    giver                                       taker T
    sees the wish for "state/T/offer"           asks the replica that is furthest for "state/T/offer", each minute
    at the next boundary between two local      also the next one, and takes the first offer
    steps its ranks copy the state, train on
    in T's turn offers what the state has       allocates, and fetches "state/T/COPY/0", "1", ... in order
    gathers each piece when it is wanted

A copy goes to all takers that waited for it, to one after the other at full speed. A taker whose connection is
lost fetches again what is missing. Leaders speak; all ranks of both replicas take part in the copy and move the
vectors (`gather`).
"""

import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Annotated, Any, NamedTuple, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_noloco.federation.codes import bytes_of, fill
from megatron_noloco.federation.gather import Gather, Leader, Transfer
from megatron_noloco.federation.members import STOPPED, Members
from megatron_noloco.federation.mesh import Blob, Fetch, LostError, Member, Patience, in_thread
from megatron_noloco.federation.movement import Movement
from megatron_noloco.federation.states import (
    NotTakenError,
    State,
    StateAdapter,
    agreed,
    check_step,
)
from megatron_noloco.federation.statuses import LARGEST, Text
from megatron_noloco.files import outside
from megatron_noloco.job.activity import line_of
from megatron_noloco.job.agreement import computed_by_rank_0, gather_from_all_ranks
from megatron_noloco.outer.payload import UnequalError

_ASKED = "state/"
_REST_BYTES = 2**22  # of a piece
_MOST_REST_BYTES = 2**30
_LONGEST_OFFER = 2**21  # bytes
_WINDOW = 4  # pieces that a taker asks for at a time
_ASK_SECONDS = 60.0  # for a giver to begin, before the next one is asked as well
_TURN_SECONDS = 3600.0  # for any giver to begin: other takers may have their turn before
_PIECE_SECONDS = 120.0  # for a piece of 8 MiB: half a Mbit/s; a giver that was lost has what is left of them
_BACK_SECONDS = 60.0  # for a member that was lost to come back
_CLOSE_SECONDS = 5.0
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
    """What a state has: facts (see `State`), names of vectors, and how many bytes the rest has."""

    base: Annotated[str, Field(pattern=r"^\d{1,16}/$")]  # of the names of its pieces
    step: Annotated[int, Field(gt=0, le=LARGEST)]
    facts: dict[str, Any]
    vectors: Annotated[list[Text], Field(max_length=64)]
    rest: Annotated[int, Field(ge=0, le=_MOST_REST_BYTES)]


_OFFER = TypeAdapter(Offer)


class States:
    """Gives the state of this replica to others that ask for it, and takes theirs.

    Args:
        members: of the leader; None on the other ranks.
        steps: local steps of the whole training; None: not known.

    Attributes:
        movement: of a state's vectors, as of those of rounds; `Membership.replica` sets it.
    """

    movement: Movement
    _answer: Blob | LostError

    def __init__(self, members: Members | None, steps: int | None = None) -> None:
        self._members, self._steps = members, steps
        self._giving: Future[None] | None = None
        self._copies = count()
        self._closed = False

    # To give

    def can_give(self, done: int) -> None:
        """Tell the others that this replica can give its state after `done` local steps; 0: it gives none."""
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
        self.can_give(0)
        if self._giving is not None:
            wait([self._giving], _CLOSE_SECONDS)

    def _send(self, state: State | None, takers: list[Member]) -> None:
        """Send a copy to takers, one after the other; a job of the sender's thread, on all ranks."""
        members, base = self._members, f"{next(self._copies)}/"
        with _complaining():
            for taker in takers:
                if members is not None:
                    members.mesh.offer(_asked(taker), b"" if state is None else _offer_of(state, base))
                if state is not None:
                    gather, vectors = Gather(self.movement, _GIVING), state.vectors.values()
                    with _finishing([gather.whole(vector, None) for vector in vectors]) as transfers:
                        if members is not None:
                            pieces = _pieces(state.rest, cast(Sequence[Leader], transfers))
                            self._pass_on(members, taker, f"{_ASKED}{taker}/{base}", pieces)
        if members is not None:
            if state is None:  # the word that there is no state is under way
                members.mesh.wait(lambda: self._closed, members.mesh.clock() + _CLOSE_SECONDS)
            for taker in takers:
                members.mesh.offers.release(_asked(taker))

    def _pass_on(self, members: Members, taker: Member, base: str, pieces: Iterator[Blob]) -> None:
        """Offer each piece when the taker wants it, until it has all, or wants nothing for a minute."""
        mesh = members.mesh
        patience = Patience(
            mesh,
            taker,
            seconds=_BACK_SECONDS,
            absent_seconds=_BACK_SECONDS,
            why_not=lambda: STOPPED * self._closed,
        )
        try:
            for number, piece in enumerate(pieces):
                wish = taker, f"{base}{number}"
                patience.wait(lambda wish=wish: wish in mesh.offers.takers(base))  # type: ignore[misc]
                mesh.offer(wish[1], piece)
                mesh.offers.release(f"{base}{number - _WINDOW}")
        except LostError:
            pass
        finally:
            mesh.offers.withdraw(base)

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
            giver = computed_by_rank_0(partial(self._find, least, given_up))
            if giver is None:
                return None
            try:
                offer = computed_by_rank_0(partial(self._read, least), NotTakenError)
                size = self._take(giver, offer, keeper)
            except NotTakenError as error:
                given_up.add(giver.slot)
                if self._members is not None:
                    tell(outside(f"the state of replica {giver.slot} was not taken over: {error}"))
            else:
                return Recovery(giver.slot, offer.step, size, time.monotonic() - started)

    def _find(self, least: int, given_up: Collection[int]) -> Member | None:
        """Ask for a state; return who has answered first, with `_answer`. On the leader.

        None: there is no state to take, or this job is to stop. A giver that is lost may come back for a minute.
        """
        assert self._members is not None
        members, mesh, asked = self._members, self._members.mesh, dict[Member, Fetch]()
        until, more_at, reached_at = mesh.clock() + _TURN_SECONDS, -math.inf, -math.inf
        try:
            while not members.is_leaving and (at := mesh.clock()) < until:
                if is_waiting := any(map(mesh.reaches, asked)):
                    reached_at = at
                givers = [giver for giver in self._givers(least, given_up) if giver not in asked]
                if givers and not (is_waiting and at < more_at):
                    asked[givers[0]] = mesh.begin(givers[0], _asked(mesh.me))
                    more_at, reached_at = at + _ASK_SECONDS, at
                    if members.status.phase == "training":  # or a giver could wait for this replica
                        members.go_on(-1, "behind")
                elif not any(map(mesh.may_come, asked)) or at > reached_at + _BACK_SECONDS:
                    return None
                mesh.wait(lambda: any(fetch.outcome is not None for fetch in asked.values()), at + 1.0)
                for giver, fetch in asked.items():
                    if fetch.outcome is not None:
                        self._answer = fetch.outcome
                        return giver
            return None
        finally:
            for fetch in asked.values():
                mesh.cancel(fetch)

    def _givers(self, least: int, given_up: Collection[int]) -> list[Member]:
        """Return the members that have a state to give: the furthest first, of several the next one."""
        assert self._members is not None
        peers = {slot: peer for slot, peer in self._members.peers().items() if peer.reached}
        steps = {slot: peer.status.step for slot, peer in peers.items()}
        if self._steps is not None:  # a step that nobody can have is a lie
            steps = {slot: step for slot, step in steps.items() if step <= self._steps}
        found = furthest(steps, self._members.slot, least, given_up)
        found.sort(key=lambda slot: not peers[slot].status.mean.final)  # where there is a final model, that
        return [peers[slot].member for slot in found]

    def _read(self, least: int) -> Offer:
        """Return the offer that has come; raises NotTakenError where it is none. On the leader."""
        answer = self._answer
        if isinstance(answer, LostError):
            raise NotTakenError(line_of(answer))
        if not answer:
            raise NotTakenError("cannot give its state")
        try:
            offer = _OFFER.validate_json(bytes(answer) if len(answer) <= _LONGEST_OFFER else b"")
        except ValidationError:
            raise NotTakenError("what it offers is no state") from None
        check_step(offer.step, least, self._steps)
        return offer

    def _take(self, giver: Member, offer: Offer, keeper: StateAdapter) -> int:
        """Take a state, as a whole; return its bytes on this rank.

        A collective; raises NotTakenError on all ranks.
        """
        gather = Gather(self.movement, _TAKING)
        vectors = agreed(lambda: keeper.allocate(offer.facts, offer.vectors))
        with _finishing([gather.whole(None, vectors[name]) for name in offer.vectors]) as transfers:
            receive = partial(self._receive, giver, offer, cast(Sequence[Leader], transfers))
            rest = computed_by_rank_0(receive, NotTakenError)
        agreed(lambda: keeper.load(State(offer.step, offer.facts, vectors, rest)))
        return sum(vector.nbytes for vector in vectors.values()) + len(rest)

    def _receive(self, giver: Member, offer: Offer, transfers: Sequence[Leader]) -> bytes:
        """Fetch a state, and hand its vectors out; return what is no vector. On the leader.

        Raises NotTakenError where it does not come as a whole.
        """
        sizes = [min(_REST_BYTES, offer.rest - start) for start in range(0, offer.rest, _REST_BYTES)]
        buckets = [(transfer, at) for transfer in transfers for at in range(len(transfer.buckets))]
        assert self._members is not None
        mesh, number = self._members.mesh, len(sizes) + len(buckets)
        base = f"{_ASKED}{mesh.me}/{offer.base}"
        pieces = self._fetch(giver, base, number)
        rest = bytearray()
        try:
            for size in sizes:
                rest += (piece := next(pieces))
                if len(piece) != size:
                    raise UnequalError
            for transfer, at in buckets:
                result = transfer.result(at)
                fill([result], next(pieces))
                transfer.hand_out(at, result)
            with suppress(LostError):  # it may be withdrawn at once: the wish says that all has come
                mesh.fetch(giver, f"{base}{number}")
        except UnequalError:
            raise NotTakenError("it has another length than it says") from None
        except LostError as error:
            raise NotTakenError(line_of(error)) from None
        return bytes(rest)

    def _fetch(self, giver: Member, base: str, number: int) -> Iterator[Blob]:
        """Yield pieces in order. Raises LostError; a giver that was lost for less than a minute goes on."""
        assert self._members is not None
        mesh = self._members.mesh
        came = mesh.clock()
        patience = Patience(
            mesh,
            giver,
            end_by=lambda: came + _PIECE_SECONDS,
            seconds=_PIECE_SECONDS,
            absent_seconds=_BACK_SECONDS,
            why_not=self._members.why_stopped,
        )
        for piece in mesh.fetch_all((f"{base}{at}" for at in range(number)), _WINDOW, patience):
            yield piece
            came = mesh.clock()


def furthest(steps: Mapping[int, int], own: int, least: int, given_up: Collection[int] = ()) -> list[int]:
    """Return the slots that can give a state, the latest first; of several, the next one after this job's.

    Args:
        steps: that each slot can give.
        own: slot of this job.
        least: the first step that is worth taking, above 0.
        given_up: slots not to be asked again.
    """
    found = [slot for slot, step in steps.items() if step >= least and slot not in given_up]
    return sorted(found, key=lambda slot: (-steps[slot], slot < own, slot))


def _asked(taker: Member) -> str:
    return f"{_ASKED}{taker}/offer"


def _pieces(rest: bytes, transfers: Sequence[Leader]) -> Iterator[Blob]:
    for start in range(0, len(rest), _REST_BYTES):
        yield rest[start : start + _REST_BYTES]
    for transfer in transfers:
        for at in range(len(transfer.buckets)):
            yield bytes_of(transfer.content(at))
    yield b""


def _offer_of(state: State, base: str) -> bytes:
    return _OFFER.dump_json(Offer(base, state.step, state.facts, list(state.vectors), len(state.rest)))


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
