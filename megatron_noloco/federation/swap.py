"""The exchange of a pair's vectors on one stream, bucket by bucket.

Each bucket is a coroutine that is read from top to bottom: it sends its part of a phase and receives the
partner's, computes, and goes on to the next phase. Both sides send, and receive, the parts of all buckets in one
fixed order:

    phase 0 of bucket t,  phase 1 of bucket t - AHEAD,  phase 2 of bucket t - 2 AHEAD, ...   for t = 0, 1, 2, ...

What a phase needs of the partner was sent AHEAD buckets before. So a slow link is full after one round trip.
Whatever a side waits for comes earlier in this order, so no two sides wait for each other. As many buckets are
under way as there are phases, times AHEAD.

In fp32 there is one phase, the values. In codes (`outer.payload`) there are four: sketches; codes with checksums;
the next bits of the blocks that the codes do not hold, which both sides find to be the same; and in fp32 what
these do not hold either.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_noloco.federation.gather import Leader, bytes_of
from megatron_noloco.federation.streams import Stream
from megatron_noloco.outer.bucket_code import DIGITS, Code, PairCode, blocks_to_code
from megatron_noloco.outer.finite_mean import ExchangeReport, finite_mean
from megatron_noloco.outer.payload import Codec, UnequalError, signs_of
from megatron_noloco.outer.vectors import Buffers

AHEAD = 4  # buckets
_LENGTH_BYTES = 8
_T = TypeVar("_T")


class _Turns:
    """Lets buckets do something one after the other, in a given order."""

    def __init__(self, order: Iterator[tuple[int, int]]) -> None:
        self._order = order
        self._now = next(order, None)
        self._waiting: dict[tuple[int, int] | None, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self, bucket: int, phase: int = 0) -> AsyncIterator[None]:
        if self._now != (bucket, phase):
            waiting = self._waiting[bucket, phase] = asyncio.get_running_loop().create_future()
            await waiting
        yield
        self._now = next(self._order, None)
        if (following := self._waiting.pop(self._now, None)) is not None:
            following.set_result(None)


class Swap:
    """An exchange of vectors.

    Args:
        worker: one thread, for arithmetic. At the end nothing of this exchange is left in it.
        bits: of a code; None: fp32. The same for both sides, as `number`.
        number: of the exchange.
    """

    def __init__(
        self, stream: Stream, transfer: Leader, worker: Executor, bits: int | None, number: int
    ) -> None:
        self._squared_norm = 0.0
        self._stream, self._transfer, self._worker = stream, transfer, worker
        self._length = sum(map(len, transfer.buckets)).to_bytes(_LENGTH_BYTES)
        self._jobs = set[Future[Any]]()
        self._phases = 1 if bits is None else 2 + DIGITS
        self._codec = None if bits is None else Codec(bits)
        self._signs = signs_of(number)
        buckets = len(transfer.buckets)
        self._sending, self._receiving = (_Turns(_order(buckets, self._phases)) for _ in range(2))
        self._handing_out = _Turns(_order(buckets, 1))
        self._room = asyncio.Semaphore(self._phases * AHEAD)
        self._free = list[Buffers]()  # memory of buckets that are over

    async def run(self, report: ExchangeReport) -> float:
        """Hand out the mean of both vectors, and add to the report; return the squared norm of the own vector.

        Raises UnequalError for vectors that differ in length, StreamEndedError, and what `transfer` raises.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for at in range(len(self._transfer.buckets)):
                    await self._room.acquire()
                    group.create_task(self._bucket(at, report))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:  # no job writes any memory from now on
            jobs = list(self._jobs)  # a job leaves the set when it is done
            for job in jobs:
                job.cancel()
            wait(jobs)
        return self._squared_norm

    async def _bucket(self, at: int, report: ExchangeReport) -> None:
        own = ExchangeReport(report.group)
        content, mean = await self._transfer.content(at), self._transfer.result(at)
        squared_norm = float(await self._compute(torch.dot, content, content))
        if self._codec is None:
            await self._in_fp32(at, 0, content, mean, own)
        else:
            await self._in_codes(at, self._codec, content, mean, own)
        async with self._handing_out.turn(at):
            await self._transfer.hand_out(at, mean)
            report.add(own)
            self._squared_norm += squared_norm
        self._room.release()

    async def _in_fp32(
        self, at: int, phase: int, content: Tensor, mean: Tensor, report: ExchangeReport
    ) -> None:
        await self._swap(at, phase, [content], [mean], report)
        await self._compute(list, finite_mean([content, mean], mean, report))

    async def _in_codes(
        self, at: int, codec: Codec, content: Tensor, mean: Tensor, report: ExchangeReport
    ) -> None:
        memory = self._free.pop() if self._free else Buffers(pinned=False)
        coded = blocks_to_code(self._transfer.buckets[at], self._transfer.movement.exact)
        how = Code(codec, self._signs, coded, mean=mean)
        code = await self._compute(PairCode, content, how, memory, report)
        await self._swap(at, 0, [code.sketches], [code.their_sketches[0]], report)
        await self._compute(code.find_steps)
        for digit in range(DIGITS):
            mine = await self._compute(code.encode)
            await self._swap(at, 1 + digit, mine, code.theirs[0], report)
            await self._compute(code.average)
        left_over = await self._compute(code.left_over)
        theirs = torch.empty_like(left_over)
        await self._in_fp32(at, 1 + DIGITS, left_over, theirs, report)
        await self._compute(code.fill, theirs)
        self._free.append(memory)

    async def _swap(
        self, at: int, phase: int, mine: Sequence[Tensor], theirs: Sequence[Tensor], report: ExchangeReport
    ) -> None:
        """Send a part of a bucket, and receive the partner's."""

        async def send() -> None:
            async with self._sending.turn(at, phase):
                if at == phase == 0:
                    await self._stream.send(self._length)
                await self._stream.send(*map(bytes_of, mine))

        async def receive() -> None:
            async with self._receiving.turn(at, phase):
                if at == phase == 0 and await self._stream.receive(_LENGTH_BYTES) != self._length:
                    raise UnequalError
                for place in theirs:
                    await self._stream.fill(bytes_of(place))

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            group.create_task(receive())
        report.bytes_sent += sum(part.nbytes for part in mine)

    async def _compute(self, function: Callable[..., _T], *arguments: Any) -> _T:
        job = self._worker.submit(function, *arguments)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await asyncio.wrap_future(job)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _order(buckets: int, phases: int) -> Iterator[tuple[int, int]]:
    for turn in range(buckets + (phases - 1) * AHEAD):
        for phase in range(phases):
            if 0 <= (bucket := turn - phase * AHEAD) < buckets:
                yield bucket, phase
