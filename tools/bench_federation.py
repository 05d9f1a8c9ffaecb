"""The speed at which two jobs swap a vector: over a stream of the federation with and without keys, over a socket.

    python -m tools.bench_federation --megabytes 64
    python -m tools.bench_federation --links          # also over slow and long links, which are emulated

Starts a second process on this machine; both swap 64 MB each way on the loopback interface. Each repeat runs all
variants in turn, so that noise of the machine affects them alike; it hardly changes processor seconds. Over an
emulated link (`tools.netlab`), rank 0 sends to rank 1, and meanwhile a row of metrics goes to and fro: the delay
is that of the slowest way there and back. Prints one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.links import Link as Replica
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.federation.streams import Stream
from tools.federated import DEADLINE_SECONDS, open_replica, wait_for_all
from tools.netlab.lab import lab
from tools.netlab.network import Link
from tools.netlab.relay import address_of
from tools.options import command_line

_LINKS = ((Link(rate=1e7, delay=0.025), 64), (Link(rate=2e8, delay=0.05), 256))  # with megabytes
_KIND = "bench"  # of a conversation


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--megabytes", type=float, default=64.0, help="bytes of the fp32 vector / 1e6")
    parser.add_argument("--links", action="store_true", help="also over emulated links; needs root")
    parser.add_argument("--on-host", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=11, help="timed repeats, after two to warm up")
    options = parser.parse_args()
    if options.on_host is not None:
        return _on_host(*options.on_host)
    elements = int(options.megabytes * 1e6) // 4
    arguments = (elements, options.repeats)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        keys = Path(folder) / "key"
        Keys.make(keys)
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=_other, args=(Path(folder), server.getsockname()[1], *arguments))
        other.start()
        accepted, _ = server.accept()
        times = run(0, Path(folder), accepted, *arguments)
        other.join()
    length = elements * 4
    report = {
        "bytes": length,
        "repeats": options.repeats,
        "ways": {way: _figures(length, taken) for way, taken in times.items()},
        "speed over that of a plain socket": {
            way: round(
                statistics.median(p.seconds / one.seconds for p, one in zip(plain, taken, strict=True)), 2
            )
            for plain in [times["plain socket"]]
            for way, taken in times.items()
        },
    }
    if options.links:
        report["links"] = [_over(*case) for case in _LINKS]
    print(json.dumps(report), flush=True)


class Taken(NamedTuple):
    """The costs of one swap on this rank."""

    seconds: float
    processor_seconds: float
    of_threads: Counter[int]  # of those that live on


def _figures(length: int, taken: list[Taken]) -> dict[str, float]:
    """Return the figures of one variant. The seconds of threads are means: they are counted in hundredths."""
    seconds = statistics.median(one.seconds for one in taken)
    busy = Counter[int]()
    for one in taken:
        busy.update(one.of_threads)
    return {
        "seconds": round(seconds, 4),
        "least_seconds": round(min(one.seconds for one in taken), 4),
        "gb_per_second_each_way": round(length / seconds / 1e9, 3),
        "processor_seconds": round(statistics.median(one.processor_seconds for one in taken), 4),
        "processor_seconds_of_busiest_thread": round(max(busy.values(), default=0) / len(taken), 4),
    }


def _other(folder: Path, port: int, *arguments: int) -> None:
    run(1, folder, socket.create_connection(("127.0.0.1", port)), *arguments)


def run(rank: int, folder: Path, plain: socket.socket, elements: int, repeats: int) -> dict[str, list[Taken]]:
    """Swap in each variant; returns the costs of each repeat by variant."""
    torch.set_num_threads(1)
    outgoing, incoming = torch.full((elements,), float(rank)), torch.zeros(elements)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threads = []
    ways: dict[str, Callable[[], None]] = {"plain socket": lambda: _swap_plainly(plain, outgoing, incoming)}
    for way, keys in (("federation", None), ("federation, TLS", Keys.read(folder / "key"))):
        thread = open_replica(rank, folder / way, keys=keys)
        threads.append(thread)
        ways[way] = _swap_over(thread, outgoing, incoming)
    taken: dict[str, list[Taken]] = {way: [] for way in ways}
    for repeat in range(-2, repeats):
        for way, swap in ways.items():
            _wait_for_other(plain)
            before = time.perf_counter(), time.process_time(), _of_threads()
            swap()
            after = time.perf_counter(), time.process_time(), _of_threads()
            if repeat >= 0:
                taken[way].append(Taken(after[0] - before[0], after[1] - before[1], after[2] - before[2]))
            assert incoming[0] == incoming[-1] == 1 - rank
            incoming.zero_()
    _wait_for_other(plain)
    for thread in threads:
        thread.close()
    return taken


def _over(link: Link, megabytes: int) -> dict[str, float]:
    """Return the figures of a link."""
    with lab([link] * 2) as there, tempfile.TemporaryDirectory() as folder:
        Keys.make(Path(folder) / "key")

        def command(rank: int) -> list[str]:
            module = [sys.executable, "-m", "tools.bench_federation", "--on-host"]
            return there.on(there.names[rank], *module, str(rank), folder, str(megabytes))

        with subprocess.Popen(command(1), stdout=subprocess.DEVNULL):
            told = json.loads(subprocess.check_output(command(0), timeout=DEADLINE_SECONDS))
    share = 8e6 * megabytes / told["seconds"] / link.rate
    fields = {"megabit_per_second": link.rate / 1e6, "round_trip_seconds": 2 * link.delay}
    return fields | {"share_of_link": round(share, 3), "delay_seconds": round(told["delay"], 3)}


def _on_host(rank: str, folder: str, megabytes: str) -> None:
    """Send the vector twice to rank 1, and print what the second time took on rank 0."""
    own, vector = int(rank), torch.zeros(int(megabytes) * 250_000)
    none, keys = torch.zeros(0), Keys.read(Path(folder) / "key")
    with closing(open_replica(own, Path(folder), f"tcp://{address_of(own)}:0", keys)) as thread:
        swap = _swap_over(thread, *((vector, none) if own == 0 else (none, vector)))
        seconds, delay = 0.0, 0.0
        for number in (1, 2):
            started = asked = time.monotonic()
            delay, swapping = 0.0, threading.Thread(target=swap)
            swapping.start()
            if own == 0:
                thread.tell_row(json.dumps({"number": number}))
            while swapping.is_alive():
                for row in (json.loads(text) for _, text in thread.rows()):
                    if own == 1 or row["number"] == number:
                        delay, asked = max(delay, time.monotonic() - asked), time.monotonic()
                        thread.tell_row(json.dumps(row))
                swapping.join(0.01)
            seconds = time.monotonic() - started
            delay = max(delay, time.monotonic() - asked)
    if own == 0:
        print(json.dumps({"seconds": seconds, "delay": delay}), flush=True)


def _of_threads() -> Counter[int]:
    """Return the processor seconds of this process since its start, by thread."""
    return Counter({one.id: one.user_time + one.system_time for one in psutil.Process().threads()})


def _swap_over(thread: NodeThread, outgoing: torch.Tensor, incoming: torch.Tensor) -> Callable[[], None]:
    """Return what swaps in a conversation that rank 0 opens. Both ranks say so when all has come."""
    node, served = thread.node, threading.Semaphore(0)

    async def swap(stream: Stream) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(stream.send(_bytes_of(outgoing)))
            group.create_task(stream.fill(_bytes_of(incoming)))
        await stream.send(b"x")
        await stream.receive(1)

    async def open_and_swap() -> None:
        async with node.links[1].open(_KIND) as stream:
            await swap(stream)

    async def serve(replica: Replica, stream: Stream) -> None:
        await swap(stream)
        served.release()

    node.serves[_KIND] = serve
    wait_for_all(thread, replicas=2)
    return (lambda: thread.call(open_and_swap()).result()) if node.slot == 0 else (lambda: _acquire(served))


def _acquire(semaphore: threading.Semaphore) -> None:
    if not semaphore.acquire(timeout=DEADLINE_SECONDS):
        raise SystemExit("the other process has gone")


def _swap_plainly(plain: socket.socket, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    sender = threading.Thread(target=plain.sendall, args=(_bytes_of(outgoing),))
    sender.start()
    _receive(plain, _bytes_of(incoming))
    sender.join()


def _bytes_of(vector: torch.Tensor) -> memoryview:
    return vector.view(torch.uint8).numpy().data


def _receive(plain: socket.socket, place: memoryview) -> None:
    while place:
        received = plain.recv_into(place)
        if not received:
            raise SystemExit("the other process has gone")
        place = place[received:]


def _wait_for_other(plain: socket.socket) -> None:
    plain.sendall(b"x")
    _receive(plain, memoryview(bytearray(1)))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
