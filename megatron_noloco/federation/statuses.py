"""Members, and their statuses as they travel: each is signed by its member, so that anybody may pass it on.

A later process of a slot replaces an earlier one, and a higher number a lower one.
"""

import base64
import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_noloco.settings import MOST_SLOTS

if TYPE_CHECKING:
    from megatron_noloco.federation.keys import Identity

Status = Mapping[str, Any]
"""What a member publishes: JSON."""

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


class ClockError(ValueError):
    """A process starts in the future; the message is a line."""


class Member(NamedTuple):
    """A process of a replica; `str` gives its name, "SLOT.INCARNATION"."""

    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.slot}.{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> "Member":
        """Return the member of a name; raises ValueError."""
        slot, _, incarnation = text.partition(".")
        if not (slot.isdecimal() and incarnation.isdecimal() and len(text) <= 26 and text.isascii()):
            raise ValueError("not the name of a member")
        member = cls(int(slot), int(incarnation))
        if str(member) != text or not (member.slot < MOST_SLOTS and 0 < member.incarnation < 2**63):
            raise ValueError("not the name of a member")
        return member


@dataclass(frozen=True, eq=False)
class SignedStatus:
    """A status as it travels.

    Attributes:
        number: grows with each status of the member.
        text: JSON of the status.
        certificate: of the member, DER.
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

    @property
    def has_left(self) -> bool:
        """Whether the member has ended."""
        return self.status.get("phase") == "left"

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
    """The own status, and the newest status of each other slot. Thread-safe.

    Args:
        run: number of the run.
        identity: of this process.

    Attributes:
        own: the last status of this member; None: there is none yet.
    """

    def __init__(self, run: int, me: Member, identity: "Identity") -> None:
        self.run, self.me, self.identity = run, me, identity
        self.own: SignedStatus | None = None
        self._newest: dict[int, SignedStatus] = {}
        self._lock = threading.RLock()

    def sign(self, status: Status) -> None:
        """Make a status the own one; raises ValueError for one that is too large."""
        text = json.dumps(status, separators=(",", ":"))
        if len(text) > MOST_STATUS_BYTES:
            raise ValueError(f"a status of {len(text)} bytes is longer than {MOST_STATUS_BYTES}")
        with self._lock:
            number = 1 if self.own is None else self.own.number + 1
            own = SignedStatus(self.me, number, text, self.identity.certificate, b"")
            self.own = replace(own, signature=self.identity.sign(own.signed_text(self.run)))

    def newest(self) -> list[SignedStatus]:
        """Return the newest status of each other slot. A later process of the own slot is among them."""
        with self._lock:
            return list(self._newest.values())

    def of(self, slot: int) -> SignedStatus | None:
        """Return the newest status of another process of a slot."""
        return self._newest.get(slot)

    def lacks(self, member: Member, number: int) -> bool:
        """Return whether a status would be newer than the known one of its slot."""
        known = self._newest.get(member.slot)
        is_own = member.slot == self.me.slot and member <= self.me
        return not is_own and (known is None or (member, number) > (known.member, known.number))

    def take(self, signed: SignedStatus) -> bool:
        """Keep a status that is newer than the known one of its slot; return whether it is. Raises ValueError."""
        if not self.lacks(signed.member, signed.number):
            return False
        self._check(signed)
        with self._lock:
            is_new = self.lacks(signed.member, signed.number)
            if is_new:
                self._newest[signed.member.slot] = signed
            return is_new

    def _check(self, signed: SignedStatus) -> None:
        """Raise ValueError where a status is not of its member, or its text is no status."""
        text = signed.signed_text(self.run)
        self.identity.check(signed.certificate, signed.member.slot, text, signed.signature)
        now, start = time.time_ns(), signed.member.incarnation
        if start > now + _DAY_NS and now > _CLOCKLESS_NS:
            raise ClockError(
                f"replica {signed.member.slot} was started more than a day after this machine's time, by its own "
                "clock; nothing is exchanged until both clocks are right, and the job is started again"
            )
        assert isinstance(signed.status, dict)  # it is in order


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


def is_address(text: str) -> bool:
    """Return whether a text is "HOST:PORT", with an IPv6 address in []."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match["port"]) < 2**16 and len(text) <= _LONGEST_ADDRESS


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
