"""NoLoCo attached to modules of torch's fully_shard (FSDP2), also with copies and with tensor parallelism."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_noloco.attach import attach
from megatron_noloco.attach.shards import reshard
from megatron_noloco.attach.torch_module import torch_engine
from megatron_noloco.outer import RoundReport
from tests.kit.jobs import (
    assert_by_the_equations,
    assert_inner_optimizer_is_handed_over,
    federation,
    paper,
    refusal,
    run_jobs,
    trained,
)
from tests.kit.ranks import run_ranks, slow
from tests.kit.spy import Spy

REPLICAS, SEED, K = 2, 5, 2
pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this torch does not run on a CPU"
)
SETTINGS = paper(local_steps=K)


class Model(nn.Module):
    """Of odd sizes: two ranks have pieces of different lengths, and of the last layer one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.block = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 7))
        self.last = nn.Linear(7, 1)

    def forward(self, points: Tensor) -> Tensor:
        return self.last(self.block(self.first(points)))  # type: ignore[no-any-return]


class Loop:
    """A model that a mesh of one replica divides, its optimizer, and data of its own."""

    def __init__(
        self,
        mesh: DeviceMesh,
        source: int,
        axes: tuple[str, ...] = ("shard",),
        policy: MixedPrecisionPolicy | None = None,
        seed: int = SEED,
    ) -> None:
        torch.manual_seed(seed)
        self.model, self.source = Model(), source
        if "tensor" in axes:
            plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
            parallelize_module(self.model.block, mesh["tensor"], plan)
            axes = ("shard",)
        mesh = mesh[axes]
        fully_shard(self.model.block, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
        fully_shard(self.model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train_step(self, step: int) -> None:
        points = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + self.source))
        self.optimizer.zero_grad()
        self.model(points).square().mean().backward()
        self.optimizer.step()

    def whole(self) -> Tensor:
        """All weights of the replica, flat."""
        reshard(self.model)
        return torch.cat([whole(parameter).flatten() for parameter in self.model.parameters()])

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        return self.model(torch.ones(1, 5))  # type: ignore[no-any-return]


@torch.no_grad()
def whole(parameter: Any) -> Tensor:
    full: Tensor = parameter.full_tensor()
    return full.clone()


def train(
    rank: int, world_size: int, shape: tuple[int, ...], axes: tuple[str, ...], bf16: bool
) -> dict[str, Any]:
    """The first weights, those before and after each round; to which ranks messages went in rounds."""
    mesh = init_device_mesh("cpu", (REPLICAS, *shape), mesh_dim_names=("replica", *axes))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else None
    loop = Loop(mesh, rank if axes[-1] != "tensor" else rank // shape[-1], axes, policy)
    noloco = attach(loop.model, SETTINGS, replicas=REPLICAS, seed=SEED)
    spy = Spy()
    spy.listen_to_torch()

    def exchange() -> list[RoundReport]:
        spy.step = 0
        reports = noloco.step()
        spy.step = -1
        return reports

    found = trained(noloco, loop.train_step, loop.whole, 3, exchange)
    assert noloco.done == 3 * K
    rounds = [call for call in spy.calls if call.step >= 0]
    weights = noloco.outer.weights
    assert loop.evaluate() != 0  # and what is not in the block stays gathered
    with weights.writing() as write:
        write(0, torch.zeros(weights.length))
    assert loop.evaluate() == 0, "the next forward pass computes with what was written"
    found |= {"copied": weights.copied(), "pieces": weights.length}
    return found | {"peers": {call.peer for call in rounds}}


@pytest.mark.parametrize(
    ("shape", "axes", "bf16"),
    [
        ((2,), ("shard",), False),
        ((2, 1), ("copy", "shard"), False),
        ((1, 2), ("shard", "tensor"), False),
        ((2, 2), ("copy", "shard"), True),
        slow((2,), ("shard",), True),
        slow((2, 2), ("shard", "tensor"), False),
    ],
)
def test_rounds_are_those_of_the_method(shape: tuple[int, ...], axes: tuple[str, ...], bf16: bool) -> None:
    """Against the formula, and without a collective."""
    size = torch.Size(shape).numel()
    found = run_ranks(REPLICAS * size, train, shape, axes, bf16)
    assert_by_the_equations(found, size, SEED)
    for rank, one in enumerate(found):
        assert one["peers"] == {(rank + size) % (REPLICAS * size)}, "the same place of the other replica"
    total, elements = sum(one["pieces"] for one in found[:size]), found[0]["first"].numel()
    copied = sum(stop - start for one in found[:size] for start, stop in one["copied"])
    assert (total == elements) == (not copied) == (axes == ("shard",))
    assert total - elements <= copied


def continued(slot: int, rank: int, folder: Path) -> list[Tensor]:
    """The weights after five rounds and the average: without, and with another model after five steps."""
    found = []
    for stops in (False, True):
        loop, there = of_job(slot, rank), federation(folder / str(stops), slot, REPLICAS)
        noloco = attach(loop.model, SETTINGS, seed=SEED, **there)
        while noloco.done < 10:
            if stops and noloco.done == 5:
                file = folder / f"{slot}_{rank}.pt"
                model, inner = get_state_dict(loop.model, loop.optimizer)
                torch.save({"model": model, "inner": inner, "noloco": noloco.state_dict()}, file)
                noloco.close()
                loop, saved = of_job(slot, rank, seed=9), torch.load(file, weights_only=True)
                states = {"model_state_dict": saved["model"], "optim_state_dict": saved["inner"]}
                set_state_dict(loop.model, loop.optimizer, **states)
                there = federation(folder / "again", slot, REPLICAS)
                noloco = attach(loop.model, SETTINGS, seed=SEED, state=saved["noloco"], **there)
                stops = False
            loop.train_step(noloco.done)
            noloco.step()
        loop.evaluate()
        noloco.average()
        noloco.close()
        found.append(torch.cat([loop.whole(), loop.evaluate().flatten()]))
    return found


def of_job(slot: int, rank: int, seed: int = SEED) -> Loop:
    return Loop(mesh_of(2), 2 * slot + rank, seed=seed)


def mesh_of(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))


def test_jobs_resume_and_end_with_one_model(tmp_path: Path) -> None:
    """To the last bit."""
    found = [one for job in run_jobs(tmp_path, REPLICAS, 2, continued, tmp_path) for one in job]
    for without, with_ in found:
        assert torch.equal(without, found[0][0])
        assert torch.equal(with_, found[0][0])


def taken_over(rank: int, world_size: int) -> None:
    loop = of_job(0, rank)

    def step(number: int) -> Tensor:
        loop.train_step(number)
        return loop.whole()

    assert_inner_optimizer_is_handed_over(torch_engine(loop.model), loop.optimizer, step)


def test_inner_optimizer_continues_from_taken_state() -> None:
    run_ranks(2, taken_over)


def refused(rank: int, world_size: int) -> dict[str, str]:
    mesh = mesh_of(world_size)
    loop = Loop(mesh, rank)
    part = Model()
    fully_shard(part.block, mesh=mesh)
    lines = {
        "reach": refusal(partial(attach, loop.model, replicas=2)),
        "a part": refusal(partial(attach, part, replicas=1)),
    }
    noloco = attach(loop.model, replicas=1)
    lines["load"] = refusal(partial(loop.model.load_state_dict, loop.model.state_dict()))
    noloco.close()
    return lines


def test_model_sharded_in_part_or_beyond_replica_is_refused() -> None:
    for rank, found in enumerate(run_ranks(2, refused)):
        expected = {
            "reach": f"rank {rank}: the gradient all-reduce of this model spans ranks [0, 1], its replica is "
            f"[{rank}]; give fully_shard the mesh of a replica",
            "a part": "attach: first.weight is no DTensor, others are: its gradient would not be reduced",
            "load": "load_state_dict of a model that is attached: the next round would undo it",
        }
        for name, line in expected.items():
            assert found[name].startswith(line), found[name]
            assert "\n" not in found[name]
