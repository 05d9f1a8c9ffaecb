"""Rounds of weights on a GPU, through pinned memory and a side stream, against the same rounds on a CPU."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_noloco.outer import OuterOptimizer, TorchWeights
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import PAPER, NolocoSettings
from tests.loopback import loopback_world

pytestmark = pytest.mark.gpu

REPLICAS, LENGTH, ROUNDS, LOCAL_STEPS = 4, 3_000_001, 4, 3


@cache
def steps_of(rank: int) -> list[Tensor]:
    """Return what each local step of a rank adds, the same on any device."""
    draw = torch.Generator().manual_seed(rank + 1)
    return [torch.randn(LENGTH, generator=draw) * 0.01 for _ in range(ROUNDS * LOCAL_STEPS + 1)]


def after_rounds(device: str, overlap_steps: int, **method: Any) -> list[Tensor]:
    """Return fast and slow weights and momenta of all replicas after the same local steps on any device."""
    own = {"local_steps": LOCAL_STEPS, "deadline_seconds": 60.0, "overlap_steps": overlap_steps}
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


@pytest.mark.parametrize("overlap_steps", [0, 2])
@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("payload", ["fp32", "int8", "int4", "int3"])
def test_rounds_with_slow_weights_on_host_equal_cpu_bitwise(
    overlap_steps: int, group_size: int, payload: str
) -> None:
    method = {"group_size": group_size, "payload": payload}
    on_gpu, on_cpu = (after_rounds(device, overlap_steps, **method) for device in ("cuda", "cpu"))
    assert not torch.equal(on_cpu[0], on_cpu[3]), "replicas differ"
    assert all(map(torch.equal, on_gpu, on_cpu))


@pytest.mark.parametrize("overlap_steps", [0, 2])
@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("payload", ["fp32", "int8", "int4", "int3"])
def test_with_slow_weights_on_the_device_they_differ_by_rounding(
    overlap_steps: int, group_size: int, payload: str
) -> None:
    """A GPU rounds a * b + c once where a CPU may round twice. Then few codes are those of the next step."""
    method = {"group_size": group_size, "slow_weights": "device", "payload": payload}
    on_gpu, on_cpu = (after_rounds(device, overlap_steps, **method) for device in ("cuda", "cpu"))
    for found, expected in zip(on_gpu, on_cpu, strict=True):
        differ = (found - expected).abs() > 1e-5
        assert differ.float().mean() <= (0.0 if payload == "fp32" else 0.01)
