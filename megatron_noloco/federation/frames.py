"""What travels between two ranks of a federation: a header of fixed size; after DATA, HERE and OFFER, bytes.

| kind | from whom | means | number | offset | length |
|---|---|---|---|---|---|
| HELLO | every rank, twice a second | this rank is there | exchange begun last | exchange it is open from | 0 |
| WANT | who receives | a receive is posted under `tag` | its ticket | 0 | bytes of it |
| DATA | who sends | a chunk for a ticket | the ticket | of its first byte | bytes of the chunk |
| DONE | who receives | all of a ticket has arrived | the ticket | 0 | 0 |
| HERE | every rank | the addresses it knows, see `directory` | 1: it asks for ours | 0 | bytes of them |
| ASK | who has no state | it would take over one, under `tag` | 0 | 0 | 0 |
| OFFER | who was asked | what it can give under `tag`, see `handover` | 0 | 0 | bytes of the description |

A HELLO says from which exchange on its sender may meet the receiver; what is under way between the two for earlier
ones is void. So it is also the answer to a WANT for an exchange in which the sender meets another rank. Numbers of
exchanges are sent plus 1 where they can be -1. A ticket is a number that a process gives to one
of its receives, and never again. `to_epoch` is the epoch of the process that gave it, so that what was meant for a
process that has ended never reaches the next one.

Nothing received is unpickled or evaluated. `read` checks every field before anything else looks at one.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

_HEADER = struct.Struct("!4sBBBxIQQQQQQQI")
_MAGIC, _VERSION = b"nlco", 3
SIZE = _HEADER.size + 4  # the last four bytes are a checksum of those before
LARGEST = 2**63 - 1
HANDOVER_TAG = 2**62  # and above: of handovers, which no exchange makes void
_COLUMNS = 512  # 64-bit words; with fewer, numpy spends more than memory takes

# The order is a part of the format.
_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
           torch.float32, torch.float64, torch.bool)  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Kind(IntEnum):
    """Of a frame."""

    HELLO = 0
    WANT = 1
    DATA = 2
    DONE = 3
    HERE = 4
    ASK = 5
    OFFER = 6


class Frame(NamedTuple):
    """A header. All numbers are at least 0 and at most LARGEST."""

    kind: Kind
    run: int  # see `run_number`
    sender: int  # its rank
    epoch: int  # of the sender's process
    to_epoch: int = 0  # of the receiver's process; 0 with HELLO, WANT, HERE and ASK
    tag: int = 0
    number: int = 0
    offset: int = 0
    length: int = 0
    dtype: int = 0  # with WANT and DATA
    checksum: int = 0  # of the chunk, addresses or description

    def pack(self) -> bytes:
        numbers = self.epoch, self.to_epoch, self.tag, self.number, self.offset, self.length
        start = _MAGIC, _VERSION, self.kind, self.dtype, self.sender, self.run
        head = _HEADER.pack(*start, *numbers, self.checksum)
        return head + zlib.crc32(head).to_bytes(4, "big")


@dataclass(frozen=True)
class Member:
    """This process, as the others know it.

    Attributes:
        rank: unique in the federation.
        run: a number of the run: jobs of another run, or another model, have another one.
        epoch: of the process; a later process of the same rank has a larger one.
        ranks: of the federation, in all slots.
    """

    rank: int
    run: int
    epoch: int
    ranks: int

    def frame(self, kind: Kind, **fields: int) -> Frame:
        """One of its own."""
        return Frame(kind, self.run, self.rank, self.epoch, **fields)


def run_number(alike: Mapping[str, Any]) -> int:
    """Of what all jobs of a run must have alike, as JSON has it."""
    digest = hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def read(header: bytes) -> Frame | None:
    """The frame of a header; None for anything that is none."""
    if len(header) != SIZE or zlib.crc32(header[:-4]) != int.from_bytes(header[-4:], "big"):
        return None
    magic, version, kind, dtype, sender, run, *numbers, checksum = _HEADER.unpack(header[:-4])
    if (magic, version) != (_MAGIC, _VERSION) or kind >= len(Kind) or dtype >= len(_DTYPES):
        return None
    if max(numbers) > LARGEST:
        return None
    epoch, to_epoch, tag, number, offset, length = numbers
    return Frame(Kind(kind), run, sender, epoch, to_epoch, tag, number, offset, length, dtype, checksum)


def checksum_of(data: np.ndarray) -> int:
    """Of a chunk, uint8, contiguous: CRC-32 of the sums of its 64-bit words in 512 columns, and of the rest.

    At a tenth of the time of a CRC-32 of the whole it notices each changed word and each burst, but not whole
    rows of 4096 bytes that change places, which no damage on the way does.
    """
    whole = len(data) - len(data) % (8 * _COLUMNS)
    sums = data[:whole].view(np.uint64).reshape(-1, _COLUMNS).sum(axis=0, dtype=np.uint64)
    return zlib.crc32(data[whole:].data, zlib.crc32(sums.data, len(data) & 0xFFFFFFFF))
