"""`attach` in loops of two replicas that share a GPU: the weights are those of the same loops on CPUs.

    python -m tools.gpu_check.attached [--device cuda]

A loop of plain torch, one of FSDP2, and two of DeepSpeed (ZeRO 1 in fp32, ZeRO 2 in bf16), with a round every 2
steps, in int4 or with a step's delay. Fails where weights differ by more than the precision's rounding.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_noloco.attach import ReplicaGroups, attach
from megatron_noloco.settings import PAPER, NolocoSettings
from tools.options import command_line

REPLICAS, STEPS, WIDTH = 2, 10, 512
_METHODS: list[dict[str, Any]] = [{"payload": "int4"}, {"slow_weights": "device", "overlap_steps": 1}]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    there, here = weights(options.device), weights("cpu")
    apart = {name: max(_apart(*pair) for pair in zip(there[name], here[name], strict=True)) for name in here}
    wrong = [name for name, distance in apart.items() if not distance <= (0.02 if "bf16" in name else 1e-4)]
    print(json.dumps({"figure": ", ".join(f"{name} {distance:.1e}" for name, distance in apart.items())}))
    sys.exit(f"weights differ from a CPU's: {', '.join(wrong)}" if wrong else 0)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def weights(device: str) -> dict[str, list[Tensor]]:
    """Return the mean model of each loop on each replica, which are processes on one device."""
    # Read by the processes before their imports.
    os.environ |= {"DS_ACCELERATOR": device} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_replica, (folder, device), REPLICAS)
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(REPLICAS)]
    return {name: [of_rank[name] for of_rank in found] for name in found[0]}


def _replica(rank: int, folder: str, device: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(REPLICAS)}
    if device == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", REPLICAS)
    backends = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backends, store=store, rank=rank, world_size=REPLICAS)
    found = {}
    for method in _METHODS:
        settings = NolocoSettings(**{**PAPER, "local_steps": 2, **method})
        for name, loop in LOOPS.items():
            found[f"{name}, {' '.join(map(str, method.values()))}"] = loop(rank, device, settings).cpu()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)


def _batches(rank: int, device: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(8, WIDTH, generator=draw).to(device) for _ in range(STEPS)]


def plain(rank: int, device: str, settings: NolocoSettings) -> Tensor:
    """Train with an optimizer of torch."""
    return _trained(_model(device), rank, device, settings)


def with_fully_shard(rank: int, device: str, settings: NolocoSettings) -> Tensor:
    """Train likewise with FSDP2, whose groups have one rank."""
    mesh = init_device_mesh(device, (REPLICAS, 1), mesh_dim_names=("replica", "shard"))["shard"]
    net = _model(device)
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return _trained(net, rank, device, settings)


def _trained(net: nn.Module, rank: int, device: str, settings: NolocoSettings) -> Tensor:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    noloco = attach(net, settings, replicas=REPLICAS)
    for batch in _batches(rank, device):
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        noloco.step()
    return _mean(noloco)


def with_deepspeed(rank: int, device: str, settings: NolocoSettings, stage: int, **block: Any) -> Tensor:
    """Train with DeepSpeed."""
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # SGD, which has no kernel of DeepSpeed's own
        **block,
    }
    net = _model(device)
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        config=config,
        mpu=ReplicaGroups(REPLICAS),
        dist_init_required=False,
    )
    noloco = attach(engine, settings, replicas=REPLICAS)
    for batch in _batches(rank, device):
        engine.backward(engine(batch.to(next(net.parameters()).dtype)).float().square().mean())
        engine.step()
        noloco.step()
    return _mean(noloco)


def _mean(noloco: Any) -> Tensor:
    noloco.average()
    mean: Tensor = noloco.outer.weights.read()
    noloco.close()
    return mean


LOOPS: dict[str, Callable[[int, str, NolocoSettings], Tensor]] = {
    "torch": plain,
    "FSDP2": with_fully_shard,
    "ZeRO 1": lambda rank, device, settings: with_deepspeed(rank, device, settings, 1),
    "ZeRO 2 bf16": lambda rank, device, settings: with_deepspeed(
        rank, device, settings, 2, bf16={"enabled": True}
    ),
}

if __name__ == "__main__":
    main()
