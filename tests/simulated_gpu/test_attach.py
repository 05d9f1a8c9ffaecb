"""`attach` in loops whose weights lie on simulated GPUs: the weights are those of the same loops on CPUs."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_noloco.attach import ReplicaGroups, attach
from tests.kit.jobs import paper
from tests.kit.ranks import run_ranks
from tests.simulated_gpu import Gpu, Order, installed
from tests.simulated_gpu.process import GpuProcess

RANKS, REPLICAS, STEPS = 4, 2, 5
HOST, DEVICE = paper(local_steps=2), paper(local_steps=2, slow_weights="device", overlap_steps=1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 15), nn.Tanh(), nn.Linear(15, 9))


def batches(rank: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """All batches, on the device before the first step: a blocking copy in between would hide races of a step."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 9, generator=draw).to(device, dtype) for _ in range(STEPS)]


def plain(rank: int, device: str, settings: Any) -> Tensor:
    """A loop of plain torch: each rank is a replica."""
    return trained(model().to(device), rank, device, settings, RANKS)


def with_deepspeed(
    rank: int, device: str, settings: Any, stage: int, sliced: bool = False, **block: Any
) -> Tensor:
    """A loop of DeepSpeed: replicas of two ranks.

    Args:
        sliced: with ZeRO 3, whether no parameter stays whole, nor the timer waits in each step; the loop waits for
            DeepSpeed's step, whose weights DeepSpeed itself gathers too early.
    """
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 200,
            "allgather_bucket_size": 200,
            "stage3_prefetch_bucket_size": 200,
            "stage3_param_persistence_threshold": 0 if sliced else 100_000,
        },
        "timers": {"throughput": {"enabled": not sliced}},
        **block,
    }
    net = model()
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        config=config,
        mpu=ReplicaGroups(REPLICAS),
        dist_init_required=False,
    )
    noloco = attach(engine, settings, replicas=REPLICAS)
    for batch in batches(rank, device, torch.bfloat16 if block else torch.float32):
        engine.backward(engine(batch).float().square().mean())
        engine.step()
        if sliced and device == "cuda":
            torch.cuda.synchronize()
        noloco.step()
    return ended(noloco)


def with_fully_shard(rank: int, device: str, settings: Any, events: bool = False) -> Tensor:
    """A loop of FSDP2: replicas of two ranks.

    Args:
        events: whether the loop lets the next gathering wait for the optimizer alone, as torch documents it.
    """
    mesh = init_device_mesh(device, (REPLICAS, 2), mesh_dim_names=("replica", "shard"))["shard"]
    net = model().to(device)
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)

    def stepped() -> None:
        if events and device == "cuda":
            net.set_post_optim_event(torch.cuda.current_stream().record_event())

    return trained(net, rank, device, settings, REPLICAS, stepped)


def trained(
    net: nn.Module,
    rank: int,
    device: str,
    settings: Any,
    replicas: int,
    stepped: Callable[[], None] = lambda: None,
) -> Tensor:
    """The steps of a loop with an optimizer of torch."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    noloco = attach(net, settings, replicas=replicas)
    for batch in batches(rank, device):
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped()
        noloco.step()
    return ended(noloco)


def ended(noloco: Any) -> Tensor:
    """The slow and fast weights of this rank after the last step, and their mean over the replicas."""
    slow = noloco.state_dict()["slow_weights"].cpu().clone()
    fast = noloco.outer.weights.read()
    noloco.average()
    mean = noloco.outer.weights.read()
    noloco.close()
    return torch.cat([slow, fast, mean])


LOOPS: dict[str, Callable[[int, str], Tensor]] = {
    "torch": lambda rank, device: plain(rank, device, HOST),
    "torch, on the device": lambda rank, device: plain(rank, device, DEVICE),
    "ZeRO 0": lambda rank, device: with_deepspeed(rank, device, HOST, 0),
    "ZeRO 1": lambda rank, device: with_deepspeed(rank, device, DEVICE, 1),
    "ZeRO 1, bf16": lambda rank, device: with_deepspeed(rank, device, HOST, 1, bf16={"enabled": True}),
    "ZeRO 2": lambda rank, device: with_deepspeed(rank, device, HOST, 2),
    "ZeRO 3": lambda rank, device: with_deepspeed(rank, device, HOST, 3),
    "FSDP2": lambda rank, device: with_fully_shard(rank, device, HOST),
    "FSDP2, with events of the loop": lambda rank, device: with_fully_shard(
        rank, device, DEVICE, events=True
    ),
    "FSDP2, on the device": lambda rank, device: with_fully_shard(rank, device, DEVICE),
    "ZeRO 3, no parameter stays whole": lambda rank, device: with_deepspeed(
        rank, device, HOST, 3, sliced=True
    ),
}

if not hasattr(torch.cpu.Stream, "record_event"):  # fully_shard of this torch does not run on a CPU
    LOOPS = {name: loop for name, loop in LOOPS.items() if "FSDP2" not in name}


def all_loops(rank: int, world_size: int, order: Order | None) -> dict[str, Tensor]:
    deepspeed.ops.__compatible_ops__ = {}  # none is compiled, nor is a compiler tried
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    found = {}
    for name, loop in LOOPS.items():
        gpu = (installed(f"gpu {rank}"), Gpu(order)) if order else (nullcontext(), nullcontext())
        with gpu[0], gpu[1]:
            found[name] = loop(rank, "cuda" if order else "cpu")
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def weights(gpu_process: GpuProcess) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Those of all ranks and loops, on GPUs and on CPUs."""
    on_gpus = gpu_process.run_ranks(RANKS, all_loops, Order.LATE, timeout=300)
    return on_gpus, run_ranks(RANKS, all_loops, None, timeout=300)


@pytest.mark.parametrize("name", LOOPS)
def test_the_weights_are_those_of_cpus(name: str, weights: Any) -> None:
    for on_gpu, on_cpu in zip(*weights, strict=True):
        assert torch.equal(on_gpu[name], on_cpu[name])
