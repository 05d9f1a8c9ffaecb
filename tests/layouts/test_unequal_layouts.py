"""Replicas of different layouts have the slow weights that replicas of one rank have, to the last bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.outer import OuterOptimizer
from megatron_noloco.plans.canonical import Holding
from megatron_noloco.training.run import Run
from tests.kit.federation import Federation
from tests.kit.fleet import noise
from tests.kit.ranks import slow
from tests.kit.tiny import FAMILY_MODELS, sizes, tiny, write_text

ROUNDS = 3
Job = tuple[int, dict[str, Any]]
"""The ranks of a job, and the changes of its config."""


def job(pp: int = 1, dp: int = 1, tp: int = 1, ep: int = 1, zero: int = 1) -> Job:
    parallel = sizes(pp=pp, dp=dp, tp=tp, ep=ep)
    batch = {"gradient_accumulation_steps": 2 // dp, "zero_optimization": {"stage": zero}}
    return pp * dp * tp, {"parallel": parallel, **batch}


def exchanges(folder: Path) -> None:
    """In place of the training: rounds of weights that are known, and differ from replica to replica."""

    def train(run: Run) -> bool:
        outer, peers = run.peers.outer, run.peers
        assert isinstance(outer, OuterOptimizer)
        peers.begin(0, takes_over=False)
        own = outer.place.replica
        holding = Holding(*run.engine.held())
        first = 0.02 * noise(holding_length(holding), seed=9)
        fill(outer.slow_weights, holding, first)
        for index in range(ROUNDS):
            weights = run.engine.weights.read()
            fill(weights, holding, first + 0.01 * noise(len(first), seed=10 * index + own))
            with run.engine.weights.writing() as write:
                write(0, weights)
            report = outer.run_round(index).exchange
            assert len(report.group) == 2, report.missed
            assert report.seconds > 0, "on each rank, for settings that all ranks choose after the same round"
        if dist.get_rank() == 0:
            (folder / f"rounds_of_{own}").touch()
        blocks = holding.between(0, len(first))
        parts = [(block, outer.slow_weights[block.own : block.own + block.size].clone()) for block in blocks]
        torch.save(parts, folder / f"slow_{own}_{dist.get_rank()}")
        dist.barrier()
        peers.close(at_once=False)
        return True

    Run.train = train  # type: ignore[method-assign]


def holding_length(own: Holding) -> int:
    """Elements of the canonical vector."""
    stops: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(stops, own.stop)
    return max(stops)


def fill(vector: Tensor, holding: Holding, canonical: Tensor) -> None:
    """Write what a rank has of the canonical vector to its places."""
    for block in holding.between(0, len(canonical)):
        part = canonical[block.first :].as_strided((block.rows, block.width), (block.matrix.columns, 1))
        vector[block.own : block.own + block.size] = part.reshape(-1)


def slow_weights(folder: Path, slot: int) -> Tensor:
    """The canonical vector of a replica, in which copies of ranks are equal."""
    parts = [
        part
        for path in sorted(folder.glob(f"slow_{slot}_*"))
        for part in torch.load(path, weights_only=False)
    ]
    found = torch.full((max(block.last for block, _ in parts) + 1,), torch.nan)
    for block, part in parts:
        place = found[block.first :].as_strided((block.rows, block.width), (block.matrix.columns, 1))
        assert place.isnan().all() or torch.equal(place, part.view(block.rows, block.width))
        place.copy_(part.view(block.rows, block.width))
    assert found.isfinite().all()
    return found


def rounds_of(folder: Path, jobs: list[Job], changes: dict[str, Any]) -> list[Tensor]:
    common = {"federation": {"start_with": len(jobs)}, "data": {"text": write_text(folder)}}
    with Federation(folder, tiny(changes, common)) as federation:
        for slot, (ranks, of_job) in enumerate(jobs):
            federation.start(slot, ranks, of_job, disturb=partial(exchanges, folder))
        federation.wait()
    return [slow_weights(folder, slot) for slot in range(len(jobs))]


DENSE = [job(), job(tp=2), job(pp=2), job(dp=2, zero=2)]


@pytest.mark.parametrize(
    ("jobs", "changes"),
    [
        (DENSE, {"noloco": {"payload": "fp32"}}),
        (DENSE, {"noloco": {"payload": "int4", "fragments": 1}}),
        slow(DENSE, {"noloco": {"payload": "int8"}}),
        slow([job(), job(pp=2, tp=2)], {"noloco": {"payload": "fp32"}}),
        slow([job(dp=2), job(pp=2, dp=2)], {"noloco": {"payload": "int8"}}),
        slow([job(), job(dp=2, ep=2)], {"noloco": {"payload": "int8"}, "model": FAMILY_MODELS["mixtral"]}),
    ],
    ids=["fp32", "int4", "int8", "two stages of two", "data parallel", "experts"],
)
def test_slow_weights_are_those_of_equal_layouts(
    tmp_path: Path, jobs: list[Job], changes: dict[str, Any]
) -> None:
    found = [
        rounds_of(folder, of_run, changes)
        for folder, of_run in ((tmp_path / "unequal", jobs), (tmp_path / "equal", [job()] * len(jobs)))
        if not folder.mkdir()
    ]
    for unequal, equal in zip(*found, strict=True):
        assert torch.equal(unequal, equal)
    assert found[0][0].std() > 0.01
