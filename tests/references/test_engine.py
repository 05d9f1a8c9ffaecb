"""The engine against plain torch. tests/layouts compares it with itself."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import Tensor

from megatron_noloco.config.deepspeed_block import Bf16Config, DeepSpeedConfig, Fp16Config, ZeroConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.config.optimizer_block import OPTIMIZERS, SCHEDULES
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.engine.schedules import RatioLR
from megatron_noloco.fields import Settings
from megatron_noloco.plans.routing import Routing
from tests.kit.configs import SMALLEST
from tests.kit.ranks import run_ranks, slow
from tests.kit.tiny import (
    BF16,
    MUON,
    Recorded,
    build,
    initial_weights,
    microbatch,
    sizes,
    tiny,
    train,
    weights_of,
)

STEPS = 5


def run(changes: dict[str, Any] | None = None, ranks: int = 1, steps: int = STEPS) -> list[dict[str, Any]]:
    return run_ranks(ranks, train, tiny(changes), steps)


# Against plain torch


def plain_torch(rank: int, world_size: int, raw: dict[str, Any], rates: list[float]) -> dict[str, Tensor]:
    """AdamW and clip_grad_norm_ on the same module, with autograd alone."""
    config, groups, stage = build(raw, world_size)
    given = config.as_deepspeed()["optimizer"]["params"].items()
    params = {key: value for key, value in given if key not in ("lr", "adam_w_mode")}
    weights = list(stage.parameters())
    groups_of_parameters = [
        {"params": [weight for weight in weights if weight.dim() > 1]},
        {"params": [weight for weight in weights if weight.dim() == 1], "weight_decay": 0},
    ]
    optimizer = getattr(torch.optim, config.as_deepspeed()["optimizer"]["type"])(
        groups_of_parameters, **params
    )
    for step, rate in enumerate(rates):
        for index in range(config.microbatches):
            tokens, labels, _ = microbatch(config, groups, step, 0, index)
            loss = stage.chunks[0](tokens, None, None, labels=labels).float().mean()
            (loss / config.microbatches).backward()
        if clipping := config.as_deepspeed()["gradient_clipping"]:
            torch.nn.utils.clip_grad_norm_(stage.parameters(), clipping)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(stage)


def distance_from_plain_torch(changes: dict[str, Any]) -> float:
    (found,) = run(changes)
    (expected,) = run_ranks(1, plain_torch, tiny(changes), found["learning_rates"])
    assert found["weights"].keys() == expected.keys()
    assert not any(torch.equal(expected[name], found["start"][name]) for name in expected), "all have moved"
    return max(float((found["weights"][name] - expected[name]).abs().max()) for name in expected)


RATES: dict[str, tuple[dict[str, float], list[float]]] = {
    "WarmupLR": ({"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 3}, []),
    "WarmupDecayLR": ({"total_num_steps": 6, "warmup_max_lr": 0.01, "warmup_num_steps": 3}, []),
    "WarmupCosineLR": ({"total_num_steps": 6, "warmup_num_steps": 2}, []),
    "WSD": (
        {"total_num_steps": 5, "warmup_num_steps": 3, "decay_num_steps": 2},
        [0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.005, 0.0],
    ),
}


def rates_of_all_schedules(rank: int, world_size: int) -> dict[str, list[float]]:
    found = {}
    for name, (params, _) in RATES.items():
        raw = tiny({"scheduler": None, "model": {"num_layers": 1}})
        found[name] = train(rank, world_size, raw | {"scheduler": {"type": name, "params": params}}, 6)
    return {name: one["learning_rates"] for name, one in found.items()}


def test_every_schedule_moves_the_learning_rate() -> None:
    (found,) = run_ranks(1, rates_of_all_schedules)
    assert found.keys() == set(SCHEDULES)
    for name, (_, expected) in RATES.items():
        assert len(set(found[name])) > 2, name
        assert not expected or found[name] == pytest.approx(expected), name


EQUAL: dict[str, dict[str, Any]] = {
    "AdamW": {},
    # Without weight decay on norms and on biases
    "AdamW of a qwen2": {"model": {"family": "qwen2"}},
    "SGD": {
        "optimizer": {
            "type": "SGD",
            "params": {"betas": None, "eps": None, "momentum": 0.9, "nesterov": True},
        }
    },
}


@pytest.mark.parametrize("name", EQUAL)
def test_equals_plain_torch_exactly(name: str) -> None:
    assert distance_from_plain_torch({"gradient_clipping": 0.0, **EQUAL[name]}) == 0.0


def test_equals_plain_adamw_with_clipping() -> None:
    """Not bitwise: DeepSpeed divides by (norm + 1e-6) / clip where torch multiplies by clip / (norm + 1e-6)."""
    assert min(run()[0]["grad_norms"]) > 0.5, "every step is clipped"
    assert distance_from_plain_torch({}) < 1e-6


# Weights at the start


def test_replicas_start_from_equal_weights() -> None:
    """tests/layouts compares those of all layouts of one replica."""
    first, *others = run_ranks(2, initial_weights, tiny({"parallel": {"replicas": 2}}))
    assert all(torch.equal(other[name], weight) for other in others for name, weight in first.items())


def test_every_matrix_starts_from_numbers_of_its_own() -> None:
    (whole,) = run_ranks(1, initial_weights, tiny())
    matrices = [weight for weight in whole.values() if weight.dim() == 2]
    assert len({weight.flatten()[0].item() for weight in matrices}) == len(matrices) > 10


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="this CPU has no fp16 arithmetic"
)
def test_fp16_while_a_dynamic_scale_grows() -> None:
    """It doubles in every step: each gradient is divided by the scale that its loss had."""
    sgd = {"type": "SGD", "params": {"lr": 1.0, "betas": None, "eps": None, "weight_decay": None}}
    plain = {"optimizer": sgd, "scheduler": None, "gradient_clipping": 1000}
    growing = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    found = run({"fp16": growing, **plain})
    expected = run({"fp16": {"enabled": True, "loss_scale": 16}, **plain})
    before, after = (torch.tensor(one[0]["losses"]).mean(dim=1) for one in (expected, found))
    assert before[-1] < before[0] - 0.2
    torch.testing.assert_close(after, before, rtol=0, atol=0.01)


# Gradients that are not finite


def poisoned_run(
    rank: int, world_size: int, raw: dict[str, Any], poison: float
) -> tuple[list[bool], dict[str, list[float]]]:
    """Three steps, and one gradient of the last rank poisoned in the second.

    Returns for each step whether the state changed, and what was recorded.
    """
    config, groups, stage = build(raw, world_size)
    recorded = Recorded()
    engine = ReplicaEngine(stage, groups, config.as_deepspeed(), recorded)
    gradients, step = engine._gradients, 0
    complete = gradients.complete

    def poisoned() -> None:
        complete()
        if step == 1 and rank == world_size - 1:
            gradients.gradient_of(list(stage.parameters())[-1]).view(-1)[0] = poison

    gradients.complete = poisoned  # type: ignore[method-assign]
    routes = Routing(groups.topology.replicas, config.microbatches, 0, "off").straight()
    changed, before = [], [torch.zeros(1)]
    for step in range(3):  # read above
        engine.train_batch(
            lambda replica, index, step=step: microbatch(config, groups, step, replica, index), routes
        )
        after = [tensor.clone() for tensor in (*weights_of(stage).values(), *engine.tensors().values())]
        changed.append(len(before) != len(after) or not all(map(torch.equal, before, after)))
        before = after
    return changed, dict(recorded)


@pytest.mark.parametrize(
    ("changes", "poison"),
    [
        slow({}, math.nan),
        (BF16, math.inf),
        slow({**BF16, "data_types": {"grad_accum_dtype": "bf16"}}, math.nan),
        ({**MUON, "gradient_clipping": 0.0}, -math.inf),
    ],
    ids=["fp32", "bf16", "bf16 accumulated in bf16", "Muon"],
)
def test_a_step_whose_gradient_is_not_finite_changes_nothing(changes: dict[str, Any], poison: float) -> None:
    """On any rank of the replica, and it is counted. The schedule does not go on either."""
    raw = tiny({"parallel": sizes(dp=2, pp=2), **changes})
    for changed, recorded in run_ranks(4, poisoned_run, raw, poison):
        assert changed == [True, False, True]
        assert recorded["train/skipped_steps"] == [0, 1, 0]
        assert [math.isinf(norm) for norm in recorded["train/grad_norm"]] == [False, True, False]
        assert recorded["train/learning_rate"][1] == recorded["train/learning_rate"][2]


def lost_steps(rank: int, world_size: int, scale: float) -> list[bool]:
    """Whether each of five steps without a finite gradient was lost, with fp16's scaler and lowest scale 1."""
    config, groups, stage = build(tiny(), world_size)
    engine = ReplicaEngine(stage, groups, config.as_deepspeed())
    raises = engine._optimizer.loss_scaler.raise_error_at_min_scale
    engine._optimizer.loss_scaler = DynamicLossScaler(scale, 1000, 1.0, 2, False, raises)
    next(stage.parameters()).data.fill_(math.nan)
    routes = Routing(groups.topology.replicas, config.microbatches, 0, "off").straight()
    lost = []
    for step in range(5):
        engine.train_batch(
            lambda replica, index, step=step: microbatch(config, groups, step, replica, index), routes
        )
        lost.append(engine.lost_step)
    return lost


@pytest.mark.parametrize(("scale", "lost"), [(4.0, [False] * 3 + [True] * 2), (1.0, [True] * 5)])
def test_steps_that_lower_the_scale_of_fp16_are_not_lost(scale: float, lost: list[bool]) -> None:
    """With a hysteresis of 2 the second overflow does. At the lowest scale a step is lost; nothing is raised."""
    assert run_ranks(1, lost_steps, scale) == [lost]


# Master and working weights


def write_and_refresh(rank: int, world_size: int, raw: dict[str, Any]) -> bool:
    """Doubles the master weights; returns whether all working weights followed."""
    config, groups, stage = build(raw, world_size)
    engine = ReplicaEngine(stage, groups, config.as_deepspeed())
    before = weights_of(stage)
    with engine.weights.writing() as write:
        write(0, 2 * engine.weights.read())
    after = weights_of(stage)
    dist.barrier()
    return all(torch.equal(after[name], 2 * before[name]) for name in before)


def test_working_weights_follow_the_master_weights_over_dp() -> None:
    raw = tiny({"parallel": sizes(dp=2, pp=2), **BF16})
    assert run_ranks(4, write_and_refresh, raw) == [True] * 4


# Defaults


def settings_of_engine(rank: int, world_size: int, raw: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed, its optimizer and schedule, and Megatron-core run with, by the names of config files."""
    config, groups, stage = build(raw, world_size)
    deepspeed = ReplicaEngine(stage, groups, config.as_deepspeed())._deepspeed
    read, group, core = deepspeed._config, deepspeed.optimizer.param_groups[0], stage.config
    schedule = deepspeed.lr_scheduler
    of_blocks = {
        "bf16": read.bfloat16_config,
        "fp16": read.float16_config,
        "zero_optimization": read.zero_config,
        "optimizer": SimpleNamespace(**group, adam_w_mode=group.get("decoupled_weight_decay")),
        "scheduler": schedule._schedule if isinstance(schedule, RatioLR) else schedule,
    }
    found = {
        "gradient_clipping": deepspeed.gradient_clipping(),
        "zero_allow_untested_optimizer": read.zero_allow_untested_optimizer,
        "optimizer.lr": next(getattr(schedule, name)[0] for name in PEAKS if hasattr(schedule, name)),
        "scheduler.warmup_min_lr": getattr(schedule, "min_lrs", [None])[0],
        "model.norm_epsilon": core.layernorm_epsilon,
        "model.rotary_base": stage.chunks[0].rotary_base,
        "model.untie_embeddings_and_output_weights": stage.tied_weight is None,
        **{f"model.{name}": getattr(core, name) for name in ModelConfig.model_fields if hasattr(core, name)},
    }
    for block, kind in BLOCKS_OF_ENGINE.items():
        for name in kind(raw).model_fields:
            if (value := getattr(of_blocks[block], name, None)) is not None:
                found.setdefault(f"{block}.{name}", list(value) if isinstance(value, tuple) else value)
    return found


PEAKS = ("org_lrs", "max_lrs", "_peaks")  # of schedules: the rates of all parameter groups
BLOCKS_OF_ENGINE: dict[str, Callable[[dict[str, Any]], type[Settings]]] = {
    "bf16": lambda raw: Bf16Config,
    "fp16": lambda raw: Fp16Config,
    "zero_optimization": lambda raw: ZeroConfig,
    "optimizer": lambda raw: OPTIMIZERS[raw["optimizer"]["type"]],
    "scheduler": lambda raw: SCHEDULES[raw["scheduler"]["type"]],
}
# Not an attribute of the engine under its name, or no value that runs.
ELSEWHERE = {
    "model.family": "the model's table of parameters",
    "model.make_vocab_size_divisible_by": "the rows of the embedding",
    "model.transformer_impl": "what is installed",
    "model.z_loss_coeff": "the loss of the last stage",
    "optimizer.adam_lr": "another parameter group",
    "optimizer.muon_lr": "the first group, before the schedule",
    "optimizer.ns_method": "Muon itself",
    "zero_optimization.reduce_bucket_size": "at most the weights",
    "scheduler.warmup_num_steps": "DeepSpeed takes 1 as 2, and the file gives it",
}


@pytest.mark.parametrize(
    ("optimizer", "schedule", "params"),
    [
        ("AdamW", "WSD", {"total_num_steps": 9, "decay_num_steps": 2}),
        ("Adam", "WarmupLR", {}),
        ("SGD", "WarmupDecayLR", {"total_num_steps": 2000}),
        ("Muon", "WarmupCosineLR", {"total_num_steps": 2000}),
    ],
)
def test_a_default_is_the_value_that_runs(optimizer: str, schedule: str, params: dict[str, Any]) -> None:
    """All fields of DeepSpeed and of the model that have a default, with nothing but what a file must give."""
    raw = SMALLEST | {
        "optimizer": {"type": optimizer},
        "scheduler": {"type": schedule, "params": params},
        "data": {"text": "python-stdlib"},
    }
    (found,) = run_ranks(1, settings_of_engine, raw)
    blocks = {block: kind(raw) for block, kind in BLOCKS_OF_ENGINE.items()} | {"model": ModelConfig}
    defaults = {"gradient_clipping": DeepSpeedConfig.model_fields["gradient_clipping"].default}
    for block, kind in blocks.items():
        fields = kind.model_fields.items()
        defaults |= {f"{block}.{name}": one.default for name, one in fields if not one.is_required()}
    expected = {
        name: value for name, value in defaults.items() if value is not None and name not in ELSEWHERE
    }
    assert {name: found.get(name) for name in expected} == expected
