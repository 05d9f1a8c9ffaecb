"""Whole trainings on simulated GPUs, each rank with its own: the weights of CPUs, and the same after a resume."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.kit.ranks import by_hand, run_ranks
from tests.kit.saved_runs import EXPERTS, Changes, layout, ranks
from tests.kit.tiny import BF16, RECOMPUTE, TIED, run_whole, tiny_with, write_config, write_text
from tests.simulated_gpu import Gpu, Order, installed
from tests.simulated_gpu.optimizers import TORCH_ADAM, WITH_MUON
from tests.simulated_gpu.process import GpuProcess
from tests.simulated_gpu.rounds import differences

STEPS, SAVED = 4, 3
RUN: dict[str, Any] = {
    **TORCH_ADAM,
    "model": {"num_layers": 2},
    "noloco": {"local_steps": 2, "routing": "microbatch"},
    "training": {"train_iters": STEPS},
    "checkpoint": {"save_interval": SAVED},
}
UNDER_WAY = {"noloco": {"overlap_steps": 2}}  # begun after step 2, merged after step 4
ON_DEVICE = {"noloco": {"slow_weights": "device"}}
DROPOUT = {"model": {"hidden_dropout": 0.1, **RECOMPUTE}}

# name: changes of the tiny config; the last one is its layout
CASES: dict[str, list[Changes]] = {
    "routes, a round under way": [TIED, UNDER_WAY, ON_DEVICE, layout(pp=2)],
    "tp 2, sequence parallelism": [layout(tp=2, replicas=1, sequence_parallel=True)],
    "dp 2, ZeRO 2": [{"zero_optimization": {"stage": 2}}, layout(dp=2, replicas=1)],
    "ep 2": [EXPERTS, layout(dp=2, replicas=1, ep=2)],
    "dropout": [DROPOUT, UNDER_WAY, {"noloco": {"payload": "int4"}}, layout()],
}
BY_HAND: dict[str, list[Changes]] = {
    "dp 2, bf16, tied": [BF16, TIED, layout(dp=2)],
    "Muon, dp 2": [WITH_MUON, layout(dp=2)],
    "final average, evaluations": [
        {"noloco": {"payload": "int8", "final_average": True}, "evaluation": {"iters": 2, "interval": 2}},
        layout(),
    ],
    "two fragments, two chunks": [
        UNDER_WAY,
        {"noloco": {"fragments": 2}, "model": {"num_layers": 4}},
        layout(pp=2, vpp=2),
    ],
}
ALL = CASES | BY_HAND
every_case = pytest.mark.parametrize("name", by_hand(ALL, BY_HAND))


def on_gpu(rank: int, world_size: int, config: str) -> dict[str, Tensor]:
    with installed(f"gpu {rank}"), Gpu(Order.LATE):
        found = run_whole(rank, world_size, config)
        return {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}


def config_in(folder: Path, changes: list[Changes]) -> str:
    here = {"data": {"text": write_text(folder)}, "training": {"output_dir": str(folder / "run")}}
    return write_config(folder, tiny_with(RUN, here, *changes))


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]], rounding: float) -> None:
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in ("master", "slow"):
            apart = (one[name] - other[name]).norm() / other[name].norm()
            assert apart < rounding, f"{name} of rank {rank}"


@every_case
def test_training_equals_cpu_and_resumes(name: str, gpu_process: GpuProcess, tmp_path: Path) -> None:
    config = config_in(tmp_path, ALL[name])
    count = ranks(ALL[name][-1])
    whole = gpu_process.run_ranks(count, on_gpu, config, timeout=300)
    (last,) = (tmp_path / "run" / "checkpoints").glob(f"*{STEPS}")
    shutil.rmtree(last)
    assert not differences(whole, gpu_process.run_ranks(count, on_gpu, config, timeout=300))
    if DROPOUT not in ALL[name]:  # a GPU draws from another generator
        shutil.rmtree(tmp_path / "run")
        rounding = 1e-2 if BF16 in ALL[name] or WITH_MUON in ALL[name] else 1e-4
        assert_close(whole, run_ranks(count, run_whole, config, timeout=300), rounding)
