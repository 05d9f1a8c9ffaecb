"""Rounds of two jobs of a federation, with keys: seconds, and the share of a link.

    python -m tools.bench federation --megabytes 64
    python -m tools.bench federation --rate 200Mbit --delay 50ms     # over an emulated link; needs root
    python -m tools.bench federation --rendezvous s3://bucket/run    # without ports; also file:///FOLDER

Each job is a process. They exchange vectors of so many bytes in fp32 as a run does, and vectors of 1,000 weights
in turn, after two of each that do not count. Reports for each payload the medians of the seconds, and the bytes
that a replica sent in a round. Over a link that `tests.netlab` emulates also the share of its rate; through a
folder or a bucket also the medians of the requests of one job in a round, and the requests in a second without.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.members import Members
from megatron_noloco.outer import OuterOptimizer, TorchWeights
from megatron_noloco.settings import NolocoSettings
from tests.netlab.__main__ import quantity
from tests.netlab.lab import lab
from tests.netlab.network import Link
from tests.netlab.relay import address_of
from tools.federated import DEADLINE_SECONDS, open_in_store, open_replica, outer_of, wait_for_all
from tools.processes import free_ports

_SMALL = 1000  # weights
_FIRST = 2  # rounds of each kind that do not count
_PORT = 29500  # on each host of the lab


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, default=64.0, help="bytes of the fp32 vector / 1e6")
    payloads = ("fp32", "int8", "int4", "int3")
    parser.add_argument("--payloads", nargs="+", choices=payloads, default=payloads[:2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before each round")
    parser.add_argument(
        "--rendezvous", metavar="URL", help="a folder or a bucket, which is all that they share"
    )
    parser.add_argument("--rate", help="of the emulated link in both directions, such as 200Mbit")
    parser.add_argument("--delay", default="0ms", help="each way")
    parser.add_argument(
        "--replica", nargs=4, metavar=("SLOT", "LISTEN", "SEED", "FOLDER"), help="(of the tool itself)"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run two jobs for each payload; as one of them, run its rounds."""
    if options.replica:
        slot, listen, seed, folder = options.replica
        return _rounds(int(slot), listen, seed, Path(folder), options)
    report = {}
    for payload in options.payloads:
        rate = options.rate and quantity("rate", options.rate)
        numbers = ("megabytes", "repeats", "pause")
        arguments = [f"--{name}={getattr(options, name)}" for name in numbers]
        arguments += [f"--rendezvous={options.rendezvous}/{payload}"] * (options.rendezvous is not None)
        with _hosts(rate, quantity("delay", options.delay)) as on, tempfile.TemporaryDirectory() as folder:
            Keys.make(Path(folder) / "key")
            module = [sys.executable, "-m", "tools.bench", "federation", *arguments, "--payloads", payload]
            other, first = (on(slot, [*module, "--replica", str(slot)], folder) for slot in (1, 0))
            with subprocess.Popen(other, stdout=subprocess.DEVNULL):
                found = json.loads(subprocess.check_output(first, timeout=2 * DEADLINE_SECONDS))
        if rate:
            found["share_of_link"] = round(8 * found["bytes_sent"] / found["seconds"] / rate, 3)
        report[payload] = {"rate": rate, "delay": options.delay} | found
    return report


@contextmanager
def _hosts(rate: float | None, delay: float) -> Iterator[Any]:
    """Give what returns the command of a slot: on this host, or on one of the lab."""
    if not rate:
        places = [f"127.0.0.1:{port}" for port in free_ports(2)]
        yield lambda slot, command, folder: [*command, places[slot], places[0], folder]
        return
    places = [f"{address_of(slot)}:{_PORT}" for slot in range(2)]
    with lab([Link(rate, delay)] * 2) as there:
        yield lambda slot, command, folder: there.on(
            there.names[slot], *command, places[slot], places[0], folder
        )


def _rounds(slot: int, listen: str, seed: str, folder: Path, options: Any) -> dict[str, Any]:
    """Run the rounds of a replica."""
    torch.set_num_threads(1)
    base, small = torch.randn(int(options.megabytes * 250_000)), torch.ones(_SMALL)
    if options.rendezvous:
        opened, calls = open_in_store(slot, options.rendezvous, folder / "key")
    else:
        keys, calls = Keys.read(folder / "key"), Counter()
        opened = open_replica(slot, listen, [seed] * slot, keys)
    with closing(opened) as members:
        large, tiny = (_outer(members, start, options.payloads[0]) for start in (base, small))
        wait_for_all(members, 2)
        sent, seconds = 0, {False: list[float](), True: list[float]()}
        requests, idle = {False: list[Counter[str]](), True: list[Counter[str]]()}, Counter[str]()
        for number in range(2 * (_FIRST + options.repeats)):
            is_small = bool(number % 2)
            before = calls.copy()
            time.sleep(options.pause)
            idle += calls - before
            before, started = calls.copy(), time.perf_counter()
            report = (tiny if is_small else large).run_round(number)
            seconds[is_small].append(time.perf_counter() - started)
            requests[is_small].append(calls - before)
            assert report.exchange.group == (0, 1), report.exchange.missed
            sent = max(sent, report.exchange.bytes_sent)
        time.sleep(1.0)  # the other one may still read
    return {
        "seconds": round(statistics.median(seconds[False][_FIRST:]), 3),
        "seconds_of_small_rounds": round(statistics.median(seconds[True][_FIRST:]), 3),
        "bytes_sent": sent,
    } | _requests(requests, idle, options)


def _requests(
    requests: dict[bool, list[Counter[str]]], idle: Counter[str], options: Any
) -> dict[str, dict[str, float]]:
    if not idle:
        return {}
    pauses = 2 * (_FIRST + options.repeats) * options.pause
    medians = {
        is_small: {kind: statistics.median(one[kind] for one in found[_FIRST:]) for kind in idle}
        for is_small, found in requests.items()
    }
    return {
        "requests": medians[False],
        "requests_of_small_rounds": medians[True],
        "requests_in_a_second": {kind: round(number / pauses, 2) for kind, number in idle.items()},
    }


def _outer(members: Members, base: torch.Tensor, payload: Any) -> OuterOptimizer:
    draws = torch.Generator().manual_seed(members.slot)
    weights = TorchWeights([base + 1e-2 * torch.randn(len(base), generator=draws)])
    return outer_of(members, weights, NolocoSettings(payload=payload, deadline_seconds=DEADLINE_SECONDS))
