"""The side of a machine that joins with an invitation (see `invitation`), and the line that it needs.

The line says which job to ask, whom to trust, and a secret that is good for one newcomer. It is base64 of a JSON
list and four bytes of its SHA-256.
"""

import base64
import binascii
import hashlib
import hmac
import json
import re
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_noloco import __version__
from megatron_noloco.errors import UserError
from megatron_noloco.federation.invitation import (
    BUNDLE,
    KNOCK,
    MOST_PROBE_BYTES,
    REQUEST,
    REQUIREMENTS,
    SECONDS,
    JoinBundle,
    JoinRequirements,
    Knock,
    Probe,
    Ready,
    send_bytes,
)
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.messages import LONGEST_FIRST_BYTES, receive_json, send_json
from megatron_noloco.federation.streams import IS_IT_THE_MTU, Stream, within
from megatron_noloco.federation.tcp import TcpCarrier
from megatron_noloco.files import outside

_FIRST_PROBE_BYTES, _FIRST_PROBE_SECONDS = 2**18, 60.0
_STALLED = f"small messages pass, and larger ones come too slowly or not at all: {IS_IT_THE_MTU}"
_LONG_ENOUGH_SECONDS = 1.0  # to measure a rate
_TRIPS = 5
_LONGEST_BUNDLE_BYTES = 2**27
_BEGINNING = "noloco-"
_CHECK_BYTES = 4
_LONGEST = 2**14  # characters of a line, as it was wrapped and quoted


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Ticket:
    """The content of the line.

    Attributes:
        version: of the program.
        endpoint: of the job that made the invitation.
        fingerprint: of the certificate that answers, SHA-256, hexadecimal.
        secret: which the newcomer shows.
    """

    version: str = Field(pattern="^[!-~]{1,64}$")
    endpoint: str = Field(pattern="^tcp://[!-~]{1,255}:[0-9]{1,5}$")
    fingerprint: str = Field(pattern="^[0-9a-f]{64}$")
    secret: str = Field(pattern="^[0-9a-f]{32}$")


_TICKETS = TypeAdapter(Ticket)


def line_of(ticket: Ticket) -> str:
    """Return the line of a ticket."""
    content = json.dumps(list(asdict(ticket).values()), separators=(",", ":")).encode()
    return _BEGINNING + base64.urlsafe_b64encode(content + _check(content)).decode().rstrip("=")


def ticket_in(text: str) -> Ticket:
    """Return the ticket of the line in a text: a mail may wrap or quote it, and have other words around it.

    Raises UserError where the line is not as it was printed.
    """
    for found in re.finditer(_BEGINNING, text):
        line = ""
        for word in re.split("[^!-~]+", text[found.start() :][:_LONGEST]):
            line += "".join(re.findall(r"^[>|]*([\w-]+)", word, re.ASCII))
            with suppress(ValueError):
                return _ticket_of(line)
    if _BEGINNING not in text:
        raise UserError(
            f'join: this is no invitation, which begins with "{_BEGINNING}": give the line that `megatron-noloco '
            "invite` printed"
        )
    raise UserError(
        f'join: a part of the invitation is missing or changed: copy all from "{_BEGINNING}" to its end, or send '
        "it as a file, and give `join - < FILE`"
    )


def _ticket_of(line: str) -> Ticket:
    """Return the ticket of a line; raises ValueError for a line that is not as it was printed."""
    refused = ValueError("no invitation")
    text = line.removeprefix(_BEGINNING)
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        content, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if not hmac.compare_digest(check, _check(content)):
            raise refused
        names = list(Ticket.__dataclass_fields__)
        ticket = _TICKETS.validate_json(json.dumps(dict(zip(names, json.loads(content), strict=True))))
    except (binascii.Error, ValueError, TypeError, ValidationError, RecursionError):
        raise refused from None
    if line_of(ticket) != line:  # base64 has several ways to write the same bytes
        raise refused
    return ticket


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECK_BYTES]


class LinkSpeed(NamedTuple):
    """The measured link to the job that invites: bytes per second of the slower way, and seconds one way."""

    rate: float
    latency: float


class Admission(NamedTuple):
    """What a newcomer has learnt."""

    requirements: JoinRequirements
    speed: LinkSpeed
    bundle: JoinBundle


async def join(ticket: Ticket, check: Callable[[JoinRequirements], None]) -> Admission:
    """Run the newcomer's side. The invitation is used up then.

    Args:
        check: raises UserError where this machine lacks what it must have; the invitation stays good then.

    Raises UserError where nobody answers, or somebody else, or the invitation is good no more.
    """
    if ticket.version != __version__:
        raise UserError(
            f"join: the other side has megatron_noloco {ticket.version}, this machine {__version__}; install the "
            "same version"
        )
    carrier = TcpCarrier(Keys.of_newcomer(ticket.fingerprint))
    try:
        stream = await carrier.dial(ticket.endpoint)
    except ConnectionError as error:
        raise UserError(
            f"join: {outside(str(error))}; an invitation is good while the job that made it runs, with the same "
            "key, and its port is open"
        ) from None
    try:
        async with stream, within(SECONDS, f"it took more than {SECONDS:g} seconds; try again"):
            return await _joined(stream, ticket.secret, check)
    except TimeoutError as error:
        raise UserError(f"join: {error}") from None
    except ConnectionError as error:
        raise UserError(f"join: {outside(str(error))}") from None
    finally:
        await carrier.close()


async def _joined(stream: Stream, secret: str, check: Callable[[JoinRequirements], None]) -> Admission:
    await send_json(stream, KNOCK, Knock(secret))
    requirements = await receive_json(stream, REQUIREMENTS, LONGEST_FIRST_BYTES)
    try:
        check(requirements)
    except UserError:
        stream.abort("the newcomer lacks something")  # its paths are its own
        raise
    speed = await _measure(stream)
    await send_json(stream, REQUEST, Ready())
    return Admission(requirements, speed, await receive_json(stream, BUNDLE, _LONGEST_BUNDLE_BYTES))


async def _measure(stream: Stream) -> LinkSpeed:
    """Measure the link both ways, for some seconds."""
    trip = statistics.median([await _timed(stream, 0, 0) for _ in range(_TRIPS)])
    rates = []
    for up in (False, True):
        size, seconds, rate = _FIRST_PROBE_BYTES, 0.0, 0.0
        while seconds < _LONG_ENOUGH_SECONDS and size <= MOST_PROBE_BYTES:
            limit = _FIRST_PROBE_SECONDS if not rate else SECONDS
            async with within(limit, _STALLED):
                seconds = max(1e-6, await _timed(stream, size * up, size * (not up)) - trip)
            rate, size = size / seconds, 4 * size
        rates.append(rate)
    return LinkSpeed(min(rates), trip / 2)


async def _timed(stream: Stream, up: int, down: int) -> float:
    """Return the seconds to send and to get so many bytes."""
    started = time.perf_counter()
    await send_json(stream, REQUEST, Probe(up, down))
    await send_bytes(stream, up)
    await stream.skip(down + 1)
    return time.perf_counter() - started
