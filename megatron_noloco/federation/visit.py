"""Requests of commands that are no member: statuses, pieces that are offered to all, the speed of the link."""

import http.client
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from megatron_noloco.errors import UserError
from megatron_noloco.federation.keys import ANY_MEMBER, VISITOR, Identity, host_name
from megatron_noloco.federation.mesh import (
    MOST_PIECE_BYTES,
    PATIENCE_SECONDS,
    GoneError,
    Member,
    RefusedError,
    StalledError,
    Status,
)
from megatron_noloco.federation.statuses import SignedStatus, Statuses, addresses_in, object_in, split_address
from megatron_noloco.files import outside

Value = TypeVar("Value")
MEMBER = "Noloco-Member"  # header with the name of the asking member
MOST_PROBE_BYTES = 2**25
_FIRST_PROBE_BYTES = 2**18
_LONG_ENOUGH_SECONDS = 1.0  # to measure a rate
_TRIPS = 5
_MOST_STATUSES_BYTES = 2**27
_POLL_SECONDS = 10.0  # for a piece that is not offered yet


class LinkSpeed(NamedTuple):
    """The measured link to a job: bytes per second of the slower way, and seconds one way."""

    rate: float
    latency: float


class _Connection(http.client.HTTPConnection):
    """A connection to a job.

    Attributes:
        has_connected: whether its host has accepted a connection.
    """

    def __init__(self, address: str, identity: Identity | None, name: str, headers: dict[str, str]) -> None:
        host, port = split_address(address)
        super().__init__(host, port, timeout=PATIENCE_SECONDS)
        self._identity, self._name, self._headers = identity, name, headers
        self.has_connected = False

    def connect(self) -> None:
        super().connect()
        self.has_connected = True
        if self._identity is not None:
            self.sock = self._identity.client.wrap_socket(self.sock, server_hostname=self._name)

    def ask(self, method: str, path: str, most: int, body: bytes | None = None) -> tuple[int, bytes]:
        """Return status and content of an answer. Raises OSError and HTTPException."""
        self.request(method, path, body, self._headers)
        answer = self.getresponse()
        content = answer.read(most + 1)
        if len(content) > most:
            raise http.client.HTTPException("the answer is too long")
        return answer.status, content


class Visit:
    """Asks the jobs of a run. All methods block.

    Args:
        identity: of a visitor, or of the slot of a member file; None: nothing is encrypted.
        addresses: HOST:PORT of jobs; the first that answers is asked.

    Attributes:
        present: the members that are there, as the job sees that `statuses` has asked.
    """

    def __init__(self, identity: Identity | None, run: int, addresses: Sequence[str]) -> None:
        self._identity, self._run, self._addresses = identity, run, addresses
        self._me = Member(VISITOR if identity is None else identity.slot, time.time_ns())
        self._statuses = Statuses(run, self._me, identity)
        self.present = set[Member]()

    def statuses(self) -> dict[Member, Status]:
        """Return the last status of each member that a job knows. Raises UserError where no job answers."""
        text = self._first(lambda connection: self._get(connection, "status?once", _MOST_STATUSES_BYTES))
        self.present = set()
        for line in text.splitlines():
            with suppress(ValueError, TypeError):
                content = object_in(line)
                if "member" in content:
                    signed = SignedStatus.parse(content)
                    self.present = self.present or {signed.member}  # the first is the job's own
                    self._statuses.take(signed)
                if isinstance(seen := content.get("seen"), dict):
                    self.present |= set(map(Member.parse, seen))
        return {signed.member: signed.status for signed in self._statuses.newest.values()}

    def piece(self, giver: Member, name: str) -> bytes:
        """Return a piece that a member offers to all; waits for it. Raises LostError and UserError."""
        path = f"{giver}/{self._me}/{quote(name)}"
        addresses = addresses_in(self.statuses().get(giver, {}))
        if not addresses:
            raise GoneError("is not there, or cannot be dialled")
        until = time.monotonic() + _POLL_SECONDS
        status, content = 204, b""
        while status == 204 and time.monotonic() < until:
            status, content = self._first(
                lambda connection: connection.ask("GET", self._path(path), MOST_PIECE_BYTES),
                addresses,
                host_name(giver.slot),
            )
        if status == 200:
            return content
        if status == 204:
            raise StalledError("sends nothing")
        raise RefusedError(outside(content.decode(errors="replace")))

    def measure(self) -> LinkSpeed:
        """Measure the link both ways, for some seconds. Raises UserError where no job answers."""
        return self._first(self._measured)

    def _measured(self, connection: _Connection) -> LinkSpeed:
        self._timed(connection, 0, False)  # opens the connection
        trip = statistics.median(self._timed(connection, 0, False) for _ in range(_TRIPS))
        rates = []
        for is_up in (False, True):
            size, seconds, rate = _FIRST_PROBE_BYTES, 0.0, 0.0
            while seconds < _LONG_ENOUGH_SECONDS and size <= MOST_PROBE_BYTES:
                seconds = max(1e-6, self._timed(connection, size, is_up) - trip)
                rate, size = size / seconds, 4 * size
            rates.append(rate)
        return LinkSpeed(min(rates), trip / 2)

    def _timed(self, connection: _Connection, size: int, is_up: bool) -> float:
        """Return the seconds to send or to get so many bytes."""
        body = os.urandom(size) if is_up else None
        started = time.perf_counter()
        if is_up:
            connection.ask("PUT", self._path("probe"), 0, body)
        else:
            self._get(connection, f"probe?bytes={size}", size)
        return time.perf_counter() - started

    def _get(self, connection: _Connection, path: str, most: int) -> bytes:
        status, content = connection.ask("GET", self._path(path), most)
        if status == 409:
            raise _OtherRunError
        if status != 200:
            raise http.client.HTTPException(f"status {status}")
        return content

    def _path(self, path: str) -> str:
        return f"/run/{self._run:016x}/{path}"

    def _first(
        self,
        ask: Callable[[_Connection], Value],
        addresses: Sequence[str] = (),
        name: str = ANY_MEMBER,
    ) -> Value:
        """Return the answer of the first job that gives an answer."""
        reasons = []
        for address in addresses or self._addresses:
            connection = _Connection(address, self._identity, name, {MEMBER: str(self._me)})
            try:
                return ask(connection)
            except _OtherRunError:
                reasons.append(f"the job at {address} is of another run")
            except (OSError, http.client.HTTPException) as error:
                reasons.append(why_not(address, error, connection.has_connected, self._identity is not None))
            finally:
                connection.close()
        raise UserError("; ".join(reasons) or "there is no address of a job to ask")


class _OtherRunError(ConnectionError):
    pass


def why_not(address: str, error: Exception, has_connected: bool, is_encrypted: bool) -> str:
    """Return why no job of this federation answers at an address."""
    nobody = f"nobody answers at {address}"
    if isinstance(error, TimeoutError):
        if has_connected:
            return f"{address} answers, and goes silent: is the MTU of the route smaller than that of either host?"
        return f"{nobody}: no answer, nor a refusal: its host is off, or a firewall drops what is sent there"
    if isinstance(error, socket.gaierror):
        return f"{nobody}: its name is unknown ({error.strerror})"
    if isinstance(error, OSError) and error.errno and not has_connected:
        return f"{nobody}: {os.strerror(error.errno)}"
    what = "has another key" if is_encrypted else "expects encryption"
    return f"the process at {address} {what}, or is of megatron_noloco 0.4 or earlier"
