"""What is under way between two processes, over connections whose end voids it on both sides.

A session of two replicas has one connection for small messages (`control`) and some for bulk data. Bulk data move
when both sides have posted them: the receiver asks for them, and then gets their chunks. So nothing arrives that
has no place, and what is posted early takes no memory. A chunk is the number of the question, where the chunk
begins, its length, its checksum, and bytes that are received where they belong.

What both have posted under a tag matches in the order in which they did. A receive that is given up gets nothing
any more: chunks that are still under way to it are thrown away.
"""

import itertools
import struct
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_noloco.federation.control import LARGEST, Got, RefusedError, Said, State, Want, say
from megatron_noloco.federation.wires import Script, Wire
from megatron_noloco.transport.chunks import ReportedTransfers, cut
from megatron_noloco.transport.interface import Chunk, Message, RankLostError

HANDOVER_TAG = 2**62  # the first tag of handovers, which no exchange makes void
HANDOVERS, ALL_TAGS = range(HANDOVER_TAG, LARGEST + 1), range(LARGEST + 1)
_LONGEST_CHUNK = 2**24  # bytes
_MOST_WANTS = 1024  # for messages that are not posted yet
_CHUNK = struct.Struct("!QQII")  # number, offset, length, checksum
_COLUMNS = 512  # 64-bit words; with fewer, numpy takes longer than reading the memory
DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64, torch.bool)  # fmt: skip


def checksum_of(data: np.ndarray) -> int:
    """Return the CRC-32 of the sums of the 64-bit words in 512 columns, and of the rest.

    This checksum notices each changed word and each burst of errors, in a tenth of the time of a CRC-32 of the
    whole. It does not notice whole rows of 4096 bytes that change places, which transmission errors do not do.

    Args:
        data: uint8, contiguous.
    """
    whole = len(data) - len(data) % (8 * _COLUMNS)
    sums = data[:whole].view(np.uint64).reshape(-1, _COLUMNS).sum(axis=0, dtype=np.uint64)
    return zlib.crc32(data[whole:].data, zlib.crc32(sums.data, len(data) & 0xFFFFFFFF))


@dataclass
class Send:
    """A message to another replica.

    Attributes:
        report: is called once: with None when all has arrived, or with the reason why it never will.
    """

    tag: int
    message: Message
    chunk_bytes: int
    report: Callable[[RankLostError | None], None]

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the pieces, uint8, each with the place of its first byte."""
        offset = 0
        for chunk in cut([self.message], self.chunk_bytes):
            yield offset, chunk.data.numpy()
            offset += len(chunk.data)


class Receive:
    """A message from another replica.

    Attributes:
        awaited: its chunks that have not begun to arrive, by the place of their first byte.
        missing: how many have not arrived.
    """

    def __init__(self, tag: int, message: Message, chunks: list[Chunk], transfers: ReportedTransfers) -> None:
        self.tag, self.message, self.transfers = tag, message, transfers
        starts = itertools.accumulate((len(chunk.data) for chunk in chunks), initial=0)
        self.awaited = dict(zip(starts, chunks, strict=False))
        self.missing = len(chunks)


class Session:
    """What is under way with one process of another replica. Used by one thread.

    Args:
        slot: of the other replica.
        name: of this session, which no other has.
        state: returns what the other side is to know of this one now.

    Attributes:
        asked: the tag of the last question for a state; -1: none.
        waits: whether it was not answered yet.
        why: why it has ended; "" while it goes on.
    """

    def __init__(self, slot: int, name: str, control: Wire, state: Callable[[], State]) -> None:
        self.slot, self.name, self.control = slot, name, control
        self.streams: list[Wire] = []
        self.posted: defaultdict[int, deque[Send]] = defaultdict(deque)  # and not asked for, by tag
        self.wants: defaultdict[int, deque[Want]] = defaultdict(deque)  # of the other side, and not posted
        self.unconfirmed: dict[int, Send] = {}  # by the number of the question
        self.receives: dict[int, Receive] = {}  # likewise, of this side
        self.asked, self.waits = -1, False
        self.why = ""
        self._numbers = itertools.count()
        self._sending: deque[tuple[int, Iterator[tuple[int, np.ndarray]]]] = deque()
        self._filling: dict[Wire, int] = {}
        self._state, self._state_due = state, False
        control.refill = self._state_if_due

    def say(self, said: Said) -> None:
        """Send a small message."""
        say(self.control, said)

    def say_state(self) -> None:
        """Send the state when all small messages before are sent: those that it may declare void come first."""
        self._state_due = True
        self.control.touch()

    def end(self, why: str) -> None:
        """Void all that is under way, and close the connections."""
        self.why = self.why or why
        self.cancel(ALL_TAGS, RankLostError(self.slot, self.why))
        for wire in (self.control, *self.streams):
            wire.end(ConnectionAbortedError(why))

    # What this side posts

    def send(self, send: Send) -> None:
        """Send a message as soon as the other side asks for it."""
        self.posted[send.tag].append(send)
        self._match(send.tag)

    def receive(self, receive: Receive) -> None:
        """Ask for a message."""
        number = next(self._numbers)
        self.receives[number] = receive
        buffer = receive.message.buffer
        self.say(Want(number, receive.tag, buffer.nbytes, _name_of(buffer)))

    def cancel(self, tags: range, failure: RankLostError | None = None) -> None:
        """Forget what is under way under these tags, and report the failure, if one is given."""
        self.cancel_sends(tags, failure)
        for number in [number for number, one in self.receives.items() if one.tag in tags]:
            self._give_up(number, failure)

    def cancel_sends(self, tags: range, failure: RankLostError | None = None) -> None:
        """Forget our messages, and what the other side wants, under these tags."""
        sends = [send for tag in list(self.posted) if tag in tags for send in self.posted.pop(tag)]
        for tag in [tag for tag in self.wants if tag in tags]:
            del self.wants[tag]
        for number in [number for number, send in self.unconfirmed.items() if send.tag in tags]:
            sends.append(self.unconfirmed.pop(number))
        self._sending = deque(one for one in self._sending if one[0] in self.unconfirmed)
        for send in sends if failure is not None else ():
            send.report(failure)

    def _give_up(self, number: int, failure: RankLostError | None) -> None:
        receive = self.receives.pop(number)
        for wire in [wire for wire, filled in self._filling.items() if filled == number]:
            del self._filling[wire]
            wire.divert()
        if failure is not None:
            receive.transfers.report(failure)

    # What the other side says

    def wanted(self, want: Want) -> None:
        """Send what the other side wants, now or when it is posted."""
        if sum(map(len, self.wants.values())) >= _MOST_WANTS:
            raise RefusedError(f"more than {_MOST_WANTS} messages are wanted")
        self.wants[want.tag].append(want)
        self._match(want.tag)

    def got(self, number: int) -> None:
        """Note that all that was wanted under a number has come; unless it is void here."""
        if (send := self.unconfirmed.pop(number, None)) is not None:
            send.report(None)

    def _match(self, tag: int) -> None:
        """Start what both sides have posted under a tag, in the order in which they did."""
        posted, wants = self.posted[tag], self.wants[tag]
        while posted and wants:
            send, want = posted.popleft(), wants.popleft()
            buffer = send.message.buffer
            if (want.length, want.dtype) != (buffer.nbytes, _name_of(buffer)):
                expects = f"expects {want.length} bytes where {buffer.nbytes} are sent, or other numbers"
                send.report(RankLostError(self.slot, f"{expects} (tag {tag})"))
            elif want.number not in self.unconfirmed:
                self.unconfirmed[want.number] = send
                self._sending.append((want.number, send.chunks()))
        if not posted:
            del self.posted[tag]
        if not wants:
            del self.wants[tag]
        for wire in self.streams:
            wire.touch()

    # Bulk data

    def stream(self, wire: Wire) -> Script:
        """Send and receive chunks over a connection: its script."""
        self.streams.append(wire)
        wire.bulk, wire.refill = True, partial(self._next_chunk, wire)
        wire.touch()
        head = bytearray(_CHUNK.size)
        while True:
            yield memoryview(head)
            number, offset, length, checksum = _CHUNK.unpack(head)
            if (receive := self.receives.get(number)) is not None:
                yield from self._chunk(wire, receive, number, offset, length, checksum)
            elif length <= _LONGEST_CHUNK:  # void
                yield memoryview(bytearray(length))
            else:
                raise RefusedError(f"a chunk of {length} bytes")

    def _chunk(
        self, wire: Wire, receive: Receive, number: int, offset: int, length: int, checksum: int
    ) -> Script:
        chunk = receive.awaited.pop(offset, None)
        if chunk is None or len(chunk.data) != length:
            raise RefusedError("a chunk that nobody waits for")
        place = chunk.data.numpy()
        self._filling[wire] = number
        yield place.data
        if self._filling.pop(wire, None) is None:
            return  # it was given up meanwhile
        if not wire.encrypted and checksum != checksum_of(place):
            self._give_up(number, RankLostError(self.slot, "has sent a chunk that was damaged on its way"))
            return
        receive.missing -= 1
        receive.transfers.report(chunk.arrival)
        if not receive.missing:
            del self.receives[number]
            self.say(Got(number))

    def _next_chunk(self, wire: Wire) -> tuple[Any, ...]:
        while self._sending:
            number, chunks = self._sending[0]
            for offset, data in chunks:
                checksum = 0 if wire.encrypted else checksum_of(data)  # TLS has one of its own
                return _CHUNK.pack(number, offset, len(data), checksum), data
            self._sending.popleft()
        return ()

    def _state_if_due(self) -> tuple[()]:
        if self._state_due:
            self._state_due = False
            self.say(self._state())
        return ()


def _name_of(buffer: torch.Tensor) -> str:
    return str(buffer.dtype).removeprefix("torch.")
