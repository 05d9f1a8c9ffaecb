"""How a machine without the key joins on the port of a job: the side of the job.

| newcomer | job |
|---|---|
| the secret of its line (`Knock`) | what the newcomer must have itself (`JoinRequirements`) |
| bytes, any number of times (`Probe`) | bytes: both measure the link |
| that it is ready (`Ready`) | all that it needs, once (`JoinBundle`) |

The job that made an invitation keeps it, in a file that has a digest of the secret. A process with the key asks
for a new invitation (`Wish`), in a `Visit`. `joining` has the side of the newcomer.
"""

import asyncio
import base64
import hashlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_noloco import __version__
from megatron_noloco.federation.directory import is_endpoint
from megatron_noloco.federation.messages import (
    LONGEST_FIRST_BYTES,
    STRICT,
    Member,
    Visit,
    receive_json,
    say,
    send_json,
)
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.rendezvous import Seeds
from megatron_noloco.federation.streams import Carrier, Stream, StreamEndedError, within
from megatron_noloco.files import write_text
from megatron_noloco.settings import MOST_SLOTS, TCP

DataField = Literal["text", "data_path", "train_data_path", "valid_data_path", "sft_data_path"]
DATA = get_args(DataField)
MOST_PROBE_BYTES = 2**25
_BLOCK_BYTES = 2**18
SECONDS = 600.0  # for all that a newcomer asks
_WISH_SECONDS = 10.0
_MOST_SEEDS = 16
_FILE = (  # of a tokenizer
    r"^((tokenizer|tokenizer_config|special_tokens_map)\.json|"
    r"(additional_chat_templates/[\w.-]+|chat_template)\.jinja)$"
)


def _seeds(text: str) -> str:
    """Return addresses of jobs; raises UserError for any other rendezvous, such as a folder."""
    Seeds.of(text.removeprefix(TCP))
    return text


def _base64(text: str) -> str:
    base64.b64decode(text, validate=True)
    return text


Slot = Annotated[int, Field(ge=0, lt=MOST_SLOTS)]
Size = Annotated[int, Field(ge=0, le=MOST_PROBE_BYTES)]


@dataclass(frozen=True, config=STRICT)
class Wish:
    """Asks for an invitation that is good for so many seconds.

    Attributes:
        slot: that the newcomer takes, whoever had it; None: a free slot.
    """

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    slot: Slot | None = None


@dataclass(frozen=True, config=STRICT)
class Made:
    """A new invitation: what its line says of the job, and the slot of the job."""

    version: str
    endpoint: str
    secret: str
    slot: Slot


@dataclass(frozen=True, config=STRICT)
class Knock:
    """The first message of a newcomer."""

    secret: Annotated[str, Field(max_length=64)]


@dataclass(frozen=True, config=STRICT)
class JoinRequirements:
    """What a newcomer must have itself.

    Attributes:
        data: fields of the block `data`, any of which says what is read; empty where every machine has it.
        pretrained: whether the run began with pretrained weights.
    """

    data: list[DataField]
    pretrained: bool


@dataclass(frozen=True, config=STRICT)
class Probe:
    """Bytes that follow this message, and bytes that are to come back, with another byte after them."""

    up: Size
    down: Size
    type: Literal["probe"] = "probe"


@dataclass(frozen=True, config=STRICT)
class Ready:
    """The newcomer has all that it must have."""

    type: Literal["ready"] = "ready"


@dataclass(frozen=True, config=STRICT)
class JoinBundle:
    """What a newcomer gets.

    Attributes:
        slot: that it takes.
        config: the fields that all jobs share, see `config.agreed`.
        rendezvous: addresses of jobs that are there.
        key: content of the key file.
        tokenizer: files in base64, by name; empty for bytes.
    """

    slot: Slot
    config: dict[str, Any]
    rendezvous: Annotated[str, Field(pattern="^tcp://"), AfterValidator(_seeds)]
    key: Annotated[str, Field(max_length=2**14)]
    tokenizer: dict[Annotated[str, Field(pattern=_FILE)], Annotated[str, AfterValidator(_base64)]]


@dataclass(frozen=True, config=STRICT)
class _Invitation:
    """What the job keeps.

    Attributes:
        expires: seconds of Unix time.
        slot: that the newcomer takes, or has taken; None: a free slot.
    """

    expires: float
    slot: Slot | None
    used: bool = False


_WISH, _MADE, KNOCK = TypeAdapter(Wish), TypeAdapter(Made), TypeAdapter(Knock)
REQUIREMENTS, BUNDLE = TypeAdapter(JoinRequirements), TypeAdapter(JoinBundle)
REQUEST: TypeAdapter[Probe | Ready] = TypeAdapter(Annotated[Probe | Ready, Field(discriminator="type")])
_INVITATIONS = TypeAdapter(dict[str, _Invitation])


class Offer(NamedTuple):
    """What a job has for newcomers; see `JoinBundle`."""

    requirements: JoinRequirements
    config: dict[str, Any]
    key: str
    tokenizer: dict[str, str]


class Invitations:
    """The job's side: makes invitations, keeps them, and answers newcomers. Used by one event loop.

    Args:
        offer: makes an offer, in a thread of its own; may raise OSError and ValueError.
        node: of this job, which says a line for each newcomer.
        path: of the file that keeps the invitations.
    """

    def __init__(self, offer: Callable[[], Offer], node: Node, path: Path) -> None:
        self._offer, self._node, self._path = offer, node, path
        self._changing = asyncio.Lock()
        self._invitations: dict[str, _Invitation] = {}  # by digest of the secret
        try:
            self._invitations = _INVITATIONS.validate_json(path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValidationError):
            node.warn(f"{path} cannot be read: invitations that this job made before are good no more")

    async def invite(self, stream: Stream) -> None:
        """Make an invitation for a process with the key."""
        wish = await receive_json(stream, _WISH, LONGEST_FIRST_BYTES)
        endpoint = self._endpoints()[self._node.slot]
        if not endpoint:
            raise StreamEndedError("nobody can dial this job: ask another one for an invitation")
        if wish.slot in {self._node.slot, *self._node.present()}:
            raise StreamEndedError(f"replica {wish.slot} is running: stop it first, or leave out --slot")
        secret, now = secrets.token_hex(16), time.time()
        async with self._changing:
            good = {key: one for key, one in self._invitations.items() if one.used or one.expires > now}
            await self._keep(good | {_digest(secret): _Invitation(now + wish.seconds, wish.slot)})
        await send_json(stream, _MADE, Made(__version__, endpoint, secret, self._node.slot))

    async def welcome(self, stream: Stream) -> None:
        """Answer a newcomer, until it has what it needs."""
        async with asyncio.timeout(SECONDS):
            digest = _digest((await receive_json(stream, KNOCK, LONGEST_FIRST_BYTES)).secret)
            self._invitation(digest)
            stream.admit()
            try:
                offer = await asyncio.to_thread(self._offer)
            except (OSError, ValueError) as error:
                raise self._failure(error) from None
            await send_json(stream, REQUIREMENTS, offer.requirements)
            while isinstance(asked := await receive_json(stream, REQUEST, LONGEST_FIRST_BYTES), Probe):
                await stream.skip(asked.up)
                await send_bytes(stream, asked.down + 1)
            await send_json(stream, BUNDLE, await self._use(digest, offer))

    async def _use(self, digest: str, offer: Offer) -> JoinBundle:
        """Use an invitation, and return what the newcomer gets. Raises StreamEndedError."""
        async with self._changing:
            invitation, endpoints = self._invitation(digest), self._endpoints()
            taken = {*endpoints, *(one.slot for one in self._invitations.values())}
            free = (slot for slot in range(MOST_SLOTS) if slot not in taken)
            slot = next(free, None) if invitation.slot is None else invitation.slot
            if slot is None:
                raise StreamEndedError(f"all {MOST_SLOTS} slots are taken")
            own = endpoints[self._node.slot]
            seeds = [own, *(place for place in endpoints.values() if place not in ("", own))][:_MOST_SEEDS]
            rendezvous = TCP + ",".join(seed.removeprefix(TCP) for seed in seeds)
            try:
                bundle = JoinBundle(slot, offer.config, rendezvous, offer.key, offer.tokenizer)
                await self._keep(self._invitations | {digest: replace(invitation, slot=slot, used=True)})
            except (OSError, ValueError) as error:
                raise self._failure(error) from None
        self._node.warn(f"a machine joins with an invitation, and takes slot {slot}")
        return bundle

    def _endpoints(self) -> dict[int, str]:
        """Return where the replicas are dialled, by slot; "" where nobody can dial."""
        places = {slot: address.endpoint for slot, address in self._node.directory.addresses.items()}
        return {slot: place if is_endpoint(place) else "" for slot, place in places.items()}

    def _invitation(self, digest: str) -> _Invitation:
        """Return an invitation that is good. Raises StreamEndedError, with a reason for the newcomer."""
        invitation = self._invitations.get(digest)
        if invitation is None:
            raise StreamEndedError("this job does not know the invitation, or no more; ask for a new one")
        if invitation.used:
            raise StreamEndedError("this invitation was used already; ask for a new one")
        if invitation.expires <= time.time():
            raise StreamEndedError("this invitation has expired; ask for a new one")
        return invitation

    def _failure(self, error: Exception) -> StreamEndedError:
        """Tell the user of this job that a newcomer gets nothing; return the error that tells the newcomer."""
        self._node.warn(f"a machine with an invitation gets nothing: {error}")
        return StreamEndedError(f"the job that invites cannot let anybody in: {error}")

    async def _keep(self, invitations: dict[str, _Invitation]) -> None:
        """Write the invitations; raises OSError, and nothing has changed then."""
        text = _INVITATIONS.dump_json(invitations).decode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(write_text, self._path, text)
        self._invitations = invitations


async def ask_invitation(carrier: Carrier, endpoint: str, member: Member, wish: Wish) -> Made:
    """Ask a job for an invitation. Raises ConnectionError and TimeoutError."""
    late = f"the process at {endpoint} makes no invitation"
    async with await carrier.dial(endpoint) as stream, within(_WISH_SECONDS, late):
        await say(stream, Visit(member))
        await send_json(stream, _WISH, wish)
        return await receive_json(stream, _MADE, LONGEST_FIRST_BYTES)


async def send_bytes(stream: Stream, count: int) -> None:
    """Send random bytes, which nothing on the way can compress."""
    block = memoryview(os.urandom(min(count, _BLOCK_BYTES)))
    for start in range(0, count, _BLOCK_BYTES):
        await stream.send(block[: count - start])


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
