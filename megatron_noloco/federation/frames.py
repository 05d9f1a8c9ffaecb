"""The frames that two ranks of a federation send each other, and messages cut into frames.

A frame is a header of fixed size. Bytes follow the header of a DATA, ADDRESSES, OFFER or REFUSAL frame.

| kind | sender | meaning | number | offset | length |
|---|---|---|---|---|---|
| HELLO | every rank, twice a second | the sender runs | latest exchange | first open one | connections so far |
| WANT | receiver of a message | a receive is posted under `tag` | its ticket | both connections | bytes of it |
| DATA | sender of a message | one chunk | the ticket | of the first byte | bytes of the chunk |
| GOT | receiver of DATA | one chunk has come, wanted or not | the ticket | 1: the message is complete | 0 |
| ADDRESSES | every rank | addresses, see `rendezvous` | 1: asks for ours | its ranks | bytes that follow |
| ASK | rank that starts | asks for an OFFER under `tag` | 1: with the state itself | 0 | 0 |
| OFFER | rank that was asked | describes its state, see `handover` | 0 | 0 | bytes that follow |
| REFUSAL | every rank | its job is another, see `likeness` | 1: asks for ours | 0 | bytes that follow |

The first four bytes of a frame, the version that follows them and the kind REFUSAL are the same in all versions
from 6 on. A frame of another version, or of another run, is answered with a REFUSAL, so that both sides know why
they do not exchange. A REFUSAL of another version is not answered.

`offset` of a HELLO is the first exchange that its sender may have with its receiver. Whatever is under way between
the two for earlier exchanges is void. So a HELLO also answers a WANT for an exchange in which the sender has
another partner. `tag` of a HELLO is the latest exchange with its receiver that counts for its sender. A receiver
that misses a token of that exchange is then in doubt, as the sender did not skip it. The numbers of exchanges are
sent plus 1 where they can be -1.

`to_epoch` of a HELLO has no epoch, but the number of what only jobs of the sender's kind know, see `likeness`. A
HELLO of a job of the same kind with another number counts as that of another run.

`length` of a HELLO is the number of connections that its sender has used to its receiver, one after the other.
With each new connection all that was under way is void on both sides. `offset` of a WANT is the sum of this number
and of the receiver's; a WANT with an earlier sum is dropped.

A ticket is a number that a process gives to one of its receives and never uses again. `to_epoch` is the epoch of
the process that gave the ticket, so a frame for a process that has ended never reaches the next one.

Nothing received is unpickled or evaluated. `read` checks every field before any other code looks at one.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_noloco.transport.chunks import ReportedTransfers, cut
from megatron_noloco.transport.interface import Chunk, Message, RankLostError

_HEADER = struct.Struct("!4sBBBIIQQQQQQQI")
_MAGIC, VERSION = b"nlco", 7
_PREFIX = struct.Struct("!4sBB")  # magic, version, kind: alike in all versions
SIZE = _HEADER.size + 4  # the last four bytes are a checksum of those before
LARGEST = 2**63 - 1
ANYONE = 2**32 - 1  # the receiver, where its rank is not known
HANDOVER_TAG = 2**62  # the first tag of handovers, which no exchange makes void
_COLUMNS = 512  # 64-bit words; with fewer, numpy takes longer than reading the memory

# The order is part of the format.
_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
           torch.float32, torch.float64, torch.bool)  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Kind(IntEnum):
    """The meaning of a frame; see above. The values are part of the format."""

    HELLO = 0
    WANT = 1
    DATA = 2
    GOT = 3
    ADDRESSES = 4
    ASK = 5
    OFFER = 6
    REFUSAL = 7


class Frame(NamedTuple):
    """A header. All numbers are from 0 to LARGEST."""

    kind: Kind
    run: int  # see `likeness`; 0 in REFUSAL
    sender: int  # its rank
    receiver: int
    epoch: int  # of the sender's process
    to_epoch: int = (
        0  # of the receiver's process; in HELLO the `Member.kind_number`; 0 in WANT, ADDRESSES and ASK
    )
    tag: int = 0
    number: int = 0
    offset: int = 0
    length: int = 0
    dtype: int = 0  # in WANT and DATA
    checksum: int = 0  # of the bytes that follow

    def pack(self) -> bytes:
        numbers = self.epoch, self.to_epoch, self.tag, self.number, self.offset, self.length
        start = _MAGIC, VERSION, self.kind, self.dtype, self.sender, self.receiver, self.run
        head = _HEADER.pack(*start, *numbers, self.checksum)
        return head + zlib.crc32(head).to_bytes(4, "big")

    def announces(self, data: np.ndarray) -> bool:
        """Whether `data` has the length and the checksum of this header."""
        return self.length == len(data) and self.checksum == checksum_of(data)


@dataclass(frozen=True)
class Member:
    """This process as other ranks know it.

    Attributes:
        rank: its number in the federation.
        run: the number of its run; jobs of another run, or of another model, have another number.
        epoch: of the process; a later process of the same rank has a larger one.
        ranks: number of ranks in all slots that its job has; another job may have more.
        digests: of what all jobs of its run have alike, by name; see `likeness`.
        kind_number: of what all jobs of its run and its kind have alike; see `likeness`.
    """

    rank: int
    run: int
    epoch: int
    ranks: int
    digests: Mapping[str, str] = field(default_factory=dict)
    kind_number: int = 0

    def frame(self, kind: Kind, receiver: int, data: np.ndarray | None = None, **fields: Any) -> Frame:
        """Return a frame from this process, of the length and checksum of the data that will follow it, if any."""
        if data is not None:
            fields |= {"length": len(data), "checksum": checksum_of(data)}
        return Frame(kind, self.run, self.rank, receiver, self.epoch, **fields)


def read(header: bytes) -> Frame | None:
    """Parse a header; returns None for anything that is not a valid one."""
    if len(header) != SIZE or zlib.crc32(header[:-4]) != int.from_bytes(header[-4:], "big"):
        return None
    magic, version, kind, dtype, sender, receiver, run, *numbers, checksum = _HEADER.unpack(header[:-4])
    if (magic, version) != (_MAGIC, VERSION) or kind >= len(Kind) or dtype >= len(_DTYPES):
        return None
    if max(numbers) > LARGEST:
        return None
    epoch, to_epoch, tag, number, offset, length = numbers
    rest = to_epoch, tag, number, offset, length, dtype, checksum
    return Frame(Kind(kind), run, sender, receiver, epoch, *rest)


def another_version(header: bytes) -> tuple[int, bool] | None:
    """Return the version of a frame of another one, and whether it is a REFUSAL; None for anything else."""
    if len(header) < _PREFIX.size:
        return None
    magic, version, kind = _PREFIX.unpack(header[: _PREFIX.size])
    return (version, kind == Kind.REFUSAL) if magic == _MAGIC and version != VERSION else None


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
    """A message to a counterpart.

    Attributes:
        length: bytes.
        dtype: its code.
        chunks: returns the pieces, uint8, in order; if they end early, the receiver waits until its deadline.
        report: is called once: with None when all has arrived, or with the reason why it never will.
    """

    tag: int
    length: int
    dtype: int
    chunks: Callable[[], Iterator[np.ndarray]]
    report: Callable[[RankLostError | None], None]

    @classmethod
    def of(
        cls, tag: int, message: Message, chunk_bytes: int, report: Callable[[RankLostError | None], None]
    ) -> "Send":
        """Make a message of numbers in memory."""

        def chunks() -> Iterator[np.ndarray]:
            return (chunk.data.numpy() for chunk in cut([message], chunk_bytes))

        return cls(tag, message.buffer.nbytes, DTYPE_CODES[message.buffer.dtype], chunks, report)

    def frames(self, want: Frame, member: Member) -> Iterator[tuple[Frame, np.ndarray]]:
        """Yield header and bytes of each chunk."""
        fields = {"to_epoch": want.epoch, "tag": self.tag, "number": want.number, "dtype": self.dtype}
        offset = 0
        for data in self.chunks():
            yield member.frame(Kind.DATA, want.sender, data, offset=offset, **fields), data
            offset += len(data)


@dataclass
class Receive:
    """A message from a counterpart. Chunks come in order; the first `arrived` are there."""

    tag: int
    message: Message
    chunks: list[Chunk]
    transfers: ReportedTransfers
    arrived: int = 0
    bytes_arrived: int = 0

    @property
    def dtype(self) -> int:
        return DTYPE_CODES[self.message.buffer.dtype]

    def take(self, frame: Frame, data: np.ndarray) -> bool:
        """Copy the next chunk to its place; returns False, and changes nothing, if it is not that chunk."""
        chunk = self.chunks[self.arrived]
        place = chunk.data.numpy()
        expected = self.message.rank, self.tag, self.dtype, self.bytes_arrived, len(place)
        found = frame.sender, frame.tag, frame.dtype, frame.offset, frame.length
        if found != expected or not frame.announces(data):
            return False
        np.copyto(place, data)
        self.arrived += 1
        self.bytes_arrived += len(place)
        self.transfers.report(chunk.arrival)
        return True

    @property
    def complete(self) -> bool:
        return self.arrived == len(self.chunks)
