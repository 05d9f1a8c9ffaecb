"""Core seconds of the host in a round, for 10^9 weights of a rank: combining, coding, mean, outer step.

    python -m tools.bench host [--weights 16000000]

Replicas are threads of one core, and copy messages in memory. For each group size and payload, the
fastest of the repeats. docs/gpu.md has these figures.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron_noloco.outer import OuterOptimizer, TorchWeights
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
    return {
        f"core seconds, {payload}, groups of {members}": round(seconds(options, members, payload), 2)
        for members in (2, 4)
        for payload in ("fp32", "int8", "int4", "int3")
    }


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
