"""NoLoCo attached to DeepSpeed engines of a user's own, with every ZeRO stage."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.ops.adam import FusedAdam
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_noloco.attach import ReplicaGroups, attach
from megatron_noloco.attach.deepspeed_engine import deepspeed_engine
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
from tests.kit.tiny import HF_SIZES

REPLICAS, SIZE, SEED = 2, 2, 5
SETTINGS = paper(local_steps=2)


# Sizes that two ranks cannot halve: their parts have padding.
ODD = HF_SIZES | {
    "vocab_size": 65, "hidden_size": 33, "intermediate_size": 47, "num_attention_heads": 3,
    "num_key_value_heads": 3, "head_dim": 6,
}  # fmt: skip


class AsFused(FusedAdam):
    """torch's AdamW under the type from which DeepSpeed concludes that it runs on a GPU."""

    def __init__(self, parameters: Iterable[Tensor], **settings: Any) -> None:
        self.inner = torch.optim.AdamW(parameters, **settings)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = self.inner.defaults

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()


class Adapted(nn.Module):
    """A linear layer that is frozen, and an adapter of rank 2 that is trained, as LoRA has it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 2, bias=False)
        self.up = nn.Linear(2, frozen.out_features, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.frozen(inputs) + self.up(self.down(inputs))
        return outputs


def engine_of(
    stage: int, mpu: Any, seed: int = 0, fused: bool = False, adapters: bool = False, **block: Any
) -> Any:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**ODD))
    if adapters:
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    client = (lambda parameters: AsFused(parameters, lr=0.01)) if fused else None
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        **block,
    }
    deepspeed.ops.__compatible_ops__ = {}  # none is compiled, nor is a compiler tried
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=client,
        config=config,
        mpu=mpu,
        dist_init_required=False,
    )
    return engine


def whole(engine: Any) -> Tensor:
    """All weights of the replica as they are computed with, fp32, flat."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([parameter.detach().float().flatten() for parameter in parameters]).clone()


def microbatch(engine: Any, draw: torch.Generator) -> None:
    tokens = torch.randint(64, (2, 16), generator=draw)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def train(rank: int, world_size: int, stage: int, block: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The first weights, those before and after each round; microbatches with a collective outside the replica."""
    engine = engine_of(stage, ReplicaGroups(REPLICAS), **block)
    noloco = attach(engine, SETTINGS, replicas=REPLICAS, seed=SEED)
    spy, draw = Spy(), torch.Generator().manual_seed(rank)
    spy.listen_to_torch()

    def step(number: int) -> None:
        spy.step = number
        microbatch(engine, draw)

    found = trained(noloco, step, partial(whole, engine), rounds)
    assert noloco.done == 2 * rounds
    own = range(rank - rank % SIZE, rank - rank % SIZE + SIZE)
    left = {call.step for call in spy.calls if call.peer is None and not set(call.ranks) <= set(own)}
    messages = sum(call.peer is not None and call.peer not in own for call in spy.calls)
    return found | {"left": left, "messages": messages}


def states(
    replica: int, rank: int, replicas: int | None, stage: int, there: dict[str, Any] | None = None
) -> list[Tensor]:
    """The weights after each microbatch, of a replica that is a job of its own, or of one job."""
    engine = engine_of(stage, ReplicaGroups(replicas) if replicas else None)
    noloco = attach(engine, SETTINGS, replicas=replicas, seed=SEED, **(there or {}))
    found, draw = [], torch.Generator().manual_seed(SIZE * replica + rank)
    while noloco.done < 6:
        microbatch(engine, draw)
        noloco.step()
        found.append(whole(engine))
    noloco.close()
    return found


def separate(slot: int, rank: int, folder: Path, stage: int) -> list[Tensor]:
    # A collective of the job is one of the replica: nothing is left to be checked but the weights.
    return states(slot, rank, None, stage, federation(folder, slot, REPLICAS))


def together(rank: int, world_size: int, stage: int) -> list[Tensor]:
    found = states(rank // SIZE, rank % SIZE, REPLICAS, stage)
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (1, "fp32"),
        (3, "fp32 adapters"),
        (0, "bf16 fused"),
        *(slow(stage, "bf16 adapters") for stage in (2, 3)),
        *(slow(stage, "fp32") for stage in (0, 2, 3)),
        *(slow(stage, "bf16") for stage in range(4)),
    ],
)
def test_rounds_are_those_of_the_method(stage: int, precision: str) -> None:
    """2 replicas of 2 data-parallel ranks; against the formula, on weights gathered from the engines."""
    block: dict[str, Any] = {"bf16": {"enabled": "bf16" in precision}}
    block |= {"fused": True} if "fused" in precision else {}
    if "adapters" in precision:  # some of whose weights ZeRO 3 divides, and some it keeps whole on every rank
        block |= {
            "adapters": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 80},
        }
    found = run_ranks(REPLICAS * SIZE, train, stage, block, 2)
    tolerance = {"rtol": 2**-7, "atol": 2e-4} if "bf16" in precision else {}
    assert_by_the_equations(found, SIZE, SEED, **tolerance)
    # ZeRO 3 compares the order of modules, which it records in the first passes, among all ranks of a job.
    assert all(one["left"] <= ({0, 1} if stage == 3 else set()) for one in found)
    assert all(one["messages"] for one in found)


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, slow(3)])
def test_separate_jobs_train_as_one_job_does(tmp_path: Path, stage: int) -> None:
    """To the last bit."""
    found = run_jobs(tmp_path, REPLICAS, SIZE, separate, tmp_path, stage)
    expected = run_ranks(REPLICAS * SIZE, together, stage)
    for slot in range(REPLICAS):
        for rank in range(SIZE):
            assert torch.equal(torch.stack(found[slot][rank]), torch.stack(expected[slot * SIZE + rank]))
    assert not torch.equal(found[0][0][1], found[1][0][1]), "each replica has data of its own"


def continued(rank: int, world_size: int, folder: Path, stage: int, bf16: bool) -> list[Tensor]:
    """The weights after six rounds, without and with a new engine after five steps. A replica has one rank."""

    def build(seed: int, state: dict[str, Tensor] | None = None) -> tuple[Any, Any]:
        engine = engine_of(stage, ReplicaGroups(world_size), seed, bf16={"enabled": bf16})
        if state is not None:
            engine.load_checkpoint(str(folder / f"replica_{rank}"), tag="five")
        return engine, attach(engine, SETTINGS, replicas=world_size, seed=SEED, state=state)

    found = []
    for stops in (False, True):
        engine, noloco = build(0)
        while noloco.done < 12:
            if stops and noloco.done == 5:
                engine.save_checkpoint(str(folder / f"replica_{rank}"), tag="five")
                state = {name: tensor.clone() for name, tensor in noloco.state_dict().items()}
                with pytest.raises(ValueError, match="load first, attach last"):
                    engine.load_checkpoint(str(folder / f"replica_{rank}"), tag="five")
                noloco.close()
                engine, noloco = build(9, state)
                stops = False
            for part in range(2):
                draw = torch.Generator().manual_seed(100 * noloco.done + 10 * rank + part)
                microbatch(engine, draw)
            noloco.step()
        found.append(whole(engine))
        noloco.close()
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("stage", "bf16"),
    [(1, True), *(slow(stage, True) for stage in (0, 2, 3)), *(slow(stage, False) for stage in range(4))],
)
def test_an_engine_continues_from_its_checkpoint(tmp_path: Path, stage: int, bf16: bool) -> None:
    """To the last bit; so the weights that a checkpoint brings back are those that the state was saved with."""
    for without, with_ in run_ranks(2, continued, tmp_path, stage, bf16):
        assert torch.equal(without, with_)


def taken_over(rank: int, world_size: int, stage: int, block: dict[str, Any]) -> None:
    engine = engine_of(stage, None, **block)
    draw = torch.Generator()

    def step(number: int) -> Tensor:
        for part in range(2):
            microbatch(engine, draw.manual_seed(100 * number + 10 * part + rank))
        return whole(engine)

    assert_inner_optimizer_is_handed_over(deepspeed_engine(engine), engine.optimizer, step)


@pytest.mark.parametrize(
    ("stage", "block"), [(0, {"bf16": {"enabled": True}}), (1, {}), slow(2, {}), (3, {})]
)
def test_inner_optimizer_continues_from_taken_state(stage: int, block: dict[str, Any]) -> None:
    run_ranks(2, taken_over, stage, block)


def refused(rank: int, world_size: int) -> str:
    engine = engine_of(1, ReplicaGroups(1))
    return refusal(lambda: attach(engine, SETTINGS, replicas=world_size))


def test_engine_summing_gradients_over_replicas_is_refused() -> None:
    _, found = run_ranks(2, refused)
    line = "rank 1: the gradient all-reduce of this model spans ranks [0, 1], its replica is [1]"
    assert found.startswith(line)


def with_experts(rank: int, world_size: int) -> list[str]:
    """Each rank is a replica; the job is one; each rank has an expert of its own."""
    deepspeed.ops.__compatible_ops__ = {}  # none is compiled, nor is a compiler tried
    found = []
    for replicas, ep_size in ((world_size, 1), (1, 1), (1, world_size)):
        model = MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=ep_size)
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={"train_micro_batch_size_per_gpu": 1},
            mpu=ReplicaGroups(replicas),
            dist_init_required=False,
        )
        found.append(refusal(partial(attach, engine, SETTINGS, replicas=replicas)))
    return found


def test_experts_whose_groups_leave_the_replica_are_refused() -> None:
    for rank, found in enumerate(run_ranks(2, with_experts)):
        assert found[0].startswith(
            f"attach: a group of DeepSpeed's experts spans ranks [0, 1], the data-parallel "
            f"group is [{rank}]; with experts each replica has to be a job of its own"
        ), found
        assert found[1] == "taken"
        assert found[2] == "attach: each rank has experts of its own; use zero_optimization.stage 1"
