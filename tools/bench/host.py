"""Core seconds of the host in a round, for 10^9 weights of a rank: combining, coding, mean, outer step.

    python -m tools.bench host [--weights 16000000]

Replicas are threads, and copy messages in memory. For each group size and payload, the fastest of the repeats by
torch (in a process without a C compiler) and in C (`outer/host_kernels.c`), and a copy of an fp32 vector. Compare
on an idle machine, or within one run. docs/gpu.md has these figures.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from megatron_noloco.outer import OuterOptimizer, TorchWeights
from megatron_noloco.outer.vectors import HOST, buffer
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import PAPER, NolocoSettings
from tests.kit.loopback import loopback_world
from tools.bench.laps import Laps


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=int, default=16_000_000)
    parser.add_argument("--repeats", type=int, default=3)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    copy = memcpy_seconds(options)
    found: dict[str, Any] = {"core seconds, memcpy": round(copy, 2)}
    with ProcessPoolExecutor(1, get_context("spawn"), leave_to_torch) as without_compiler:
        for members in (2, 4):
            for payload in ("fp32", "int8", "int4", "int3"):
                by_torch = without_compiler.submit(seconds, options, members, payload).result()
                in_c = seconds(options, members, payload)
                found[f"core seconds, {payload}, groups of {members}"] = {
                    "torch": round(by_torch, 2),
                    "C": round(in_c, 2),
                    "torch over C": round(by_torch / in_c, 2),
                    "C over memcpy": round(in_c / copy, 1),
                }
    return found


def leave_to_torch() -> None:
    """Let this process find no C compiler."""
    os.environ["CC"] = "false"


def memcpy_seconds(options: argparse.Namespace) -> float:
    """Return the core seconds of a copy of 10^9 weights."""
    torch.set_num_threads(1)
    source, target = (buffer(options.weights, HOST).zero_() for _ in range(2))
    laps = Laps(options.repeats)
    for _ in laps:
        with laps.lap("copy"):
            target.copy_(source)
    return min(laps.cpu["copy"]) / options.weights * 1e9


def seconds(options: argparse.Namespace, members: int, payload: str) -> float:
    """Return the core seconds of a rank for 10^9 weights."""
    torch.set_num_threads(1)
    method: dict[str, Any] = {**PAPER, "local_steps": 1, "payload": payload, "group_size": members}
    settings = NolocoSettings(**method)
    start = torch.randn(options.weights)
    outers = [
        OuterOptimizer(
            TorchWeights([start + 0.01 * torch.randn(options.weights)]),
            transport,
            Place(transport.rank, members),
            settings,
        )
        for transport in loopback_world(members)
    ]
    laps = Laps(options.repeats)
    with ThreadPoolExecutor(members) as threads:
        for index in laps:
            with laps.lap("round"):
                list(threads.map(lambda outer, index=index: outer.run_round(index), outers))
    return min(laps.cpu["round"]) / members / options.weights * 1e9
