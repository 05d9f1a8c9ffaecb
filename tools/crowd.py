"""Idle replicas of a federation, by their number: processor, memory, and how soon all know of a change.

    python -m tools.crowd --replicas 32 64
    python -m tools.crowd --replicas 256 --processes 16

The replicas are connected by HTTPS over the loopback interface, a few in each process. Prints one JSON object for
each number: the seconds until all know all; the share of a core and the bytes of memory of each replica; the
seconds until all know that a replica has joined, has left, and that the replicas of a process were killed. The
seconds are those of machines of their own only where all replicas together need less than the cores of this one.
"""

import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.members import Members
from tools.federated import open_replica
from tools.options import command_line
from tools.processes import free_ports

_SEEDS = 3  # replicas whose addresses all know
_SETTLE_SECONDS, _IDLE_SECONDS = 15.0, 20.0
_LOOK_SECONDS = 0.1


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", required=True)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Keys.make(key := Path(folder) / "key")
        for replicas in options.replicas:
            print(json.dumps(measure(key, replicas, min(options.processes, replicas))), flush=True)


def measure(key: Path, replicas: int, processes: int) -> dict[str, Any]:
    """Return the figures of so many replicas."""
    seeds = [f"127.0.0.1:{port}" for port in free_ports(_SEEDS)]
    crowd = [_Process(key, seeds) for _ in range(processes)]
    slots = [range(part, replicas, processes) for part in range(processes)]
    try:
        _all(crowd, [("open", ())] * processes)  # Python has started
        first, last, everybody = crowd[0], crowd[-1], set(range(replicas))
        found: dict[str, Any] = {"replicas": replicas, "processes": processes}
        found["seconds_to_know_all"] = _until_known(
            crowd, everybody, lambda: _all(crowd, [("open", part) for part in slots])
        )
        time.sleep(_SETTLE_SECONDS)
        shares, sizes = zip(*_all(crowd, [("idle",)] * processes), strict=True)
        found["share_of_a_core"] = round(sum(shares) / replicas, 5)
        found["bytes"] = sum(sizes) // replicas
        joined = {*everybody, replicas}
        found["seconds_to_join"] = _until_known(crowd, joined, lambda: first.ask("open", [replicas]))
        found["seconds_to_leave"] = _until_known(crowd, everybody, lambda: first.ask("close", replicas))
        if processes > 1:
            found["seconds_after_kill"] = _until_known(crowd[:-1], everybody.difference(slots[-1]), last.kill)
        return found
    finally:
        for process in crowd:
            process.kill()


class _Process:
    """A process with some of the replicas."""

    def __init__(self, key: Path, seeds: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, key, seeds), daemon=True)
        self._process.start()

    def ask(self, what: str, *arguments: Any) -> Any:
        self.pipe.send((what, *arguments))
        return self.pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _all(crowd: list[_Process], requests: list[tuple[Any, ...]]) -> list[Any]:
    """Ask all processes at once; return their answers."""
    for process, request in zip(crowd, requests, strict=True):
        process.pipe.send(request)
    return [process.pipe.recv() for process in crowd]


def _until_known(crowd: list[_Process], slots: set[int], change: Any) -> float:
    """Make a change; return the seconds until all see exactly these replicas."""
    started = time.monotonic()
    change()
    return round(max(_all(crowd, [("wait", slots)] * len(crowd))) - started, 1)


def _serve(pipe: Connection, key: Path, seeds: list[str]) -> None:
    """Do what the tool asks for, in a process with some of the replicas."""
    keys, before = Keys.read(key), psutil.Process().memory_info().rss
    members: dict[int, Members] = {}
    while True:
        what, *arguments = pipe.recv()
        match what:
            case "open":
                _open(members, arguments[0], seeds, keys)
                pipe.send(None)
            case "close":
                members.pop(arguments[0]).close()
                pipe.send(None)
            case "wait":
                while any(
                    {one.slot for one in each.mesh.members()} != arguments[0] for each in members.values()
                ):
                    time.sleep(_LOOK_SECONDS)
                pipe.send(time.monotonic())
            case "idle":
                gc.collect()
                started, busy = time.monotonic(), time.process_time()
                time.sleep(_IDLE_SECONDS)
                share = (time.process_time() - busy) / (time.monotonic() - started)
                pipe.send((share, psutil.Process().memory_info().rss - before))


def _open(members: dict[int, Members], slots: Iterable[int], seeds: list[str], keys: Keys) -> None:
    for slot in slots:
        listen = seeds[slot] if slot < len(seeds) else "127.0.0.1:0"
        members[slot] = open_replica(slot, listen, seeds if slot else [], keys)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
