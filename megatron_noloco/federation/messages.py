"""The small messages of replicas: JSON objects with named fields, each with its length before it.

| message | where | meaning |
|---|---|---|
| Hello | first on a link, from both sides | who the sender is |
| Later | in place of a Hello, or after it | the receiver is not the latest process of its slot |
| Header | first on any other stream of a replica | which conversation begins |
| Visit | first on a stream of a program that is no replica | a request for an invitation begins |
| Status | on a link, now and then and at each change | where the sender is in its rounds |
| Known | on a link | addresses that are new to the receiver, as far as the sender knows |
| Open | on a link | the receiver is to open a stream, since the sender cannot |
| Prepared | on a link | the sender has accepted the mean of a round |
| Verdict | on a link | whether a round counts for the sender |
| Row | on a link | a row of the sender's metrics, for `watch` |

Every field is checked before any other code looks at it, and nothing is evaluated.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_noloco.federation.streams import Stream
from megatron_noloco.files import outside

LARGEST = 2**63 - 1
LONGEST_ROW = 2**13  # characters
_LONGEST_BYTES = 2**23  # the addresses of more than a thousand replicas that are all linked, at their end
LONGEST_FIRST_BYTES = 2**16  # whoever says it is a stranger until then
_LENGTH_BYTES = 4

Slot = Annotated[int, Field(ge=0, lt=2**20)]
Number = Annotated[int, Field(ge=0, le=LARGEST)]
Latest = Annotated[int, Field(ge=-1, le=LARGEST)]  # number of a round; -1: none
Text = Annotated[str, Field(max_length=255)]
STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=STRICT)
class Address:
    """Where a replica is.

    Attributes:
        endpoint: which others dial, "tcp://HOST:PORT" or "folder://INBOX"; "" where nobody can.
        incarnation: number of its process; a later process of the replica has a larger number.
        site: the name of where it is, as its job gives it; "" where it gives no name.
        changes: of what follows, counted.
        is_at_end: whether it waits for the mean at the end.
        linked: the replicas to which it has links: at its end all, before only hidden ones.
    """

    endpoint: Text
    incarnation: Annotated[int, Field(gt=0, le=LARGEST)]
    site: Text = ""
    changes: Number = 0
    is_at_end: bool = False
    linked: list[Slot] = Field(default_factory=list)


@dataclass(frozen=True, config=STRICT)
class Member:
    """What a job must have alike with the others; see `compatibility`.

    Attributes:
        run: number of the run.
        digests: of what all jobs have alike, by name.
        kind: of the job.
    """

    run: Number
    digests: dict[str, Text] = Field(default_factory=dict)
    kind: Text = ""


@dataclass(frozen=True, config=STRICT)
class Hello:
    """Begins a link."""

    slot: Slot
    address: Address
    member: Member
    type: Literal["hello"] = "hello"


@dataclass(frozen=True, config=STRICT)
class Later:
    """Says that a later process of the receiver's slot is there, or was there: its clock was ahead.

    Attributes:
        incarnation: of that process.
    """

    incarnation: Number
    is_there: bool
    type: Literal["later"] = "later"


@dataclass(frozen=True, config=STRICT)
class Header:
    """Begins a stream of two replicas: says which conversation it is.

    Attributes:
        slot, incarnation: of the sender.
        kind: such as "round".
        number: of the round, or of the `Open` of another kind.
        is_answer: whether the stream answers an `Open`.
    """

    slot: Slot
    incarnation: Number
    kind: Text
    number: Number = 0
    is_answer: bool = False
    type: Literal["header"] = "header"


@dataclass(frozen=True, config=STRICT)
class Visit:
    """Begins to ask for an invitation, as a program with the key that is no replica."""

    member: Member
    type: Literal["visit"] = "visit"


Phase = Literal["training", "behind", "ended", "left"]


@dataclass(frozen=True, config=STRICT)
class Status:
    """Where a replica is.

    Attributes:
        phase: "training"; "behind": it takes over a state, and has no rounds before; "ended": it waits for the
            mean at the end; "left": it comes no more.
        begun: the latest round that it has begun.
        open_from: the first round that it may have with the receiver.
        step: local steps of the state that it can give; 0: it has no state to give.
        directory: checksum of the addresses that it knows.
        pulse: seconds until its next status, at most.
    """

    phase: Phase = "training"
    begun: Latest = -1
    open_from: Number = 0
    step: Number = 0
    directory: Number = 0
    pulse: Annotated[float, Field(gt=0, le=3600)] = 5.0
    type: Literal["status"] = "status"


@dataclass(frozen=True, config=STRICT)
class Known:
    """Addresses by slot."""

    addresses: dict[int, Address]
    type: Literal["known"] = "known"


@dataclass(frozen=True, config=STRICT)
class Open:
    """Asks for a stream for a conversation; see `Header`."""

    kind: Text
    number: Number
    type: Literal["open"] = "open"


@dataclass(frozen=True, config=STRICT)
class Prepared:
    """The sender has accepted the mean of this round, and asks whether the round counts."""

    number: Number
    type: Literal["prepared"] = "prepared"


@dataclass(frozen=True, config=STRICT)
class Verdict:
    """Whether a round counts for the sender, for ever."""

    number: Number
    counts: bool
    type: Literal["verdict"] = "verdict"


@dataclass(frozen=True, config=STRICT)
class Row:
    """A row of the sender's `metrics.jsonl`."""

    text: Annotated[str, Field(max_length=LONGEST_ROW)]
    type: Literal["row"] = "row"


Message = Hello | Later | Header | Visit | Status | Known | Open | Prepared | Verdict | Row
Kind = TypeVar("Kind", bound=Message)
Content = TypeVar("Content")
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


class MalformedError(ConnectionError):
    """The other side says what no member says. The reason may quote it."""

    def __init__(self, reason: str) -> None:
        super().__init__(outside(reason))


async def say(stream: Stream, message: Message) -> None:
    """Send a message. Raises StreamEndedError."""
    await send_json(stream, _MESSAGE, message)


async def hear(stream: Stream, *kinds: type[Kind], first: bool = False) -> Kind:
    """Return the next message.

    Args:
        first: whether the other side has not shown yet that it is a member; its message is short then.

    Raises MalformedError for another message than of these kinds, StreamEndedError.
    """
    message = await receive_json(stream, _MESSAGE, LONGEST_FIRST_BYTES if first else _LONGEST_BYTES)
    if not isinstance(message, kinds):
        raise MalformedError(f"{message.type} is said too early or too late")
    return message


def packed(kind: TypeAdapter[Content], content: Content) -> bytes:
    """Return an object as `receive_json` takes it: its length, and its JSON."""
    text = kind.dump_json(content)
    return len(text).to_bytes(_LENGTH_BYTES) + text


async def send_json(stream: Stream, kind: TypeAdapter[Content], content: Content) -> None:
    """Send an object. Raises StreamEndedError."""
    await stream.send(packed(kind, content))


async def receive_json(stream: Stream, kind: TypeAdapter[Content], longest: int) -> Content:
    """Return the next object. Raises MalformedError for an object of another kind, StreamEndedError.

    Args:
        longest: bytes that it may have.
    """
    length = int.from_bytes(await stream.receive(_LENGTH_BYTES))
    if length > longest:
        raise MalformedError(f"a message has more than {longest} bytes")
    try:
        return kind.validate_json(await stream.receive(length))
    except ValidationError as error:
        raise MalformedError(f"a message is malformed: {error.errors()[0]['msg']}") from None
