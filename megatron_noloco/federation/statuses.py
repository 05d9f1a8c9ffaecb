"""Statuses as they travel: each is signed by its member, so that anybody may pass it on.

A later process of a slot replaces an earlier one, and a higher number a lower one.
"""

import base64
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_noloco.federation.mesh import Member, Status

if TYPE_CHECKING:
    from megatron_noloco.federation.keys import Identity

MOST_STATUS_BYTES = 2**16  # of some 2,000 members in a proposal of the mean at the end
MOST_SIGNED_BYTES = 2**18  # of a status as it travels
MOST_ADDRESSES = 4
_DAY_NS = 86_400 * 10**9
_CLOCKLESS_NS = 1_767_225_600 * 10**9  # a clock before 2026 is wrong
_LARGEST = 2**63
_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9][A-Za-z0-9_.-]*)):(?P<port>[0-9]{1,5})"
)
_LONGEST_ADDRESS = 255


@dataclass(frozen=True, eq=False)
class SignedStatus:
    """A status as it travels.

    Attributes:
        number: grows with each status of the member.
        text: JSON of the status.
        certificate: of the member, DER; empty without encryption, as is the signature.
    """

    member: Member
    number: int
    text: str
    certificate: bytes
    signature: bytes

    @cached_property
    def status(self) -> Status:
        """The status; ValueError where the text is not the JSON of an object."""
        return object_in(self.text)

    @cached_property
    def line(self) -> bytes:
        """The status as one line of JSON."""
        content = {
            "member": str(self.member),
            "number": self.number,
            "text": self.text,
            "certificate": base64.b64encode(self.certificate).decode(),
            "signature": base64.b64encode(self.signature).decode(),
        }
        return json.dumps(content, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def parse(cls, content: Any) -> "SignedStatus":
        """Return the status that an object of JSON holds; raises ValueError. `Statuses.take` checks the rest."""
        names = ("member", "text", "certificate", "signature")
        if not isinstance(content, dict) or not all(isinstance(content.get(name), str) for name in names):
            raise ValueError("is no status")
        number = content.get("number")
        if type(number) is not int or not 0 < number < _LARGEST:
            raise ValueError("has no number")
        if len(content["text"]) > MOST_STATUS_BYTES:
            raise ValueError(f"has a text of more than {MOST_STATUS_BYTES} bytes")
        certificate, signature = (
            base64.b64decode(content[name], validate=True) for name in ("certificate", "signature")
        )
        return cls(Member.parse(content["member"]), number, content["text"], certificate, signature)

    def signed_text(self, run: int) -> bytes:
        """Return what the signature is over."""
        return f"{run:016x}\n{self.member}\n{self.number}\n{self.text}".encode(errors="surrogatepass")


class Statuses:
    """The newest status of each slot, and the own one. Used by one thread.

    Attributes:
        own: the last status of this member; None: there is none yet.
        newest: of all other members, by slot. A later process of the own slot is among them.
    """

    def __init__(self, run: int, me: Member, identity: "Identity | None") -> None:
        self._run, self._me, self.identity = run, me, identity
        self._number = 0
        self.own: SignedStatus | None = None
        self.newest: dict[int, SignedStatus] = {}

    def sign(self, status: Status) -> SignedStatus:
        """Make a status the own one; raises ValueError for one that is too large."""
        text = json.dumps(status, separators=(",", ":"))
        if len(text) > MOST_STATUS_BYTES:
            raise ValueError(f"a status of {len(text)} bytes is longer than {MOST_STATUS_BYTES}")
        self._number += 1
        certificate = b"" if self.identity is None else self.identity.certificate
        unsigned = SignedStatus(self._me, self._number, text, certificate, b"")
        signature = b"" if self.identity is None else self.identity.sign(unsigned.signed_text(self._run))
        self.own = SignedStatus(self._me, self._number, text, certificate, signature)
        return self.own

    def take(self, signed: SignedStatus) -> bool:
        """Keep a status that is newer than the known one of its slot; return whether it is. Raises ValueError."""
        known = self.newest.get(signed.member.slot)
        if known is not None and (signed.member, signed.number) <= (known.member, known.number):
            return False
        if signed.member.slot == self._me.slot and signed.member <= self._me:
            return False
        self.check(signed)
        self.newest[signed.member.slot] = signed
        return True

    def check(self, signed: SignedStatus) -> None:
        """Raise ValueError where a status is not of its member, or its text is no status."""
        now = time.time_ns()
        if signed.member.incarnation > now + _DAY_NS and now > _CLOCKLESS_NS:
            raise ValueError("is of a process that starts in the future")
        if self.identity is not None:
            text = signed.signed_text(self._run)
            self.identity.check(signed.certificate, signed.member.slot, text, signed.signature)
        assert isinstance(signed.status, dict)


def object_in(text: str | bytes) -> dict[str, Any]:
    """Return an object of JSON that another member has written; raises ValueError."""
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")
    return found


def addresses_in(status: Status) -> list[str]:
    """Return the addresses at which a member says that it can be dialled; malformed ones are left out."""
    found = status.get("addresses")
    addresses = found[:MOST_ADDRESSES] if isinstance(found, list) else []
    return [address for address in addresses if isinstance(address, str) and is_address(address)]


def slots_in(status: Mapping[str, Any], name: str) -> frozenset[int]:
    """Return the slots that a status lists under a name."""
    found = status.get(name)
    return frozenset(slot for slot in found if type(slot) is int) if isinstance(found, list) else frozenset()


def is_address(text: str) -> bool:
    """Return whether a text is "HOST:PORT", with an IPv6 address in []."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match["port"]) < 2**16 and len(text) <= _LONGEST_ADDRESS


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
