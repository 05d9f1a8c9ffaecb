"""The addresses of all replicas that are there or were there, and some of their links, as this replica knows them.

Each replica keeps a directory. A status names a checksum of the sender's directory; where two differ, each side
tells the other what it has not told it yet (`node`). So a change passes from neighbour to neighbour, in about
R log R messages for R replicas, and a lost message is made up for. An address has links of its replica, too, for
those that have no link to it: hidden replicas, and the final mean.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace

from megatron_noloco.federation.folder import is_folder_endpoint
from megatron_noloco.federation.messages import LARGEST, Address
from megatron_noloco.settings import MOST_SLOTS, TCP

_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
_LISTENING = re.compile(rf"tcp://(?:\*|{_HOST}):([0-9]{{1,5}})")
_ENDPOINT = re.compile(rf"tcp://{_HOST}:([0-9]{{1,5}})")
_LONGEST_ENDPOINT = 255  # characters


def is_endpoint(text: str) -> bool:
    """Whether the text is "tcp://HOST:PORT"."""
    match = _ENDPOINT.fullmatch(text)
    return match is not None and 0 < int(match[1]) < 2**16 and len(text) <= _LONGEST_ENDPOINT


def can_be_dialled(text: str) -> bool:
    """Whether the text is an endpoint of an `Address`."""
    return not text or is_endpoint(text) or is_folder_endpoint(text)


def can_listen(text: str) -> bool:
    """Whether the text is "tcp://HOST:PORT", or * for all hosts and 0 for any port."""
    match = _LISTENING.fullmatch(text)
    return match is not None and int(match[1]) < 2**16


def endpoint_of(host: str, port: int) -> str:
    """Return "tcp://HOST:PORT"."""
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


def split(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint."""
    host, _, port = endpoint.removeprefix(TCP).rpartition(":")
    return host.strip("[]"), int(port)


def host_of(endpoint: str) -> str:
    """Return the host of an endpoint; "" for ""."""
    return split(endpoint)[0] if endpoint else ""


def is_sound(slot: int, address: Address) -> bool:
    """Return whether a replica may have this number and this address."""
    return 0 <= slot < MOST_SLOTS and can_be_dialled(address.endpoint)


class Directory:
    """The addresses of all replicas, by slot. Changed by one thread.

    Args:
        slot: of this replica.
        own: its address.

    Attributes:
        addresses: a change replaces the mapping, so other threads read one moment of it.
        checksum: of all addresses; alike in equal directories.
        version: counts the changes.
    """

    def __init__(self, slot: int, own: Address) -> None:
        self.addresses: Mapping[int, Address] = {}
        self.checksum = self.version = 0
        self._slot = slot
        self._changed: dict[int, int] = {}  # version of the last change, by slot
        self._refused: dict[int, int] = {}  # incarnation, by slot
        self._set(slot, own)

    @property
    def own(self) -> Address:
        """The address of this replica."""
        return self.addresses[self._slot]

    def merge(self, addresses: Mapping[int, Address]) -> None:
        """Keep the latest address of each other slot; leave out malformed addresses."""
        for slot, address in addresses.items():
            known = self.addresses.get(slot)
            is_later = known is None or _age(known) < _age(address)
            is_later &= self._refused.get(slot) != address.incarnation
            if is_later and is_sound(slot, address) and slot != self._slot:
                self._set(slot, address)

    def accept(self, slot: int, address: Address) -> None:
        """Merge the address of a process that can exchange with this one."""
        self._refused.pop(slot, None)
        self.merge({slot: address})

    def refuse(self, slot: int, incarnation: int) -> None:
        """Leave out a process that cannot exchange with this one: its slot counts as if it were not there."""
        self._refused[slot] = incarnation
        known = self.addresses.get(slot)
        if known is not None and known.incarnation == incarnation and slot != self._slot:
            self.addresses = {other: address for other, address in self.addresses.items() if other != slot}
            self.checksum ^= _digest(slot, known)
            self.version += 1
            del self._changed[slot]

    def follow(self, incarnation: int) -> None:
        """Take a later number than an earlier process of this slot, whose clock was ahead."""
        if self.own.incarnation <= incarnation < LARGEST:
            self._set(self._slot, replace(self.own, incarnation=incarnation + 1))

    def note(self, is_at_end: bool, linked: list[int]) -> bool:
        """Note where this replica is, and to whom it has links; return whether that is new. See `Address`."""
        own = self.own
        is_new = (own.is_at_end, own.linked) != (is_at_end, linked)
        if is_new:
            changed = replace(own, changes=own.changes + 1, is_at_end=is_at_end, linked=linked)
            self._set(self._slot, changed)
        return is_new

    def since(self, version: int) -> dict[int, Address]:
        """Return what has changed after a version."""
        return {slot: self.addresses[slot] for slot, changed in self._changed.items() if changed > version}

    def _set(self, slot: int, address: Address) -> None:
        before = self.addresses.get(slot)
        self.addresses = {**self.addresses, slot: address}
        self.checksum ^= _digest(slot, address) ^ (0 if before is None else _digest(slot, before))
        self.version += 1
        self._changed[slot] = self.version


def _age(address: Address) -> tuple[int, int]:
    return address.incarnation, address.changes


def _digest(slot: int, address: Address) -> int:
    text = f"{slot} {address}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7])
