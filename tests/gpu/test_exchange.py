"""Rounds of weights on a GPU, through pinned memory and a side stream, against the same rounds on a CPU."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_noloco.outer import OuterOptimizer, TorchWeights
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import PAPER, NolocoSettings
from tests.kit.loopback import loopback_world

pytestmark = pytest.mark.gpu

REPLICAS, LENGTH, ROUNDS, LOCAL_STEPS = 4, 3_000_001, 4, 3


@cache
def steps_of(rank: int) -> list[Tensor]:
    """Return what each local step of a rank adds, the same on any device."""
    draw = torch.Generator().manual_seed(rank + 1)
    return [torch.randn(LENGTH, generator=draw) * 0.01 for _ in range(ROUNDS * LOCAL_STEPS + 1)]


def after_rounds(device: str, **method: Any) -> list[Tensor]:
    """Return fast and slow weights and momenta of all replicas after the same local steps on any device."""
    own = {"local_steps": LOCAL_STEPS, "deadline_seconds": 60.0}
    settings = NolocoSettings(**{**PAPER, **own, **method})
    start = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0))

    def replica(transport: Any) -> list[Tensor]:
        own = start.to(device, copy=True)
        outer = OuterOptimizer(TorchWeights([own]), transport, Place(transport.rank, REPLICAS), settings)
        for step, change in enumerate(steps_of(transport.rank)):
            own.add_(change.to(device))
            if device == "cuda":  # work that a local step would have queued
                busy = torch.randn(2048, 2048, device=device)
                for _ in range(20):
                    busy = busy @ busy * 1e-3
            outer.after_local_step(step + 1)
            outer.progress()
        outer.wait()
        found = (own, outer.slow_weights, outer.momentum)
        return [tensor.cpu() for tensor in found if tensor is not None]

    with ThreadPoolExecutor(REPLICAS) as threads:
        return [tensor for found in threads.map(replica, loopback_world(REPLICAS)) for tensor in found]


METHODS = list(product((0, 2), (2, 4), ("fp32", "int8", "int4", "int3")))


class OnCpu(NamedTuple):
    """Holds a method, and what it gives on a CPU."""

    method: dict[str, Any]
    found: list[Tensor]


@pytest.fixture(scope="module", params=METHODS, ids=str)  # both tests of a method, then those of the next
def on_cpu(request: pytest.FixtureRequest) -> OnCpu:
    method = dict(zip(("overlap_steps", "group_size", "payload"), request.param, strict=True))
    return OnCpu(method, after_rounds("cpu", **method))


def test_rounds_with_slow_weights_on_host_equal_cpu_bitwise(on_cpu: OnCpu) -> None:
    method, expected = on_cpu
    on_gpu = after_rounds("cuda", **method)
    assert not torch.equal(expected[0], expected[3]), "replicas differ"
    assert all(map(torch.equal, on_gpu, expected))


def test_with_slow_weights_on_the_device_they_differ_by_rounding(on_cpu: OnCpu) -> None:
    """A GPU rounds a * b + c once where a CPU may round twice. Then few codes are those of the next step."""
    on_gpu = after_rounds("cuda", slow_weights="device", **on_cpu.method)
    for found, expected in zip(on_gpu, on_cpu.found, strict=True):
        differ = (found - expected).abs() > 1e-5
        assert differ.float().mean() <= (0.0 if on_cpu.method["payload"] == "fp32" else 0.01)
