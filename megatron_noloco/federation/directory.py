"""Where the ranks of a federation are, as far as a rank knows, and the form in which ranks tell each other.

Every rank has a directory of all. Ranks that meet exchange theirs, so a new one learns of all others from any one
of them, and what one of them learns reaches all. Nothing in it cannot be lost: each rank tells its own address
again to whomever it meets.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_noloco.federation.frames import LARGEST, Frame, Kind, Member, checksum_of

_ENTRY = struct.Struct("!IQB")  # rank, epoch, length of the endpoint that follows
_LONGEST_ENDPOINT = 255  # bytes
_ENDPOINT = re.compile(r"tcp://[A-Za-z0-9_.-]+:([0-9]{1,5})")


@dataclass(frozen=True)
class Address:
    """Where a rank is reached; a later process of the rank has a larger epoch."""

    endpoint: str
    epoch: int


def is_endpoint(text: str) -> bool:
    """Whether it is "tcp://HOST:PORT", as ZeroMQ connects to it."""
    match = _ENDPOINT.fullmatch(text)
    return match is not None and 0 < int(match[1]) < 2**16 and len(text) <= _LONGEST_ENDPOINT


class Directory:
    """Used by one thread.

    Attributes:
        addresses: by rank.
        version: grows with each change.
        asked: ranks that wait to be told.
    """

    def __init__(self, member: Member) -> None:
        self.addresses: dict[int, Address] = {}
        self.version = 0
        self.asked: set[int] = set()
        self._member = member

    def merge(self, addresses: Mapping[int, Address]) -> None:
        """Of each rank the address with the largest epoch is kept; what can be no address is left out."""
        for rank, address in addresses.items():
            known = self.addresses.get(rank)
            if self._is_sound(rank, address) and (known is None or known.epoch < address.epoch):
                self.addresses[rank] = address
                self.version += 1

    def frame(self, asks: bool = False) -> tuple[bytes, bytes]:
        """What tells another rank all addresses, and asks it for those that it knows: header and content."""
        data = self.pack()
        checksum = checksum_of(np.frombuffer(data, np.uint8))
        return self._member.frame(Kind.HERE, number=asks, length=len(data), checksum=checksum).pack(), data

    def take(self, frame: Frame, data: np.ndarray) -> str:
        """Merge what another rank tells; returns why it is dropped, if it is."""
        if frame.sender == self._member.rank:  # it asked all addresses in the config, its own among them
            return ""
        if (frame.length, frame.checksum) != (len(data), checksum_of(data)):
            return "wrong chunk"
        addresses = self.unpack(data.tobytes())
        if addresses is None:
            return "no addresses"
        self.merge(addresses)
        if frame.number:
            self.asked.add(frame.sender)
        return ""

    def pack(self) -> bytes:
        """All addresses, in the order of ranks."""
        entries = []
        for rank, address in sorted(self.addresses.items()):
            endpoint = address.endpoint.encode()
            entries.append(_ENTRY.pack(rank, address.epoch, len(endpoint)) + endpoint)
        return b"".join(entries)

    def unpack(self, data: bytes) -> dict[int, Address] | None:
        """What another rank has packed; None for anything else."""
        found: dict[int, Address] = {}
        start, last = 0, -1
        while start < len(data):
            stop = start + _ENTRY.size
            if stop > len(data):
                return None
            rank, epoch, length = _ENTRY.unpack(data[start:stop])
            start = stop + length
            address = Address(data[stop:start].decode("ascii", "replace"), epoch)
            if start > len(data) or rank <= last or not self._is_sound(rank, address):
                return None
            found[rank], last = address, rank
        return found

    @property
    def longest(self) -> int:
        """Bytes that `pack` can come to."""
        return self._member.ranks * (_ENTRY.size + _LONGEST_ENDPOINT)

    def _is_sound(self, rank: int, address: Address) -> bool:
        return (
            0 <= rank < self._member.ranks and 0 < address.epoch <= LARGEST and is_endpoint(address.endpoint)
        )
