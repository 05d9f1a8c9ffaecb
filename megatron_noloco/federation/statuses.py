"""Members, and what they publish of themselves: each status is signed, so that anybody may pass it on.

A later process of a slot replaces an earlier one, and a higher number a lower one.
"""

import json
import re
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    Base64Bytes,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)

from megatron_noloco.settings import MOST_FRAGMENTS, MOST_SLOTS

if TYPE_CHECKING:
    from megatron_noloco.federation.keys import Identity

LARGEST = 2**53
LONGEST_ROW = 3000  # characters
MOST_ROWS = 4
KEPT_ROUNDS = 8  # besides those under way
_MOST_ROUNDS = MOST_FRAGMENTS + KEPT_ROUNDS
MOST_STATUS_BYTES = 2**16  # of some 2,000 members in a proposal of the mean at the end
MOST_SIGNED_BYTES = 2**18  # of a status as it travels
MOST_ADDRESSES = 4
_DAY_NS = 86_400 * 10**9
_CLOCKLESS_NS = 1_767_225_600 * 10**9  # a clock before 2026 is wrong
_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9][A-Za-z0-9_.-]*)):(?P<port>[0-9]{1,5})"
)
_LONGEST_ADDRESS = 255

Phase = Literal["training", "behind", "ended", "left"]
Slot = Annotated[int, Field(ge=0, lt=MOST_SLOTS)]
Number = Annotated[int, Field(ge=0, le=LARGEST)]
Text = Annotated[str, Field(max_length=255)]
Row = Annotated[str, Field(max_length=LONGEST_ROW)]


class StatusError(ValueError):
    """A status of a member cannot be used; the message is a line for the user."""


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


def is_address(text: str) -> bool:
    """Return whether a text is "HOST:PORT", with an IPv6 address in []."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match["port"]) < 2**16 and len(text) <= _LONGEST_ADDRESS


def _in_order(addresses: list[str]) -> list[str]:
    return list(filter(is_address, addresses))


@dataclass(frozen=True)
class FinalStatus:
    """What a replica publishes of the mean at the end; see `final_mean`.

    Attributes:
        attempt: number of the attempt that it has proposed last; 0: none.
        members: of this attempt: slots.
        processes: a digest of which processes of these slots are members.
        parents: of these in the tree; -1 for the root.
        refused: slots that have sent it numbers that must not be used, or nothing.
        final: "ROOT/NUMBER" of the attempt whose mean it uses; "": none.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")

    attempt: Number = 0
    members: Annotated[list[Slot], Field(max_length=MOST_SLOTS)] = field(default_factory=list)
    processes: Text = ""
    parents: Annotated[list[Annotated[int, Field(ge=-1, lt=MOST_SLOTS)]], Field(max_length=MOST_SLOTS)] = (
        field(default_factory=list)
    )
    refused: Annotated[list[Slot], Field(max_length=MOST_SLOTS)] = field(default_factory=list)
    final: Text = ""


@dataclass(frozen=True)
class PeerStatus:
    """What a replica publishes of itself. Every field is checked before it is used.

    Attributes:
        phase: "training"; "behind": it recovers a state, and begins no round before; "ended": it waits for the
            mean at the end; "left": it comes no more.
        begun: the latest round that it has begun; -1: none.
        partners: the partner in each of the last rounds, by number of the round.
        under_way: the rounds that are under way.
        step: local steps of the state that it can give; 0: it has no state to give.
        addresses: where others dial it, "HOST:PORT"; none: nobody can. Malformed ones of others are left out.
        hidden: whether two replicas of which this holds cannot exchange.
        site: the name of where it is; "" if its job gives no name.
        kind, digests, batch: see `compatibility.RunIdentity`.
        reaches: at its end: the slots with which it can exchange.
        mean: of the mean at the end.
        rows: its newest rows of metrics, numbered.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")

    phase: Phase = "training"
    begun: Annotated[int, Field(ge=-1, le=LARGEST)] = -1
    partners: Annotated[dict[Number, Slot], Field(max_length=_MOST_ROUNDS)] = field(default_factory=dict)
    under_way: Annotated[list[Number], Field(max_length=_MOST_ROUNDS)] = field(default_factory=list)
    step: Number = 0
    addresses: Annotated[list[Text], Field(max_length=MOST_ADDRESSES), AfterValidator(_in_order)] = field(
        default_factory=list
    )
    hidden: bool = False
    site: Text = ""
    kind: Text = ""
    digests: Annotated[dict[Text, Text], Field(max_length=64)] = field(default_factory=dict)
    batch: Number = 0
    reaches: Annotated[list[Slot], Field(max_length=MOST_SLOTS)] = field(default_factory=list)
    mean: FinalStatus = FinalStatus()
    rows: Annotated[list[tuple[Number, Row]], Field(max_length=MOST_ROWS)] = field(default_factory=list)

    @property
    def has_left(self) -> bool:
        """Whether this replica comes no more."""
        return self.phase == "left"

    def open_from(self, slot: int) -> int:
        """Return the earliest round that may still be open with a replica: under way with it, or the next."""
        under_way = (number for number in self.under_way if self.partners.get(number) == slot)
        return min(under_way, default=self.begun + 1)

    def is_without(self, slot: int, number: int) -> bool:
        """Return whether this replica has no part in a round with another, and will have none."""
        is_past = self.begun >= number or self.phase != "training"
        return is_past and self.partners.get(number) != slot


_STATUS = TypeAdapter(PeerStatus)


@dataclass(frozen=True, eq=False)
class SignedStatus:
    """A status as it travels.

    Attributes:
        number: grows with each status of the member.
        text: JSON of the status.
        certificate: of the member, DER.
    """

    member: Annotated[
        Member,
        PlainValidator(lambda text: Member.parse(text if isinstance(text, str) else "")),
        PlainSerializer(str),
    ]
    number: Annotated[int, Field(strict=True, gt=0, lt=2**63)]
    text: Annotated[str, Field(max_length=MOST_STATUS_BYTES)]
    certificate: Base64Bytes
    signature: Base64Bytes

    @cached_property
    def status(self) -> PeerStatus:
        """The status; ValueError where the text is malformed."""
        return _STATUS.validate_json(self.text)

    @cached_property
    def line(self) -> bytes:
        """The status as one line of JSON."""
        return _SIGNED.dump_json(self) + b"\n"

    @classmethod
    def parse(cls, content: Any) -> "SignedStatus":
        """Return the status that an object of JSON holds; raises ValueError. `Statuses.take` checks the rest."""
        try:
            return _SIGNED.validate_python(content)
        except ValidationError:
            raise ValueError("is no status") from None

    def signed_text(self, run: int) -> bytes:
        """Return what the signature is over."""
        return f"{run:016x}\n{self.member}\n{self.number}\n{self.text}".encode(errors="surrogatepass")


_SIGNED = TypeAdapter(SignedStatus)


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

    def sign(self, status: PeerStatus) -> None:
        """Make a status the own one; raises ValueError for one that is too large."""
        text = json.dumps(asdict(status), separators=(",", ":"))
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
        """Keep a status that is newer than the known one of its slot; return whether it is.

        Raises ValueError for a status that is not of its member, StatusError for one that cannot be used.
        """
        if not self.lacks(signed.member, signed.number):
            return False
        self._check(signed)
        with self._lock:
            is_new = self.lacks(signed.member, signed.number)
            if is_new:
                self._newest[signed.member.slot] = signed
            return is_new

    def _check(self, signed: SignedStatus) -> None:
        """Raise ValueError for a status that cannot be taken."""
        text = signed.signed_text(self.run)
        self.identity.check(signed.certificate, signed.member.slot, text, signed.signature)
        now, start = time.time_ns(), signed.member.incarnation
        if start > now + _DAY_NS and now > _CLOCKLESS_NS:
            raise StatusError(
                f"replica {signed.member.slot} was started more than a day after this machine's time, by its own "
                "clock; nothing is exchanged until both clocks are right, and the job is started again"
            )
        try:
            _ = signed.status
        except ValueError:
            raise StatusError(f"the status of replica {signed.member.slot} is malformed") from None


def object_in(text: str | bytes) -> dict[str, Any]:
    """Return an object of JSON that another member has written; raises ValueError."""
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")
    return found


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
