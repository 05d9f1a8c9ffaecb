"""Whatever divides a model among ranks, they have one canonical vector, and the same digest of it."""

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_noloco.attach import attach, attaching
from megatron_noloco.attach.checks import StartReport, digests_of, start_report
from megatron_noloco.attach.deepspeed_engine import deepspeed_engine
from megatron_noloco.attach.inner import Inner
from megatron_noloco.attach.shards import Engine, copies_in, held, reshard, shapes_of
from megatron_noloco.attach.torch_module import torch_engine
from megatron_noloco.federation import membership
from megatron_noloco.federation.compatibility import differences
from megatron_noloco.federation.network import Network
from megatron_noloco.plans.topology import Topology
from tests.kit.jobs import by_the_equations, federation, network_of_attach, paper, run_jobs
from tests.kit.ranks import run_ranks, until
from tests.references import test_attach, test_fully_shard

SEED = 5

Rank = tuple[StartReport, Tensor]  # and its weights


def of_rank(engine: Engine) -> Rank:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    report = start_report(engine, Topology(dp=ranks, separate_jobs=True), rank, paper(), 0, None)
    assert not report.problem
    return report, engine.read()


def assert_is(model: nn.Module, ranks: Sequence[Rank], rounded: bool = False) -> None:
    """The weights of all ranks at their places, copies left out, are those of the model, one after the other."""
    parameters = dict(model.named_parameters())
    expected = torch.cat([parameters[name].detach().flatten() for name in sorted(parameters)])
    found, blocks = torch.full_like(expected, torch.nan), [report.held or [] for report, _ in ranks]
    for rank, (_, weights) in enumerate(ranks):
        copies = copies_in(blocks, rank)
        for block in blocks[rank]:
            place = found.as_strided((block.rows, block.width), (block.matrix.columns, 1), block.first)
            assert block in copies or place.isnan().all()
            place.copy_(weights[block.own : block.own + block.size].view(block.rows, block.width))
    # DeepSpeed's optimizer in bf16 has taken a step without gradient, in which weights decay by 1e-4.
    torch.testing.assert_close(found, expected, rtol=2**-7 * rounded, atol=0)
    if not rounded:
        alone = [of_rank(torch_engine(model))[0]]
        assert digests_of([report for report, _ in ranks]) == digests_of(alone)


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**test_attach.ODD))


ENGINES: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"stage": 0},
    "ZeRO 1": {"stage": 1},
    "ZeRO 2": {"stage": 2, "zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "ZeRO 3": {"stage": 3},
    "ZeRO 3 in part": {
        "stage": 3,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 80},
    },
    "bf16, ZeRO 0": {"stage": 0, "fused": True, "bf16": {"enabled": True}},
    "bf16, ZeRO 1": {"stage": 1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16, ZeRO 3": {"stage": 3, "bf16": {"enabled": True}},
}


def of_engines(rank: int, world_size: int) -> dict[str, Rank]:
    found = {"DDP": of_rank(torch_engine(DistributedDataParallel(llama())))}
    for name, settings in ENGINES.items():
        found[name] = of_rank(deepspeed_engine(test_attach.engine_of(mpu=None, **settings)))
    return found


def test_ranks_of_every_engine_have_the_same_vector_once() -> None:
    found = run_ranks(2, of_engines)
    for name in found[0]:
        assert_is(llama(), [one[name] for one in found], rounded="bf16" in name)


MESHES = [((4,), ("shard",)), ((2, 2), ("copy", "shard")), ((2, 2), ("shard", "tensor"))]


def of_meshes(rank: int, world_size: int) -> list[Rank]:
    found = []
    for shape, axes in MESHES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        found.append(of_rank(torch_engine(test_fully_shard.Loop(mesh, 0, axes).model)))
    return found


def test_ranks_of_every_mesh_have_the_same_vector_once() -> None:
    torch.manual_seed(SEED)
    model, found = test_fully_shard.Model(), run_ranks(4, of_meshes)
    for number in range(len(MESHES)):
        assert_is(model, [one[number] for one in found])


STATE = ("inner.exp_avg", "inner.exp_avg_sq")


def assert_takes_vectors(engine: Engine, optimizer: Any) -> None:
    """Numbers that are loaded into an optimizer without a state are given by it again, at their places."""
    inner, blocks = Inner(engine, optimizer), held(engine) or []
    facts = {"others": {"inner.step": 7.0, **dict.fromkeys(STATE)}, "settings": {"0": {"lr": 0.5}}}
    vectors = {name: torch.zeros(engine.length) for name in STATE}
    length = sum(math.prod(shape) for shape in shapes_of(engine.trained).values())
    for number, vector in enumerate(vectors.values()):
        for block in blocks:
            place = numbered(length, number).as_strided(
                (block.rows, block.width), (block.matrix.columns, 1), block.first
            )
            vector[block.own : block.own + block.size] = place.flatten()
    inner.check("adamw", facts, vectors)
    inner.load(facts, vectors)
    found, again = inner.vectors(), inner.facts()
    assert again.pop("settings")["0"]["lr"] == 0.5
    assert again == {"others": facts["others"], "named": {}}
    assert found.keys() == vectors.keys()
    for block in blocks:
        place = slice(block.own, block.own + block.size)
        assert all(torch.equal(found[name][place], vector[place]) for name, vector in vectors.items())


def numbered(length: int, seed: int) -> Tensor:
    return torch.rand(length, generator=torch.Generator().manual_seed(seed))


def take_vectors(rank: int, world_size: int) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    assert_takes_vectors(torch_engine(DistributedDataParallel(model)), optimizer)
    named = dict(model.named_parameters())
    whole = torch.cat([optimizer.state[named[name]]["exp_avg"].flatten() for name in sorted(named)])
    assert torch.equal(whole, numbered(len(whole), 0)), "each rank has all of it"
    for settings in (one for name, one in ENGINES.items() if "bf16" not in name):
        engine = test_attach.engine_of(mpu=None, **settings)
        assert_takes_vectors(deepspeed_engine(engine), engine.optimizer)
    loop = test_fully_shard.Loop(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), 0)
    assert_takes_vectors(torch_engine(loop.model), loop.optimizer)


def test_optimizer_state_moves_between_layouts() -> None:
    run_ranks(2, take_vectors)


def trained(slot: int, rank: int, folder: Path) -> dict[str, Any]:
    """Of a job alone, in DistributedDataParallel or divided by fully_shard: the weights around each round."""
    torch.manual_seed(SEED)
    module = test_fully_shard.Model()
    if slot == 2:
        fully_shard(module.block, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    model = DistributedDataParallel(module) if slot == 1 else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    there = federation(folder, slot, 3)
    noloco = attach(model, paper(local_steps=2), seed=SEED, **there)

    def weights() -> Tensor:
        reshard(module)
        return flat(module.parameters())

    first, before, after = weights(), [], []
    while noloco.done < 7:
        points = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * noloco.done + slot))
        optimizer.zero_grad()
        model(points).square().mean().backward()
        optimizer.step()
        last = weights()
        if noloco.step():
            before.append(last)
            after.append(weights())
    noloco.average()
    noloco.close()
    found = {"before": torch.stack(before), "after": torch.stack(after)}
    return found | {"first": first, "unlike": last, "last": weights()}


def test_jobs_of_three_layouts_end_with_one_model(tmp_path: Path) -> None:
    jobs = run_jobs(tmp_path, 3, (1, 2, 2), trained, tmp_path)
    before = torch.stack([job[0]["before"] for job in jobs], dim=1)
    assert not torch.equal(before[:, 0], before[:, 1]), "each replica has data of its own"
    expected = by_the_equations(jobs[0][0]["first"], before, SEED)
    for slot, job in enumerate(jobs):
        for one in job:
            torch.testing.assert_close(one["after"], expected[:, slot], rtol=0, atol=1e-6)
            assert torch.equal(one["last"], jobs[0][0]["last"])
    unlike = torch.stack([job[0]["unlike"] for job in jobs])
    assert (unlike - unlike.mean(0)).norm() > 1e-3, "the last local step was not followed by a round"
    torch.testing.assert_close(jobs[0][0]["last"], unlike.mean(0), rtol=0, atol=1e-6)


def gives_or_takes(slot: int, rank: int, folder: Path) -> dict[int, tuple[Tensor, Tensor]]:
    """Weights and moments by the local steps: of a job of one rank, or at the start of one that is divided."""
    torch.manual_seed(SEED)
    module = test_fully_shard.Model()
    if slot == 0:
        membership.FIRST_SECONDS = 0.0  # nobody is there to be waited for
    else:
        until((folder / "trained").exists)
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    there = federation(folder, slot, 2, start_with=1, rounds_behind=3)
    noloco = attach(module, paper(local_steps=2), inner=optimizer, **there)

    def now() -> tuple[Tensor, Tensor]:
        reshard(module)
        moments = (optimizer.state[one]["exp_avg"] for one in module.parameters())
        return flat(module.parameters()), flat(moments)

    if slot == 1:
        assert noloco.done == noloco.taken > 10
        found = {noloco.done: now()}
        noloco.close()
        (folder / "took").touch()
        return found
    found = {}
    while not (folder / "took").exists():
        points = torch.randn(4, 5, generator=torch.Generator().manual_seed(noloco.done))
        optimizer.zero_grad()
        module(points).square().mean().backward()
        optimizer.step()
        noloco.step()
        found[noloco.done] = now()
        time.sleep(0.005)
        if noloco.done > 10:
            (folder / "trained").touch()
    noloco.close()
    return found


def flat(tensors: Iterable[Any]) -> Tensor:
    wholes = (getattr(one, "full_tensor", one.detach)() for one in tensors)
    return torch.cat([one.detach().flatten() for one in wholes])


def test_late_job_takes_over_state_of_another_layout(tmp_path: Path) -> None:
    ((gave,), took) = run_jobs(tmp_path, 2, (1, 2), gives_or_takes, tmp_path)
    for ((done, found),) in (one.items() for one in took):
        assert all(map(torch.equal, found, gave[done]))


def without_places(model: nn.Module) -> Engine:
    engine = torch_engine(model)
    engine.placed = False
    return engine


def test_engines_whose_ranks_must_be_the_same_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two jobs do whose engine has no place for its weights in the canonical vector."""

    def compared(sizes: Sequence[int]) -> Network:
        model = nn.ParameterList(torch.ones(size) for size in sizes)
        monkeypatch.setattr(attaching, "_engine_of", without_places)
        return network_of_attach(monkeypatch, model, paper(), **federation(tmp_path, 0, 2))

    assert differences(compared([4, 6]).digests, compared([4, 6]).digests) == ""
    assert differences(compared([4, 6]).digests, compared([10]).digests) == (
        "names and shapes, ranks and parallel sizes. This engine needs the same in all jobs"
    )


def in_part(value: float, frozen: float) -> list[StartReport]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        model[0].weight[1, 2] = value
        model[1].weight[1, 1] = frozen
    model[1].weight.requires_grad_(False)
    return [of_rank(torch_engine(model))[0]]


@pytest.mark.parametrize(("value", "frozen", "differs"), [(1.0, 1.0, set()), (1 + 2**-23, 1.0, {"weights"}),
                                                          (1.0, 1 - 2**-24, {"frozen weights"})])  # fmt: skip
def test_the_digest_notices_a_single_bit(value: float, frozen: float, differs: set[str]) -> None:
    first, second = digests_of(in_part(1.0, 1.0)), digests_of(in_part(value, frozen))
    assert {name for name in first if first[name] != second[name]} == differs
