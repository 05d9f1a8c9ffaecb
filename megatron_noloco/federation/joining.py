"""The side of a machine that joins with an invitation; see `invitation`."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

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
from megatron_noloco.federation.ticket import Ticket
from megatron_noloco.files import outside

_FIRST_PROBE_BYTES, _FIRST_PROBE_SECONDS = 2**18, 60.0
_STALLED = f"small messages pass, and larger ones come too slowly or not at all: {IS_IT_THE_MTU}"
_LONG_ENOUGH_SECONDS = 1.0  # to measure a rate
_TRIPS = 5
_LONGEST_BUNDLE_BYTES = 2**27


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
