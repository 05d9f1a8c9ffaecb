"""NoLoCo in a loop of Megatron-core's DistributedDataParallel and distributed optimizer, as Megatron-LM has it."""

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, layer_wise_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_noloco.attach import attach
from megatron_noloco.attach.megatron_optimizer import MegatronEngine
from tests.kit import megatron_on_cpu
from tests.kit.jobs import (
    assert_by_the_equations,
    assert_inner_optimizer_is_handed_over,
    federation,
    paper,
    refusal,
    run_jobs,
    trained,
)
from tests.kit.ranks import REPOSITORY, example, run_launcher, run_ranks, slow

EXAMPLE = REPOSITORY / "examples" / "megatron_loop.py"
K, ROUNDS = 2, 3
SETTINGS = paper(local_steps=K)


LOOP = example("megatron_loop")  # megatron-core is imported before ranks are forked
BUILD: dict[str, Callable[[int], tuple[list[Any], Any]]] = {
    "distributed, bf16": lambda tensor_parallel: LOOP.build(tensor_parallel, bf16=True),
    "distributed, fp32": lambda tensor_parallel: LOOP.build(tensor_parallel, bf16=False),
    "layer-wise": lambda tensor_parallel: layer_wise(tensor_parallel),
    "Muon": lambda tensor_parallel: muon(tensor_parallel),
}
needs_muon = pytest.mark.skipif(
    find_spec("emerging_optimizers") is None, reason="needs Megatron-core 0.19 and emerging-optimizers"
)


def layer_wise(tensor_parallel: int) -> tuple[list[Any], Any]:
    """A model, and an optimizer in which each rank has whole parameters; SGD in the place of Muon."""
    gpt = LOOP.build_gpt(tensor_parallel, bf16=True)
    model = [
        DistributedDataParallel(gpt.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
    ]
    linear = [parameter for parameter in model[0].parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model[0].parameters() if parameter.dim() == 1]
    two = [torch.optim.SGD(linear, lr=0.003, momentum=0.9), torch.optim.AdamW(others, lr=0.003)]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = OptimizerConfig(optimizer="adam", bf16=True, clip_grad=1.0)
    return model, LayerWiseDistributedOptimizer(two, config, groups)


def muon(tensor_parallel: int) -> tuple[list[Any], Any]:
    """As of core 0.19: whole matrices in buckets of their own for Muon, a distributed optimizer for the rest."""
    gpt = LOOP.build_gpt(tensor_parallel, bf16=True)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    layer_wise_optimizer.tag_params_for_buffer_routing([gpt])
    layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
        list(gpt.parameters()), None, parallel_state.get_data_parallel_world_size(), ddp
    )
    model = [DistributedDataParallel(gpt.config, ddp, gpt, full_param_layout=layout)]
    config = OptimizerConfig(
        optimizer="muon", use_layer_wise_distributed_optimizer=True, lr=0.003, bf16=True, clip_grad=1.0
    )
    return model, get_megatron_optimizer(config, model)


def train(slot: int, rank: int, folder: Path, tensor_parallel: int, optimizer: str) -> dict[str, Any]:
    """The fp32 weights of this rank: first, before and after each round; the working weights at the end."""
    with megatron_on_cpu.prepare():
        model, optimizer = BUILD[optimizer](tensor_parallel)
        noloco = attach(optimizer, SETTINGS, **federation(folder, slot, 2))
        weights = noloco.outer.weights

        def step(number: int) -> None:
            source = 10 * slot + (rank if tensor_parallel == 1 else 0)
            LOOP.train_step(model, optimizer, LOOP.microbatch(number, source))

        found = trained(noloco, step, weights.read, ROUNDS)
        assert noloco.done == K * ROUNDS
        if optimizer.model_chunks:  # which a layer-wise optimizer of core 0.16 does not know
            load = partial(model[0].load_state_dict, model[0].state_dict())
            assert "load first, attach last" in refusal(load)
        working = torch.cat([parameter.detach().flatten() for parameter in model[0].parameters()])
        noloco.close()
        return {"working": working, "copied": weights.copied(), **found}


@pytest.mark.parametrize(
    ("tensor_parallel", "optimizer"),
    [
        (1, "distributed, bf16"),
        (1, "layer-wise"),
        slow(1, "distributed, fp32"),
        slow(2, "distributed, fp32"),
        slow(2, "layer-wise"),
        pytest.param(1, "Muon", marks=needs_muon),
        pytest.param(2, "Muon", marks=needs_muon),
    ],
)
def test_rounds_are_those_of_the_method(tmp_path: Path, tensor_parallel: int, optimizer: str) -> None:
    """2 jobs of 2 ranks; against the formula, on the fp32 weights that each rank owns."""
    found = run_jobs(tmp_path, 2, 2, train, tmp_path, tensor_parallel, optimizer)
    for rank in range(2):
        assert_by_the_equations([job[rank] for job in found], 1, 0)
    for job in found:
        owned = [one["after"][-1] for one in job]
        if tensor_parallel == 1:
            assert torch.equal(job[0]["working"], job[1]["working"]), "gathered over the replica"
            assert job[0]["copied"] == []
            assert torch.equal(
                sorted_values(*owned, dtype=job[0]["working"].dtype), sorted_values(job[0]["working"])
            )
        else:
            assert job[0]["copied"] == job[1]["copied"] != []
            for start, stop in job[0]["copied"]:
                assert torch.equal(owned[0][start:stop], owned[1][start:stop])


def sorted_values(*tensors: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.cat([tensor.to(dtype or tensor.dtype) for tensor in tensors]).sort().values


def taken_over(rank: int, world_size: int, kind: str) -> None:
    with megatron_on_cpu.prepare():
        model, optimizer = BUILD[kind](1)
        engine = MegatronEngine(optimizer)

        def step(number: int) -> Tensor:
            LOOP.train_step(model, optimizer, LOOP.microbatch(number, rank))
            return engine.read()

        assert_inner_optimizer_is_handed_over(engine, optimizer, step)


@pytest.mark.parametrize("kind", ["distributed, bf16", "layer-wise", pytest.param("Muon", marks=needs_muon)])
def test_inner_optimizer_continues_from_taken_state(kind: str) -> None:
    run_ranks(2, taken_over, kind)


def refused(slot: int, rank: int, folder: Path) -> list[str]:
    with megatron_on_cpu.prepare():
        model, optimizer = LOOP.build(1, True)
        there = federation(folder, slot, 2)
        plain = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.003, bf16=True), model)
        lines = []
        aware = copy(optimizer.chained_optimizers[0])  # core builds no precision-aware one on a CPU
        aware.shard_fp32_from_float16_groups = [[None]]
        for engine, options in (
            (optimizer, {"replicas": 2}),
            (plain, there),
            (model[0], there),
            (aware, there),
        ):
            lines.append(refusal(partial(attach, engine, SETTINGS, **options)))
        return lines


def test_an_optimizer_that_cannot_be_exchanged_is_refused(tmp_path: Path) -> None:
    ((lines, _),) = run_jobs(tmp_path, 1, 2, refused, tmp_path)
    assert "each replica is a job of its own; give federation" in lines[0]
    assert lines[1].startswith("attach: Float16OptimizerWithFloat16Params is not supported; use")
    assert lines[2].startswith("attach: a DistributedDataParallel is none of")
    assert "leave out --use-precision-aware-optimizer" in lines[3]


@pytest.mark.slow
def test_the_example_ends_with_one_model(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(REPOSITORY / "tests" / "kit" / "megatron_on_cpu.py"), str(EXAMPLE)]

    def job(slot: int) -> str:
        options = ["--slots", "2", "--slot", str(slot), "--folder", str(tmp_path)]
        finished = run_launcher([*launcher, *script, *options], 400, None)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(job, (0, 1)))
    norms = [
        sorted(re.findall(r"^rank (\d): finished; its weights have the norm (\S+)$", text, re.M))
        for text in said
    ]
    assert norms[0] == norms[1]
    assert len(norms[0]) == 2
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+), group \(0, 1\)", said[0], re.M)]
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]
