"""Requests of commands that are no member: statuses, pieces that are offered to all, the speed of the link."""

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from megatron_noloco.errors import UserError
from megatron_noloco.federation.https_answers import MOST_PROBE_BYTES
from megatron_noloco.federation.https_client import CONNECTION_ERRORS, Client, OtherRunError, why_not
from megatron_noloco.federation.https_server import PieceBody
from megatron_noloco.federation.keys import VISITOR, Identity
from megatron_noloco.federation.mesh import Member, Piece, RefusedError, StalledError, Status
from megatron_noloco.federation.statuses import SignedStatus, Statuses, addresses_in
from megatron_noloco.files import outside

Value = TypeVar("Value")
_FIRST_PROBE_BYTES = 2**18
_LONG_ENOUGH_SECONDS = 1.0  # to measure a rate
_TRIPS = 5
_POLL_SECONDS = 10.0  # for a piece that is not offered yet


class LinkSpeed(NamedTuple):
    """The measured link to a job: bytes per second of the slower way, and seconds one way."""

    rate: float
    latency: float


class Visit:
    """Asks the jobs of a run. All methods block.

    Args:
        identity: of a visitor, or of the slot of a member file; None: nothing is encrypted.
        addresses: HOST:PORT of jobs; the first that answers is asked.

    Attributes:
        present: the members that are there, as the job sees that `statuses` has asked.
    """

    def __init__(self, identity: Identity | None, run: int, addresses: Sequence[str]) -> None:
        slot = VISITOR if identity is None else identity.slot
        self._statuses, self._addresses = Statuses(run, Member(slot, time.time_ns()), identity), addresses
        self.present = set[Member]()

    def statuses(self) -> dict[Member, Status]:
        """Return the last status of each member that a job knows. Raises UserError where no job answers."""
        self.present = self._first(self._take_statuses, self._addresses)
        return {signed.member: signed.status for signed in self._statuses.newest()}

    async def _take_statuses(self, client: Client, address: str) -> set[Member]:
        """Take all statuses; return who is there."""
        present = set[Member]()
        async with aclosing(client.statuses(address)) as lines:
            async for line in lines:
                with suppress(ValueError, TypeError):
                    if isinstance(names := line.get("present"), list):
                        present |= set(map(Member.parse, names))
                    else:
                        self._statuses.take(SignedStatus.parse(line))
        return present

    def piece(self, giver: Member, name: str) -> bytes:
        """Return a piece that a member offers to all; waits for it. Raises LostError and UserError."""
        path = f"{giver}/{self._statuses.me}/{quote(name)}"
        addresses = addresses_in(self.statuses().get(giver, {}))
        if not addresses:
            raise StalledError("is not there, or cannot be dialled")

        async def ask(client: Client, address: str) -> memoryview | str | None:
            until, found = time.monotonic() + _POLL_SECONDS, None
            while found is None and time.monotonic() < until:
                found = await client.piece(address, giver.slot, path)
            return found

        found = self._first(ask, addresses)
        if found is None:
            raise StalledError("sends nothing")
        if isinstance(found, str):
            raise RefusedError(outside(found))
        return bytes(found)

    def measure(self) -> LinkSpeed:
        """Measure the link both ways, for some seconds. Raises UserError where no job answers."""
        return self._first(self._measured, self._addresses)

    async def _measured(self, client: Client, address: str) -> LinkSpeed:
        await _timed(client, address, 0, False)  # opens the connection
        trip = statistics.median([await _timed(client, address, 0, False) for _ in range(_TRIPS)])
        rates = []
        for is_up in (False, True):
            size, seconds, rate = _FIRST_PROBE_BYTES, 0.0, 0.0
            while seconds < _LONG_ENOUGH_SECONDS and size <= MOST_PROBE_BYTES:
                seconds = max(1e-6, await _timed(client, address, size, is_up) - trip)
                rate, size = size / seconds, 4 * size
            rates.append(rate)
        return LinkSpeed(min(rates), trip / 2)

    def _first(self, ask: Callable[[Client, str], Awaitable[Value]], addresses: Sequence[str]) -> Value:
        """Return the answer of the first job that gives an answer."""

        async def first() -> Value:
            client, reasons = Client(self._statuses, None), list[str]()
            try:
                for address in addresses:
                    try:
                        return await ask(client, address)
                    except OtherRunError:
                        reasons.append(f"the job at {address} is of another run")
                    except CONNECTION_ERRORS as error:
                        is_encrypted = self._statuses.identity is not None
                        reasons.append(await why_not(address, error, is_encrypted))
            finally:
                await client.close()
            raise UserError("; ".join(reasons) or "there is no address of a job to ask")

        return asyncio.run(first())


async def _timed(client: Client, address: str, size: int, is_up: bool) -> float:
    """Return the seconds to send or to get so many random bytes."""
    body = PieceBody(Piece(os.urandom(size), None)) if is_up else None
    method, path = ("PUT", "probe") if is_up else ("GET", f"probe?bytes={size}")
    started = time.perf_counter()
    async with client.request(method, address, None, path, data=body) as answer:
        await client.check(answer)
        async for _ in answer.content.iter_any():
            pass
    return time.perf_counter() - started
