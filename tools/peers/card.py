"""The bytes that training keeps on a card for weights, gradients and optimizers, and those that a step sends.

Computed for the models of the paper; measured in plain torch, in fp32 on a CPU, where all that a library takes
comes from malloc.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_noloco.attach import attach
from megatron_noloco.config import RunConfig
from megatron_noloco.config.round_memory import bytes_of_rounds, bytes_of_state
from megatron_noloco.model.families import table_of
from megatron_noloco.settings import NolocoSettings
from tools.netlab.lab import REPOSITORY
from tools.peers.replica import Model
from tools.peers.torchft import Environment, Replicas
from tools.processes import allocated_bytes

CARDS = 8
LOCAL_STEPS = 50  # of torchft's DiLoCo
RECIPE = NolocoSettings(local_steps=3)
PAPER = ("125m", "1.3b", "6.8b")
HIDDEN, LAYERS, LENGTH, RANKS, STEPS = 768, 12, 64, 2, 4  # of the measured model: the layers of 125M
WAYS = ("torch DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3", "FSDP2", "torchft DiLoCo", "NoLoCo")


def kept(way: str, working: int, cards: int) -> tuple[float, float]:
    """Return the bytes per weight that a card and its host keep: weights, gradients, AdamW and the outer step.

    Args:
        working: bytes of a weight in computations; 4: there is no copy of the weights in fp32, but for ZeRO's.
        cards: that divide what the way divides.
    """
    weights, gradients, optimizer = working, working, 8 if working == 4 else 12
    if way.startswith("ZeRO"):
        optimizer = 12
    if way == "NoLoCo" and working == 2:
        gradients = 4  # the trainer sums microbatches in fp32
    on_card = {
        "torch DDP": weights + gradients + optimizer,
        "ZeRO 1": weights + gradients + optimizer / cards,
        "ZeRO 2": weights + (gradients + optimizer) / cards,
        "ZeRO 3": (weights + gradients + optimizer) / cards,
        "FSDP2": (4 + 4 + 8) / cards,
        "torchft DiLoCo": weights + gradients + optimizer + 4,  # the momentum of its outer SGD
        "NoLoCo": weights + gradients + optimizer,
    }
    rounds = sum(bytes_of_state(RECIPE, cards).values()) + sum(bytes_of_rounds(RECIPE, cards).values())
    on_host = {"torchft DiLoCo": 4.0, "NoLoCo": rounds}
    return on_card[way], on_host.get(way, 0.0)


def sent(way: str, working: int, cards: int) -> float:
    """Return the bytes per weight and local step that a card sends, where sums go in rings."""
    ring = (cards - 1) / cards
    return {
        "torch DDP": 2 * ring * working,
        "ZeRO 1": 2 * ring * working,
        "ZeRO 2": 2 * ring * working,
        "ZeRO 3": 3 * ring * working,
        "FSDP2": 3 * ring * working,
        "torchft DiLoCo": 2 * ring * 4 / LOCAL_STEPS,
        "NoLoCo": 1.04 / RECIPE.local_steps,
    }[way]


def computed() -> dict[str, Any]:
    """Return gigabytes kept and sent for the models of the paper, in bf16, on 8 cards."""
    found: dict[str, Any] = {}
    for name in PAPER:
        config = RunConfig(**json.loads((REPOSITORY / "configs" / f"llama_{name}.json").read_text()))
        rows = table_of(config.architecture(config.model.vocab_size or 0))
        weights = sum(torch.Size(row.shape).numel() for row in rows)
        found[name] = {"weights": weights} | {
            way: {
                "on a card, GB": round(weights * kept(way, 2, CARDS)[0] / 1e9, 2),
                "on its host, GB": round(weights * kept(way, 2, CARDS)[1] / 1e9, 2),
                "sent in a local step, GB": round(weights * sent(way, 2, CARDS) / 1e9, 3),
            }
            for way in WAYS
        }
    return found


def measured(environment: Environment, folder: Path) -> dict[str, Any]:
    """Return bytes per weight that a rank of two holds after a backward pass in fp32, beside those computed."""
    folder.mkdir(parents=True)
    found = {}
    for way in WAYS:
        if way == "torchft DiLoCo":
            options = ["--hidden", str(HIDDEN), "--layers", str(LAYERS), "--batch", "1", "--steps", "2"]
            options += ["--local-steps", "1", "--nesterov"]
            with Replicas(environment, folder / "torchft", "torchft-diloco", RANKS, options) as replicas:
                replicas.wait()
                bytes_ = replicas.events(0, event="end")[0]["allocated_bytes"]
        else:
            file = folder / way.replace(" ", "-")
            mp.start_processes(measure, (way, str(file)), nprocs=RANKS, start_method="spawn")
            bytes_ = int(file.with_suffix(".bytes").read_text())
        weights = sum(weight.numel() for weight in Model(HIDDEN, LAYERS, LENGTH).parameters())
        found[way] = {"measured": bytes_ / weights, "computed": sum(kept(way, 4, RANKS))}
    return found


def measure(rank: int, way: str, file: str) -> None:
    """Train as one rank of two; the first leaves in a file the bytes that it holds after a backward pass."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    dist.init_process_group("gloo", store=dist.FileStore(file, RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    before = allocated_bytes()
    model: Any = Model(HIDDEN, LAYERS, LENGTH)
    backward, step, _alive = _stepper(way, model)
    text = torch.randint(256, (1, LENGTH + 1))

    def loss(called: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(called(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    for _ in range(STEPS):
        backward(loss)
        held = allocated_bytes() - before
        step()
    if rank == 0:
        Path(file).with_suffix(".bytes").write_text(str(held))
    dist.barrier()
    os._exit(0)


def _stepper(way: str, model: Any) -> tuple[Callable[[Any], None], Callable[[], None], Any]:
    """Return what computes the gradients of a loss, what takes the step, and what must stay alive for both."""
    if way.startswith("ZeRO"):
        import deepspeed

        adam = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
        block = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam}
        # Buckets small beside the model: their size is a setting, not a property of the way.
        zero = {
            "stage": int(way[-1]),
            **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), 1_000_000),
        }
        if way == "ZeRO 3":
            zero |= {
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 0,
                "stage3_param_persistence_threshold": 0,
            }
            del zero["allgather_bucket_size"]
        engine, *_ = deepspeed.initialize(model=model, config=block | {"zero_optimization": zero})

        return lambda loss: engine.backward(loss(engine)), engine.step, engine
    called = model
    if way == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        for layer in model.layers.layers:
            fully_shard(layer, mesh=mesh)
        called = fully_shard(model, mesh=mesh)
    elif way == "torch DDP":
        called = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    noloco = attach(model, RECIPE, replicas=RANKS) if way == "NoLoCo" else None

    def step() -> None:
        optimizer.step()
        if noloco:
            noloco.step()
        optimizer.zero_grad()

    return lambda loss: loss(called).backward(), step, (called, optimizer, noloco)
