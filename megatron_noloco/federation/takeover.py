"""The state of a replica: one that trains gives it to another job out of its memory, whatever their layouts.

    taker (`_receive`)                      giver (`_give`)
    opens a stream, of the kind "state"     waits for the next boundary between two local steps
                                            its ranks copy the state, and train on
    receives the offer, the rest,           sends what the state has (`Offer`), what is no vector,
    each vector in buckets                  and each vector in buckets
    says that it has everything

Several takers get one copy, bucket by bucket at the same time (`delivery`). Leaders speak; all ranks of both
replicas take part in the copy and move the vectors (`gather`).
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from megatron_noloco.federation.delivery import (
    COME_SECONDS,
    EVERYTHING,
    NOT_COME,
    Taker,
    part_with,
    pass_on,
    receive_vector,
)
from megatron_noloco.federation.gather import Gather, Leader, Transfer
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.messages import LARGEST, Text, packed, receive_json
from megatron_noloco.federation.movement import Movement
from megatron_noloco.federation.node_thread import NodeThread, ThreadFailedError
from megatron_noloco.federation.states import NotTakenError, State, StateAdapter
from megatron_noloco.federation.streams import Stream, StreamEndedError, within
from megatron_noloco.files import outside
from megatron_noloco.job.activity import line_of
from megatron_noloco.job.agreement import computed_by_rank_0, gather_from_all_ranks

STATE = "state"  # the kind of conversation
_BACK_SECONDS = 10.0  # for a replica that was lost to come back
_GIVING, _TAKING = 2**20, 2**20 + 2**10  # first tags inside the replica, beyond those of rounds
_LONGEST_OFFER = 2**21  # bytes
_NO_STATE = "has no state to give"
Value = TypeVar("Value")


class Takeover(NamedTuple):
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


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants"))
class Offer:
    """What a state has that follows.

    Attributes:
        facts: see `State`.
        vectors: their names.
        rest: bytes of what is no vector.
    """

    step: Annotated[int, Field(gt=0, le=LARGEST)]
    facts: dict[str, Any]
    vectors: Annotated[list[Text], Field(max_length=64)]
    rest: Annotated[int, Field(ge=0, le=2**30)]


_OFFER = TypeAdapter(Offer)
_Conversation = AsyncGenerator[tuple[Offer, bytes], Any]


class TakeOver:
    """Gives the state of this replica to others that ask for it, and takes theirs.

    Args:
        thread: of the leader; None on the other ranks.

    Attributes:
        movement: of a state's vectors, as of those of rounds; `Membership.replica` sets it.
    """

    movement: Movement

    def __init__(self, thread: NodeThread | None) -> None:
        self._thread = thread
        self._sender = ThreadPoolExecutor(1, "noloco-state")
        self._giving: Future[None] | None = None
        self._waiting = list[Taker]()  # used by the loop, but for a look whether there are any
        self._given = list[Taker]()  # to whom the copy goes
        if thread is not None:
            thread.node.serves[STATE] = self._serve

    # To give

    def trains_from(self, done: int) -> None:
        """Offer the state that this job will have at its first boundary, after `done` local steps.

        0: there is no further boundary, and replicas that wait are told so.
        """
        if self._thread is not None:
            self._thread.do(self._set_step, done)

    def wanted(self, done: int) -> bool:
        """Return whether replicas wait for the present state, and it can be copied now. On the leader."""
        assert self._thread is not None
        self._thread.check()
        if done != self._thread.node.step:
            self._thread.do(self._set_step, done)
        return bool(self._waiting) and (self._giving is None or self._giving.done())

    def give(self, keeper: StateAdapter, done: int) -> bool:
        """Give the present state to the replicas that wait for it; return whether it could be copied.

        All ranks call it between the same two local steps, where it is `wanted`.
        """
        state = None
        with _complaining():  # the training goes on, and the replicas that ask are answered
            state = keeper.copy(done)
        made = all(gather_from_all_ranks(state is not None))
        self._giving = self._sender.submit(self._send, state if made else None)
        return made

    def close(self) -> None:
        """Give nothing more, and end what is given."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._thread.do(self._end)
        self._sender.shutdown(wait=True, cancel_futures=True)

    async def _serve(self, link: Link, stream: Stream) -> None:
        assert self._thread is not None
        if not self._thread.node.step:
            raise StreamEndedError(_NO_STATE)
        taker = Taker(stream)
        self._waiting.append(taker)
        await taker.over.wait()

    def _set_step(self, step: int) -> None:
        assert self._thread is not None
        self._thread.node.step = step
        if not step:
            _refuse(self._waiting, _NO_STATE)

    def _end(self) -> None:
        self._set_step(0)
        _refuse(self._given, "gives no state any more")

    def _send(self, state: State | None) -> None:
        """Send a copy to all that wait; a job of the sender's thread, on all ranks."""
        with _complaining(), suppress(ThreadFailedError):
            gather, vectors = (
                Gather(self.movement, _GIVING),
                state.vectors.values() if state is not None else (),
            )
            with _finishing([gather.whole(vector, None) for vector in vectors]) as transfers:
                if self._thread is not None:
                    self._thread.call(self._give(state, transfers)).result()

    async def _give(self, state: State | None, transfers: Iterable[Transfer]) -> None:
        takers, self._waiting = self._waiting, []
        self._given = takers
        try:
            if state is not None:
                offer = packed(_OFFER, Offer(state.step, state.facts, list(state.vectors), len(state.rest)))
                await asyncio.gather(*(taker.send(offer, state.rest) for taker in takers))
                for transfer in transfers:
                    await pass_on(takers, cast(Leader, transfer))
                await part_with(takers)
        finally:
            _refuse(takers, "cannot give its state")

    # To take

    def take_over(
        self, keeper: StateAdapter, least: int, seconds: float, tell: Callable[[str], object]
    ) -> Takeover | None:
        """Take the state of the replica that is furthest, else of the next one. A collective of the replica.

        A replica whose connection is lost meanwhile is asked once more, when it is there again.

        Args:
            least: local steps that a state must have.
            seconds: for a replica that trains to come to the next boundary between two local steps.
            tell: is called on the leader with a line about each state that could not be taken.

        Returns None where there is none to take.
        """
        given_up, lost, again = set[int](), set[int](), None
        while True:
            started = time.monotonic()
            slot = computed_by_rank_0(partial(self._choose, least, given_up, again))
            if slot is None:
                return None
            try:
                step, size = self._take(slot, keeper, least, seconds)
            except NotTakenError as error:
                again = slot if error.is_lost and slot not in lost else None
                if again is not None:
                    lost.add(slot)
                    continue
                given_up.add(slot)
                if self._thread is not None:
                    tell(outside(f"the state of replica {slot} was not taken over: {error}"))
            else:
                return Takeover(slot, step, size, time.monotonic() - started)

    def _choose(self, least: int, given_up: Collection[int], again: int | None) -> int | None:
        """Return the slot whose state to take; None: there is no such, or this job is to stop. On the leader."""
        assert self._thread is not None
        node = self._thread.node
        if again is not None:
            self._thread.wait(lambda: again in node.present(), _BACK_SECONDS)
        steps = {slot: status.step for slot, status in node.present().items()}
        return None if node.is_leaving else furthest(steps, node.slot, least, given_up)

    def _take(self, slot: int, keeper: StateAdapter, least: int, seconds: float) -> tuple[int, int]:
        """Take the state of a replica, as a whole; return its local step, and its bytes on this rank.

        A collective; raises NotTakenError on all ranks.
        """
        conversation = self._receive(slot, least, seconds)
        offer, rest = self._go_on(conversation, None)
        gather = Gather(self.movement, _TAKING)
        try:
            vectors = _agreed(lambda: keeper.allocate(offer.facts, offer.vectors))
        except NotTakenError as error:
            self._go_on(conversation, error)
            raise
        with _finishing([gather.whole(None, vectors[name]) for name in offer.vectors]) as transfers:
            self._go_on(conversation, transfers)
        if not all(gather_from_all_ranks(all(bool(vector.isfinite().all()) for vector in vectors.values()))):
            raise NotTakenError("its numbers are not finite")
        _agreed(lambda: keeper.load(State(offer.step, offer.facts, vectors, rest)))
        return offer.step, sum(vector.nbytes for vector in vectors.values()) + len(rest)

    async def _receive(self, slot: int, least: int, seconds: float) -> _Conversation:
        """Ask for a state; yield what is before its vectors, and be sent where these go, or why nowhere."""
        assert self._thread is not None
        async with AsyncExitStack() as stack:
            async with within(seconds, f"it has not answered for {seconds:g} s"):
                stream = await stack.enter_async_context(self._thread.node.links[slot].open(STATE))
                offer = await receive_json(stream, _OFFER, _LONGEST_OFFER)
            async with within(COME_SECONDS, NOT_COME):
                rest = await stream.receive(offer.rest)
            if offer.step < least:
                raise NotTakenError(f"it is at local step {offer.step} by now, as it was started anew")
            transfers = yield offer, rest
            if isinstance(transfers, NotTakenError):
                raise transfers
            for transfer in transfers:
                await receive_vector(stream, cast(Leader, transfer))
            await stream.send(EVERYTHING)

    def _go_on(self, conversation: _Conversation, answer: object) -> Any:
        """Continue the leader's conversation; return on all ranks what it yields. Raises NotTakenError on all."""

        async def step() -> object:
            try:
                return await conversation.asend(answer)
            except StopAsyncIteration:
                return None
            except NotTakenError as error:
                return error
            except (ConnectionError, TimeoutError) as error:
                return NotTakenError(line_of(error), isinstance(error, ConnectionError))

        def lead() -> object:
            assert self._thread is not None
            return self._thread.call(step()).result()

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


def _refuse(takers: Iterable[Taker], reason: str) -> None:
    for taker in takers:
        taker.refuse(reason)


def _agreed(work: Callable[[], Value]) -> Value:
    """Do something on all ranks. Raises NotTakenError on all where it raises it on any. A collective."""
    found, why = list[Value](), ""
    try:
        found.append(work())
    except NotTakenError as error:
        why = line_of(error)
    for text in gather_from_all_ranks(why):
        if text:
            raise NotTakenError(text)
    return found[0]


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
