"""The small messages of two processes: JSON objects with named fields.

A message is its length in four bytes, and the object:

| kind | sender | meaning |
|---|---|---|
| hello | both, first | who the sender is, and which addresses it knows |
| go | the higher slot | the connection is to be the session of the two; the lower slot takes it with a state |
| stream | who has connected; the other side repeats it | this is a connection for bulk data of a session |
| state | both, twice a second and at each change | which exchanges the sender has begun |
| want | receiver of bulk data | a receive is posted under `tag` |
| got | the same | all of it has come |
| known | both | addresses, see `rendezvous.Directory` |
| ask | who takes over a state | asks for that of the receiver, to be sent under `tag` |
| offer | who was asked | describes the state that follows, or says that there is none |
| row | both | a row of the sender's metrics, for `watch` |

Every field is checked before any other code looks at it, and nothing is evaluated. The first message of a process
that has connected to this one is short: whoever it is, it is a stranger until then.
"""

from collections.abc import Generator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_noloco.federation.wires import Wire
from megatron_noloco.files import outside

VERSION = 12  # of the protocol
LARGEST = 2**63 - 1
LONGEST = 2**21  # bytes of a message
LONGEST_FIRST = 2**16
LONGEST_ROW = 2**13  # characters

Number = Annotated[int, Field(ge=0, le=LARGEST)]
Latest = Annotated[int, Field(ge=-1, le=LARGEST)]  # exchange; -1: none
Text = Annotated[str, Field(max_length=255)]
_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class Address:
    """Where a replica is reached; a later process of the replica has a larger epoch.

    Attributes:
        endpoint: "" where no other process can connect to it.
        site: the name of where it is, as its job gives it; "" where it gives none.
    """

    endpoint: Text
    epoch: Annotated[int, Field(gt=0, le=LARGEST)]
    site: Text = ""


@dataclass(frozen=True, config=_STRICT)
class Member:
    """A process, as others know it.

    Attributes:
        slot, slots: of its replica, and of all, as far as its job knows; another job may have more.
        run: the number of its run.
        digests: of what all jobs have alike, by name.
        kind: of its job. See `likeness` for these three.
        streams: connections for bulk data that it would have to each other replica.
    """

    slot: Number
    slots: Number
    run: Number
    digests: dict[str, Text] = Field(default_factory=dict)
    kind: Text = ""
    streams: Annotated[int, Field(ge=1, le=64)] = 1


@dataclass(frozen=True, config=_STRICT)
class Hello:
    """Who a process is, and which addresses it knows.

    Attributes:
        question: whether it wants to know addresses, and nothing else.
    """

    member: Member
    address: Address
    others: dict[int, Address]
    question: bool = False
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, config=_STRICT)
class Go:
    """The proposal of a session, with a name of its own."""

    session: Text
    kind: Literal["go"] = "go"


@dataclass(frozen=True, config=_STRICT)
class Stream:
    """The beginning of a connection for bulk data of a session."""

    session: Text
    kind: Literal["stream"] = "stream"


@dataclass(frozen=True, config=_STRICT)
class State:
    """Where a replica is in its exchanges.

    Attributes:
        begun: the latest exchange that it has begun.
        open_from: the first that it may have with the receiver; what is under way for earlier ones is void.
        counted: the latest with the receiver that counts for the sender. A receiver that misses a token of that
            exchange is in doubt, as the sender did not skip it.
        step: local steps of the state that it can give; 0: it has none to give.
        takes_over: whether it waits for the state of another replica, and takes part in no exchange until then.
        sees: at the end of the sender all replicas to which it is connected; before, those to which nobody can
            connect, told to such replicas only.
    """

    begun: Latest = -1
    open_from: Number = 0
    counted: Latest = -1
    step: Number = 0
    takes_over: bool = False
    sees: list[Number] = Field(default_factory=list)
    kind: Literal["state"] = "state"


@dataclass(frozen=True, config=_STRICT)
class Want:
    """The receive of a message that the other side has posted, or will. Its number is never given twice."""

    number: Number
    tag: Number
    length: Number
    dtype: Text
    kind: Literal["want"] = "want"


@dataclass(frozen=True, config=_STRICT)
class Got:
    """The confirmation of all that was wanted under a number."""

    number: Number
    kind: Literal["got"] = "got"


@dataclass(frozen=True, config=_STRICT)
class Known:
    """The addresses that a process knows, by slot."""

    others: dict[int, Address]
    kind: Literal["known"] = "known"


@dataclass(frozen=True, config=_STRICT)
class Ask:
    """A question for the state of the receiver, which sends it between two of its local steps."""

    tag: Number
    kind: Literal["ask"] = "ask"


@dataclass(frozen=True, config=_STRICT)
class Offer:
    """The answer to an `Ask`: what the state has that follows.

    Attributes:
        step: local steps of the state; 0: there is nothing to give.
        facts: see `handover.State`.
        vectors: their names.
        rest: bytes of what is no vector.
    """

    tag: Number
    step: Number = 0
    facts: dict[str, Any] = Field(default_factory=dict)
    vectors: Annotated[list[Text], Field(max_length=64)] = Field(default_factory=list)
    rest: Annotated[int, Field(ge=0, le=2**30)] = 0
    kind: Literal["offer"] = "offer"


@dataclass(frozen=True, config=_STRICT)
class Row:
    """A row of the sender's `metrics.jsonl`."""

    text: Annotated[str, Field(max_length=LONGEST_ROW)]
    kind: Literal["row"] = "row"


Said = Hello | Go | Stream | State | Want | Got | Known | Ask | Offer | Row
Kind = TypeVar("Kind", bound=Said)
_SAID: TypeAdapter[Said] = TypeAdapter(
    Annotated[Said, Field(discriminator="kind")], config=ConfigDict(ser_json_inf_nan="constants")
)


class RefusedError(ConnectionError):
    """The other side of a connection says what no member says. The reason may quote it."""

    def __init__(self, why: str) -> None:
        super().__init__(outside(why))


def packed(said: Said) -> bytes:
    """Return a message as it is sent."""
    text = _SAID.dump_json(said)
    return len(text).to_bytes(4, "big") + text


def say(wire: Wire, said: Said) -> None:
    """Send a message."""
    wire.write(packed(said))


def heard(*kinds: type[Kind], longest: int = LONGEST) -> Generator[memoryview, None, Kind]:
    """Return the next message; a part of a script. Raises RefusedError as `unpacked` does."""
    length = bytearray(4)
    yield memoryview(length)
    size = int.from_bytes(length, "big")
    if size > longest:
        raise RefusedError(f"a message has more than {longest} bytes")
    text = bytearray(size)
    yield memoryview(text)
    return unpacked(bytes(text), *kinds)


def unpacked(text: bytes, *kinds: type[Kind]) -> Kind:
    """Return the message of an object; raises RefusedError for one of no kind that is expected."""
    try:
        said = _SAID.validate_json(text)
    except ValidationError as error:
        raise RefusedError(f"a message is none: {error.errors()[0]['msg']}") from None
    if not isinstance(said, kinds):
        raise RefusedError(f"{said.kind} is said too early or too late")
    return said
