"""Core seconds of the host in a round, for 10^9 weights of a rank: combining, coding, mean, outer step.

    python -m tools.bench host [--weights 16000000]

Replicas are threads, and copy messages in memory: pin them to one core (`taskset -c 0`), where threads of one core
would slow each other. For each group size and payload, the fastest of the repeats by torch and by the compiled
kernels (`outer/kernels.py`, None without numba), and a copy of an fp32 vector. docs/gpu.md has these figures.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from megatron_noloco.outer import OuterOptimizer, TorchWeights
from megatron_noloco.outer.compiling import compiler
from megatron_noloco.outer.host_kernels import Compiled
from megatron_noloco.outer.vectors import HOST, buffer
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import PAPER, NolocoSettings
from tests.loopback import loopback_world
from tools.bench.laps import Laps


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=int, default=16_000_000)
    parser.add_argument("--repeats", type=int, default=3)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    torch.set_num_threads(1)
    compiler.start()
    has_kernels = compiler.wait()
    found: dict[str, Any] = {"core seconds, memcpy": round(memcpy_seconds(options), 2)}
    for members in (2, 4):
        for payload in ("fp32", "int8", "int4", "int3"):
            with by_torch():
                torch_seconds = round(seconds(options, members, payload), 2)
            kernel_seconds = round(seconds(options, members, payload), 2) if has_kernels else None
            found[f"core seconds, {payload}, groups of {members}"] = {
                "torch": torch_seconds,
                "kernels": kernel_seconds,
                "ratio": kernel_seconds and round(torch_seconds / kernel_seconds, 2),
            }
    return found


@contextmanager
def by_torch() -> Iterator[None]:
    """Leave all to torch inside."""
    kernels, Compiled.kernels = Compiled.kernels, None
    try:
        yield
    finally:
        Compiled.kernels = kernels


def memcpy_seconds(options: argparse.Namespace) -> float:
    """Return the core seconds of a copy of 10^9 weights."""
    source, target = (buffer(options.weights, HOST).zero_() for _ in range(2))
    laps = Laps(options.repeats)
    for _ in laps:
        with laps.lap("copy"):
            target.copy_(source)
    return min(laps.cpu["copy"]) / options.weights * 1e9


def seconds(options: argparse.Namespace, members: int, payload: str) -> float:
    """Return the core seconds of a rank for 10^9 weights."""
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
