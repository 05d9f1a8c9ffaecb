"""Checks the lab itself: rate and delay of a plain TCP connection over a link."""

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.netlab.lab import Lab, lab
from tests.netlab.network import Link
from tests.netlab.relay import address_of

PORT = 5000
SECONDS = 8.0
_SETTLED_SECONDS = 2.0  # of these, until the sender has found the rate
_CONNECT_SECONDS = 30.0


def measure(hosts: Sequence[int], link: Link, congestion: str) -> Iterator[dict[str, Any]]:
    """Yield a row per number of hosts. All even hosts stream to the next one, at the same time.

    "rate_share": bits of data received a second, over the rate of the link, median and smallest of the streams;
    "round_trip_seconds": of opening a connection, median.
    """
    for number in hosts:
        with lab([link] * number, congestion) as there:
            streams = _stream(there)
        shares = [8 * stream["bytes_per_second"] / link.rate for stream in streams]
        trips = [stream["round_trip_seconds"] for stream in streams]
        yield {
            "hosts": number,
            "rate_share": {"median": round(statistics.median(shares), 3), "smallest": round(min(shares), 3)},
            "round_trip_seconds": round(statistics.median(trips), 4),
        }


def _stream(there: Lab) -> list[dict[str, float]]:
    def start(host: int, role: str, *arguments: str) -> subprocess.Popen[str]:
        command = there.on(there.names[host], sys.executable, "-m", "tests.netlab.check", role, *arguments)
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    senders = range(0, len(there.names) - 1, 2)
    receivers = [start(host + 1, "receive") for host in senders]
    sending = [start(host, "send", address_of(host + 1)) for host in senders]
    told = [
        [json.loads(process.communicate(timeout=SECONDS + 2 * _CONNECT_SECONDS)[0]) for process in processes]
        for processes in (sending, receivers)
    ]
    return [sent | received for sent, received in zip(*told, strict=True)]


def send(address: str) -> dict[str, float]:
    """Connect and send for some seconds."""
    patience = time.monotonic() + _CONNECT_SECONDS
    while True:
        started = time.monotonic()
        try:
            connection = socket.create_connection((address, PORT))
            break
        except ConnectionRefusedError:
            if started > patience:
                raise
            time.sleep(0.1)
    trip, data = time.monotonic() - started, bytes(1 << 16)
    with connection:
        while time.monotonic() < started + SECONDS:
            connection.sendall(data)
    return {"round_trip_seconds": trip}


def receive() -> dict[str, float]:
    """Receive from one connection."""
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
    settled, received, now = time.monotonic() + _SETTLED_SECONDS, 0, 0.0
    with connection:
        while data := connection.recv(1 << 20):
            now = time.monotonic()
            received += len(data) if now > settled else 0
    return {"bytes_per_second": received / max(now - settled, 1e-9)}


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    print(json.dumps(send(*arguments) if role == "send" else receive()))
