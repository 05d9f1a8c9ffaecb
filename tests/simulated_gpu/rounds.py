"""Rounds of replicas whose weights lie on simulated GPUs, or on CPUs: for the tests, and for the mutants."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_noloco.outer import Channel, Exchange, ExchangeReport, OuterOptimizer, TorchWeights, mean_model
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import PAPER, NolocoSettings
from megatron_noloco.transport.interface import Transport
from tests.kit.loopback import loopback_world
from tests.simulated_gpu import Gpu, Order, Wait

REPLICAS, LENGTH, ROUNDS, LOCAL_STEPS = 4, 2_501, 2, 3
AT_ONCE = 700  # elements that are formed at a time: a vector has several pieces, some of two tensors
BUCKET, WINDOW = 1024, 2  # so the memory of messages is used again in a round

Method = Mapping[str, Any]
Found = dict[str, Tensor]


def after_rounds(order: Order | None, method: Method, waits: Counter[Wait] | None = None) -> list[Found]:
    """Return what each replica has in the end.

    Args:
        order: of the streams of its GPU; None: on a CPU.
        method: differences to the settings of the paper.
        waits: to it those of replica 0 are added.
    """
    settings = NolocoSettings(**{**PAPER, "local_steps": LOCAL_STEPS, "deadline_seconds": 60.0, **method})

    def replica(transport: Transport) -> Found:
        with nullcontext() if order is None else Gpu(order) as gpu:
            found = _trained(transport, settings, "cpu" if order is None else "cuda")
        if gpu is not None and waits is not None and transport.rank == 0:
            waits.update(gpu.waits)
        return found

    with ThreadPoolExecutor(REPLICAS) as threads:
        return list(threads.map(replica, loopback_world(REPLICAS)))


class Cost(NamedTuple):
    """Says what a round costs one replica: waits of the host, and bytes over the bus, by the side to which."""

    waits: Counter[Wait]
    crossed: Counter[str]
    report: ExchangeReport


def cost_of_a_round(method: Method, length: int, members: int = 2) -> Cost:
    """Return the cost of the second round of replicas of so many weights, in a single group."""
    settings = NolocoSettings(**{**PAPER, "local_steps": 1, "group_size": members, **method})

    def replica(transport: Transport) -> Cost:
        draw = torch.Generator().manual_seed(transport.rank)
        with Gpu() as gpu:
            own = torch.randn(length, generator=draw).to("cuda")
            outer = OuterOptimizer(TorchWeights([own]), transport, Place(transport.rank, members), settings)
            for done in range(1, 3 + outer.overlap_steps):
                gpu.waits.clear()
                gpu.crossed.clear()
                reports = outer.after_local_step(done)
        return Cost(gpu.waits, gpu.crossed, reports[0].exchange)

    with ThreadPoolExecutor(members) as threads:
        return next(iter(threads.map(replica, loopback_world(members))))


def _trained(transport: Transport, settings: NolocoSettings, device: str) -> Found:
    """Train, save, finish, evaluate the mean model, average all, and restore."""
    start = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0)).tensor_split([1000, 1300])
    own = [part.clone().to(device) for part in start]
    place = Place(transport.rank, REPLICAS)
    outer = OuterOptimizer(TorchWeights(own), transport, place, settings)
    draw = torch.Generator().manual_seed(transport.rank + 1)
    found = {}

    def note(name: str) -> None:
        found[name] = torch.cat([part.cpu() for part in own])

    steps = ROUNDS * LOCAL_STEPS + 1
    for step in range(steps):
        for part in own:
            # From pinned memory, as batches are: the copy does not wait for the local steps queued before.
            noise = torch.randn(len(part), generator=draw)
            part.add_(noise if device == "cpu" else noise.to(device, non_blocking=True), alpha=0.01)
        outer.after_local_step(step + 1)
        outer.progress()
    saved = {name: tensor.cpu().clone() for name, tensor in outer.state().items()}
    outer.finish()
    note("trained")
    with mean_model(outer, Exchange(transport, place, Channel.MEAN_MODEL), 7):
        note("mean model")
    outer.average_all(steps)
    note("averaged")
    outer.restore(saved)
    outer.finish()
    note("restored")
    outer.restore(saved)
    outer.finish()
    outer.restore(
        {name: torch.zeros_like(one) if name == "correction" else one for name, one in saved.items()}
    )
    note("restored while weights are merged")
    outer.finish()
    outer.run_round(ROUNDS)
    outer.restore(saved)
    note("restored while weights are written")
    outer.finish()
    return found | saved | {name: tensor.cpu().clone() for name, tensor in outer.state().items()}


def differences(expected: list[Found], found: list[Found]) -> list[str]:
    """Return the names of what is not equal bit for bit, with the rank: here each replica is one.

    The numbers of reports, of rounds under way, are equal to rounding: their sums have another order.
    """
    return [
        f"{name} of rank {rank}"
        for rank, (one, other) in enumerate(zip(expected, found, strict=True))
        for name in one.keys() | other.keys()
        if not (name in one and name in other and _equal(name, one[name], other[name]))
    ]


def _equal(name: str, one: Tensor, other: Tensor) -> bool:
    if name == "delayed_rounds":
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-6, atol=0)
    return torch.equal(one, other)
