"""Vectors of a replica on the streams to others, bucket by bucket (`gather`).

A vector goes to several takers at the same time: each bucket is gathered once. A taker that does not take a bucket
in time is given up. The others wait for it meanwhile, so each waits longer for a bucket than its giver does.
"""

import asyncio

from megatron_noloco.federation.gather import Leader, bytes_of
from megatron_noloco.federation.streams import Stream, within
from megatron_noloco.job.activity import line_of

_TAKE_SECONDS = 60.0  # for the other side to take a bucket
COME_SECONDS = 2 * _TAKE_SECONDS  # for the other side to send a bucket
_NOT_TAKEN = f"has taken nothing for {_TAKE_SECONDS:g} s"
NOT_COME = f"nothing has come for {COME_SECONDS:g} s"
EVERYTHING = b"!"


class Taker:
    """A replica that waits for vectors: its stream, and when the conversation is over."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.over = stream, asyncio.Event()

    async def send(self, *buffers: memoryview | bytes) -> None:
        """Send, or give the taker up."""
        if not self.over.is_set():
            try:
                async with within(_TAKE_SECONDS, _NOT_TAKEN):
                    await self.stream.send(*buffers)
            except (ConnectionError, TimeoutError) as error:
                self.refuse(line_of(error))

    async def has_everything(self) -> bool:
        """Wait until the taker says that it has everything; return False where it is given up."""
        if self.over.is_set():
            return False
        try:
            async with within(_TAKE_SECONDS, "does not say that it has everything"):
                await self.stream.receive(len(EVERYTHING))
        except (ConnectionError, TimeoutError) as error:
            self.refuse(line_of(error))
            return False
        self.over.set()
        return True

    def refuse(self, reason: str) -> None:
        """Give the taker up, unless the conversation is over."""
        if not self.over.is_set():
            self.stream.abort(reason)
            self.over.set()


async def pass_on(takers: list[Taker], transfer: Leader) -> None:
    """Send a vector to all takers."""
    for number in range(len(transfer.buckets)):
        if all(taker.over.is_set() for taker in takers):
            return
        content = bytes_of(await transfer.content(number))
        await asyncio.gather(*(taker.send(content) for taker in takers))


async def part_with(takers: list[Taker]) -> list[Taker]:
    """Wait until all takers have everything, or are given up; return who has everything."""
    found = await asyncio.gather(*(taker.has_everything() for taker in takers))
    return [taker for taker, has in zip(takers, found, strict=True) if has]


async def receive_vector(stream: Stream, transfer: Leader) -> None:
    """Receive a vector, and hand it out. Raises ConnectionError, TimeoutError."""
    for number in range(len(transfer.buckets)):
        result = transfer.result(number)
        async with within(COME_SECONDS, NOT_COME):
            await stream.fill(bytes_of(result))
        await transfer.hand_out(number, result)
