"""The state of a replica: one that trains gives it to another job out of its memory, whatever their layouts.

    taker                                   giver
    opens a stream, of the kind "state"     waits for the next boundary between two local steps
                                            its ranks copy the state, and train on
    receives the offer, the rest,           sends what the state has (`Offer`), what is no vector,
    each vector in slabs                    and each vector in slabs
    says that it has everything

Several takers get one copy, slab by slab at the same time. A taker that does not take a slab in time is given up.
Leaders speak; all ranks of both replicas take part in the copy and move the vectors (`gather`).
"""

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Annotated, Any, NamedTuple, Protocol, cast

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from torch import Tensor

from megatron_noloco.errors import UserError
from megatron_noloco.federation.gather import Gather, Leader, bytes_of
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.messages import LARGEST, Text, receive_json, send_json
from megatron_noloco.federation.movement import Movement
from megatron_noloco.federation.node_thread import NodeThread, ThreadFailedError
from megatron_noloco.federation.streams import Stream, StreamEndedError
from megatron_noloco.files import outside
from megatron_noloco.job.activity import line_of
from megatron_noloco.job.agreement import found_by_rank_0, of_all_ranks, of_rank_0

STATE = "state"  # the kind of conversation
FAST_WEIGHTS = "fast_weights"  # the part that every state has beside those of the outer optimizer
_SLAB_SECONDS = 60.0  # for the other side to send a slab, or to take it
_BACK_SECONDS = 10.0  # for a replica that was lost to come back
_GIVING, _TAKING = 2**20, 2**20 + 2**10  # first tags inside the replica, beyond those of rounds
EVERYTHING = b"!"
_LONGEST_OFFER = 2**21  # bytes


class Part(NamedTuple):
    """What this rank has of a canonical vector, fp32 in host memory; `movement` says where its elements lie."""

    vector: Tensor
    movement: Movement


class State(NamedTuple):
    """The state of a replica after `step` local steps, as one of its ranks has it.

    Attributes:
        facts: for JSON; the leader's are given.
        parts: by name; all ranks have the same names in the same order.
        rest: what is no such vector; the leader's is given.
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


class _NotTaken(NamedTuple):
    """Why the state of a slot was not taken, and whether the slot may be asked again."""

    slot: int
    why: str
    is_lost: bool = False


class Taker:
    """A replica that waits for vectors: its stream, and when the conversation is over."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.over = stream, asyncio.Event()

    async def send(self, *buffers: memoryview | bytes) -> None:
        """Send, or give the taker up."""
        if not self.over.is_set():
            try:
                async with asyncio.timeout(_SLAB_SECONDS):
                    await self.stream.send(*buffers)
            except (ConnectionError, TimeoutError) as error:
                self.refuse(line_of(error) or "takes a state too slowly")

    def refuse(self, reason: str) -> None:
        self.stream.abort(reason)
        self.over.set()


class TakeOver:
    """Gives the state of this replica to others that ask for it, and takes theirs.

    Args:
        thread: of the leader; None on the other ranks.
    """

    def __init__(self, thread: NodeThread | None) -> None:
        self._thread = thread
        self._giver = ThreadPoolExecutor(1, "noloco-state")
        self._giving: Future[None] | None = None
        self._waiting = list[Taker]()  # used by the loop, but for a look whether there are any
        self._given = list[Taker]()  # to whom the copy goes
        self._stream: Stream  # of the state that is taken, and what ends it
        self._taken: AsyncExitStack
        if thread is not None:
            thread.node.serves[STATE] = self._serve

    # To give

    def trains_from(self, done: int) -> None:
        """Offer the state that this job will have at its first boundary, after `done` local steps."""
        if self._thread is not None:
            self._thread.do(self._set_step, done)

    def wanted(self, done: int) -> bool:
        """Return whether replicas wait for the present state, and it can be copied now. On the leader."""
        assert self._thread is not None
        self._thread.check()
        if done != self._thread.node.step:
            self._thread.do(self._set_step, done)
        return bool(self._waiting) and (self._giving is None or self._giving.done())

    def give(self, copy: Callable[[], State]) -> bool:
        """Give the present state to the replicas that wait for it; return whether it could be copied.

        All ranks call it between the same two local steps, where it is `wanted`.
        """
        state = None
        with _complaining():  # the training goes on, and the replicas that ask are answered
            state = copy()
        made = all(of_all_ranks(state is not None))
        self._giving = self._giver.submit(self._send, state if made else None)
        return made

    def ended(self) -> None:
        """Give nothing more: there is no further boundary between two steps. Replicas that wait are told so."""
        self.trains_from(0)

    def close(self) -> None:
        """Give nothing more, and end what is given."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._thread.do(self._end)
        self._giver.shutdown(wait=True, cancel_futures=True)

    async def _serve(self, link: Link, stream: Stream) -> None:
        assert self._thread is not None
        if not self._thread.node.step:
            raise StreamEndedError("has no state to give")
        taker = Taker(stream)
        self._waiting.append(taker)
        await taker.over.wait()

    def _set_step(self, step: int) -> None:
        assert self._thread is not None
        self._thread.node.step = step
        if not step:
            for taker in self._waiting:
                taker.refuse("has no state to give")

    def _end(self) -> None:
        self._set_step(0)
        for taker in self._given:
            taker.refuse("gives no state any more")

    def _send(self, state: State | None) -> None:
        """Send a copy to all that wait; a job of the giver's thread, on all ranks."""
        thread = self._thread
        with _complaining(), suppress(ThreadFailedError):
            takers = [] if thread is None else thread.call(self._offer(state)).result()
            for number, part in enumerate(state.parts.values() if state is not None else ()):
                transfer = Gather(part.movement, _GIVING + number).whole(part.vector, None)
                if thread is not None:
                    thread.call(pass_on(takers, cast(Leader, transfer))).result()
                transfer.wait()
            if thread is not None:
                thread.call(part_with(takers)).result()

    async def _offer(self, state: State | None) -> list[Taker]:
        takers, self._waiting = self._waiting, []
        self._given = takers
        if state is None:
            for taker in takers:
                taker.refuse("cannot give its state")
            return []
        offer = Offer(state.step, state.facts, list(state.parts), len(state.rest))
        await asyncio.gather(*(_begin(taker, offer, state.rest) for taker in takers))
        return takers

    # To take

    def take_over(
        self, keeper: Keeper, least: int, seconds: float, tell: Callable[[str], object]
    ) -> Taken | None:
        """Take the state of the replica that is furthest, else of the next one. A collective of the replica.

        A replica whose connection is lost meanwhile is asked once more, when it is there again.

        Args:
            least: local steps that a state must have.
            seconds: for a replica that trains to come to the next boundary between two local steps.
            tell: is called on the leader with a line about each state that could not be taken.

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
            again = problem.slot if problem.is_lost and problem.slot not in asked_again else None
            if again is not None:
                asked_again.add(again)
                continue
            given_up.add(problem.slot)
            if self._thread is not None:
                tell(outside(f"the state of replica {problem.slot} was not taken over: {problem.why}"))

    def _choose(
        self, least: int, seconds: float, given_up: Collection[int], again: int | None
    ) -> tuple[tuple[int, Offer, bytes] | None, _NotTaken | None]:
        """Ask the replica that is furthest for its state; return slot, offer and rest, or why there is none.

        Neither is there where no replica has such a state, or this job is to stop.
        """
        thread = self._thread
        assert thread is not None
        if again is not None:
            thread.wait(lambda: again in thread.node.present(), _BACK_SECONDS)
        steps = {slot: status.step for slot, status in thread.node.present().items()}
        slot = furthest(steps, thread.node.slot, least, given_up)
        if slot is None or thread.node.is_leaving:
            return None, None
        try:
            offer, rest = thread.call(self._ask(slot, seconds)).result()
        except (ConnectionError, TimeoutError) as error:
            reason = line_of(error) or f"it has not answered for {seconds:g} s"
            return None, _NotTaken(slot, reason, isinstance(error, ConnectionError))
        if offer.step < least:
            thread.call(self._taken.aclose()).result()
            why = f"it is at local step {offer.step} by now, as it was started anew"
            return None, _NotTaken(slot, why)
        return (slot, offer, rest), None

    async def _ask(self, slot: int, seconds: float) -> tuple[Offer, bytes]:
        """Open a stream, which stays open in `_taken`, and receive what is before the vectors."""
        assert self._thread is not None
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(seconds):
                stream = await stack.enter_async_context(self._thread.node.links[slot].open(STATE))
                offer = await receive_json(stream, _OFFER, _LONGEST_OFFER)
            async with asyncio.timeout(_SLAB_SECONDS):
                rest = await stream.receive(offer.rest)
            self._stream, self._taken = stream, stack.pop_all()
        return offer, rest

    def _take(self, keeper: Keeper, slot: int, offer: Offer, rest: bytes) -> tuple[_NotTaken | None, int]:
        """Return why a state could not be taken, alike on all ranks, and its bytes on this rank."""
        parts, why = dict[str, Part](), ""
        try:
            parts = keeper.room(offer.facts, offer.vectors)
        except UserError as error:
            why = line_of(error)
        whys = [text for text in of_all_ranks(why) if text]
        failure: BaseException | None = StreamEndedError(whys[0]) if whys else None
        for number, name in enumerate(offer.vectors if failure is None else ()):
            transfer = Gather(parts[name].movement, _TAKING + number).whole(None, parts[name].vector)
            if self._thread is not None and failure is None:
                failure = self._received(cast(Leader, transfer))
            transfer.wait()
        if self._thread is not None:
            failure = self._thread.call(self._end_stream(failure)).result()
        is_lost = isinstance(failure, ConnectionError) and not whys
        why, is_lost = of_rank_0((str(failure) if failure is not None else "", is_lost))
        if not why:
            finite = all(bool(part.vector.isfinite().all()) for part in parts.values())
            why = "" if all(of_all_ranks(finite)) else "its numbers are not finite"
        if not why:
            try:
                keeper.use(State(offer.step, offer.facts, parts, rest))
            except UserError as error:
                why = line_of(error)
            why = next((text for text in of_all_ranks(why) if text), "")
        size = sum(part.vector.nbytes for part in parts.values()) + len(rest)
        return (_NotTaken(slot, why, is_lost) if why else None), size

    def _received(self, transfer: Leader) -> BaseException | None:
        """Receive a vector and hand it out; return why not."""
        assert self._thread is not None
        try:
            self._thread.call(receive_vector(self._stream, transfer)).result()
        except (ConnectionError, TimeoutError) as error:
            return error if str(error) else TimeoutError(f"nothing has come for {_SLAB_SECONDS:g} s")
        return None

    async def _end_stream(self, failure: BaseException | None) -> BaseException | None:
        """Tell the giver that everything has come, or end the stream with the failure."""
        try:
            async with self._taken:
                if failure is not None:
                    self._stream.abort(line_of(failure))
                else:
                    await self._stream.send(EVERYTHING)
        except ConnectionError as error:
            return failure or error
        return failure


async def _begin(taker: Taker, offer: Offer, rest: bytes) -> None:
    try:
        await send_json(taker.stream, _OFFER, offer)
    except ConnectionError as error:
        taker.refuse(line_of(error))
    await taker.send(rest)


async def pass_on(takers: list[Taker], transfer: Leader) -> None:
    """Send a vector to all takers."""
    for number in range(len(transfer.slabs)):
        if all(taker.over.is_set() for taker in takers):
            return
        content = bytes_of(await transfer.content(number))
        await asyncio.gather(*(taker.send(content) for taker in takers))


async def part_with(takers: list[Taker]) -> list[Taker]:
    """Wait until all takers have everything, or are given up; return who has everything."""

    async def has_everything(taker: Taker) -> bool:
        if taker.over.is_set():
            return False
        try:
            async with asyncio.timeout(_SLAB_SECONDS):
                await taker.stream.receive(len(EVERYTHING))
        except (ConnectionError, TimeoutError) as error:
            taker.refuse(line_of(error) or "does not say that it has everything")
            return False
        taker.over.set()
        return True

    found = await asyncio.gather(*map(has_everything, takers))
    return [taker for taker, has in zip(takers, found, strict=True) if has]


async def send_vector(stream: Stream, transfer: Leader) -> None:
    """Gather a vector, and send it. Raises ConnectionError, TimeoutError."""
    for number in range(len(transfer.slabs)):
        content = bytes_of(await transfer.content(number))
        async with asyncio.timeout(_SLAB_SECONDS):
            await stream.send(content)


async def receive_vector(stream: Stream, transfer: Leader) -> None:
    """Receive a vector, and hand it out. Raises ConnectionError, TimeoutError."""
    for number in range(len(transfer.slabs)):
        result = transfer.result(number)
        async with asyncio.timeout(_SLAB_SECONDS):
            await stream.fill(bytes_of(result))
        await transfer.hand_out(number, result)


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


@contextmanager
def _complaining() -> Iterator[None]:
    """Write a line about what fails to stderr, and go on."""
    try:
        yield
    except Exception as error:
        sys.stderr.write(f"this rank's state cannot be given: {type(error).__name__}: {line_of(error)}\n")
