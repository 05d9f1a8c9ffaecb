"""DeepSpeed's part of the file: an allow list of its keys that do something here, and the rules between them.

DeepSpeed ignores a key that it does not know, and has many that cannot do here what they promise. So every key
that is not a field below is refused.
"""

import copy
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator

from megatron_noloco.config import optimizer_block
from megatron_noloco.config.blocks import Block, NonNegative, Positive, Size, field
from megatron_noloco.config.optimizer_block import OPTIMIZERS, SCHEDULES
from megatron_noloco.config.wording import unknown_key, unknown_type
from megatron_noloco.errors import UserError
from megatron_noloco.fields import Also, problems_of

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
AUTO = "auto"
_SPELLINGS = {name.lower(): name for name in OPTIMIZERS}  # DeepSpeed ignores their case

Dtype = Literal["fp32", "bf16", "fp16"]
# 5e8 is an integer to DeepSpeed, whose users write it so.
Whole = Annotated[int, BeforeValidator(lambda v: int(v) if isinstance(v, float) and v.is_integer() else v)]


class Bf16Config(Block):
    enabled: bool = field(False, "Whether weights and activations are bf16, with fp32 master weights.")


class Fp16Config(Block):
    enabled: bool = field(False, "Whether weights and activations are fp16, with fp32 master weights.")
    loss_scale: Size = field(0.0, "Factor of the loss; 0: dynamic, which does not go together with routing.")
    initial_scale_power: Annotated[Whole, Field(ge=0)] = field(
        16, "A dynamic loss scale begins with 2 to this power."
    )
    loss_scale_window: Annotated[Whole, Field(ge=1)] = field(
        1000, "Local steps without an overflow after which the scale doubles."
    )
    hysteresis: Annotated[Whole, Field(ge=1)] = field(2, "Overflows after which the scale is halved.")
    consecutive_hysteresis: bool = field(
        False, "Whether a step without an overflow starts the count of hysteresis anew."
    )
    min_loss_scale: Annotated[Whole, Field(ge=1)] = field(1, "Lowest scale.")


class DataTypesConfig(Block):
    grad_accum_dtype: Dtype | None = field(
        None,
        "Type in which the gradients of microbatches are added up; null: fp32 with bf16, else that of the "
        "weights.",
    )


class ZeroConfig(Block):
    stage: NonNegative = field(
        1,
        "1: the optimizer's state is divided over the data-parallel ranks of a replica. 2: gradients are divided, "
        "too, and reduced after each microbatch; needs pipeline and tensor parallel sizes of 1. 0 is run as 1, "
        "which gives the same numbers.",
    )
    reduce_bucket_size: Annotated[Whole, Field(ge=1)] = field(
        500_000_000, "Number of gradients that are reduced at a time."
    )
    allgather_bucket_size: Annotated[Whole, Field(ge=0, multiple_of=2)] = field(
        500_000_000, "Number of weights that are gathered at a time."
    )
    reduce_scatter: bool = field(True, "Whether each rank is sent its own gradients only.")
    use_multi_rank_bucket_allreduce: bool = field(
        True, "With reduce_scatter: one all-reduce for the gradients of several ranks."
    )
    contiguous_gradients: bool = field(
        True, "Whether gradients are copied to one buffer before they are reduced."
    )

    @field_validator("stage")
    @classmethod
    def _is_run(cls, stage: int) -> int:
        if stage > 2:
            raise UserError(
                f"{stage} is not supported, use 0, 1 or 2: 3 needs DeepSpeed's own forward and backward, and "
                "Megatron-core's schedule runs them outside of DeepSpeed; attach has 3 (docs/library.md)"
            )
        return stage


class OptimizerConfig(Block):
    type: str = field(..., f"{', '.join(OPTIMIZERS)}.")
    params: dict[str, Any] = field({}, "See below.")


class SchedulerConfig(Block):
    type: str = field(..., f"{', '.join(SCHEDULES)}; without a scheduler the rate stays.")
    params: dict[str, Any] = field({}, "See below.")


class DeepSpeedConfig(Block):
    """Top-level keys of DeepSpeed that do something here. A replica is a whole DeepSpeed world. "auto" stands for
    the default, but for 1.0 in gradient_clipping. At most one of bf16 and fp16 may be enabled; with neither, the
    run is fp32.
    """

    train_batch_size: Positive | None = field(
        None,
        "Samples of ONE replica in a local step: train_micro_batch_size_per_gpu x "
        "gradient_accumulation_steps x parallel.data_parallel_size. Any one of the three may be missing.",
    )
    train_micro_batch_size_per_gpu: Positive | None = field(None, "Samples in a microbatch.")
    gradient_accumulation_steps: Positive | None = field(
        None, "Microbatches of a data-parallel rank in a local step."
    )
    optimizer: OptimizerConfig = field(..., 'such as {"type": "AdamW", "params": {"lr": 3e-4}}')
    scheduler: SchedulerConfig | None = None
    gradient_clipping: Annotated[Size, Also(AUTO)] = field(
        0.0, 'Largest norm of a replica\'s gradient; 0: any, "auto": 1.'
    )
    bf16: Bf16Config = Bf16Config()
    fp16: Fp16Config = Fp16Config()
    data_types: DataTypesConfig = DataTypesConfig()
    communication_data_type: Dtype | None = field(
        None,
        "Type in which gradients are reduced over the data-parallel ranks of a replica; null: fp32 where "
        "they are added up in fp32, else that of the weights.",
    )
    zero_optimization: ZeroConfig = ZeroConfig()
    zero_allow_untested_optimizer: bool = field(
        False, "DeepSpeed requires true for Muon and SGD; it is then set to true."
    )


def prepared(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the file in one spelling of DeepSpeed's names, with "auto" and null left out."""
    values = copy.deepcopy(raw)
    if isinstance(values.get("zero_optimization"), bool):
        values["zero_optimization"] = {"stage": int(values["zero_optimization"])}
    if "bfloat16" in values and "bf16" not in values:
        values["bf16"] = values.pop("bfloat16")
    if isinstance(optimizer := values.get("optimizer"), dict) and isinstance(optimizer.get("type"), str):
        optimizer["type"] = _SPELLINGS.get(optimizer["type"].lower(), optimizer["type"])
    if values.get("gradient_clipping") == AUTO:
        values["gradient_clipping"] = 1.0
    for key in DeepSpeedConfig.model_fields.keys() & values.keys():
        if values[key] in (AUTO, None):
            del values[key]
        elif isinstance(values[key], dict):
            if values[key].get("enabled") == AUTO:
                values[key]["enabled"] = False
            values[key] = {name: value for name, value in values[key].items() if value not in (AUTO, None)}
    return values


def accepted(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration saved by an earlier version without the unknown keys of DeepSpeed's blocks.

    The optimizer is replaced, and the loss scale left out: also a checkpoint of settings that are no longer
    accepted can be exported.
    """
    kept = {key: value for key, value in saved.items() if key != "scheduler"}
    for name, definition in DeepSpeedConfig.model_fields.items():
        if name in kept and isinstance(definition.default, Block):
            known = type(definition.default).model_fields
            kept[name] = {key: value for key, value in kept[name].items() if key in known}
    if "fp16" in kept:
        kept["fp16"] = {"enabled": kept["fp16"].get("enabled", False)}
    return kept | {"optimizer": {"type": "AdamW"}}


def check_params(values: dict[str, Any]) -> Iterator[str]:
    """Check the params of optimizer and scheduler, where the blocks have the form {type, params}."""
    for block, kinds in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULES)):
        chosen = values.get(block)
        if not isinstance(chosen, dict) or not isinstance(name := chosen.get("type"), str):
            continue
        if (kind := kinds.get(name)) is None:
            yield unknown_type(block, name, kinds)
        elif isinstance(params := chosen.get("params", {}), dict):
            try:
                kind.model_validate(params)
            except ValidationError as error:
                yield from problems_of(error, kind, (block, "params"), unknown_key)


def resolve(values: dict[str, Any], dp_size: int, train_iters: int) -> tuple[dict[str, Any], list[str]]:
    """Return what DeepSpeed is given, and what the rules between its keys refuse.

    Args:
        values: DeepSpeed's keys of a file that has passed the checks of types and bounds.
        dp_size: DeepSpeed's world size, since a replica is a whole DeepSpeed world.
        train_iters: local steps of the run.
    """
    problems = [*optimizer_block.check_optimizer(values["optimizer"]), *_check_precision(values)]
    given = values.get("scheduler", {}).get("params", {}).get("total_num_steps")
    optimizer_block.complete(values, train_iters)
    optimizer, scheduler = values["optimizer"], values.get("scheduler")
    if scheduler is not None:
        problems += optimizer_block.check_schedule(optimizer, scheduler, is_auto=given == AUTO)
    zero = values.setdefault("zero_optimization", {})
    zero["stage"] = zero.get("stage") or 1  # why not 0: `deepspeed_settings` in engine/
    return values, [*problems, *_batch(values, dp_size)]


def _check_precision(values: dict[str, Any]) -> Iterator[str]:
    """Refuse two precisions, and settings of a precision or of a loss scale that the run does not have."""
    bf16, fp16 = values.get("bf16", {}), values.get("fp16", {})
    if bf16.get("enabled") and fp16.get("enabled"):
        yield "bf16 and fp16 are both enabled; choose one of them"
    if fp16 and "enabled" not in fp16:
        yield "fp16.enabled is missing: without it the run is not fp16; set it to true or false"
    if scale := fp16.get("loss_scale"):
        for name in fp16.keys() - {"enabled", "loss_scale"}:
            yield f"fp16.{name} has no effect beside the static fp16.loss_scale {scale:g}; leave one of them out"


def _batch(values: dict[str, Any], dp_size: int) -> Iterator[str]:
    """Apply DeepSpeed's rule to one replica: train_batch_size = micro batch x accumulation steps x dp."""
    given = {key: values[key] for key in (TRAIN, MICRO, STEPS) if values.get(key) is not None}
    if TRAIN not in given and MICRO not in given:
        yield f"{MICRO} or {TRAIN} is missing (samples per replica; one of them is needed)"
        return
    if len(given) == 1:  # as DeepSpeed does
        given[STEPS] = 1
    if TRAIN not in given:
        given[TRAIN] = given[MICRO] * given[STEPS] * dp_size
    for missing, other in ((MICRO, STEPS), (STEPS, MICRO)):
        if missing not in given:
            parts = given[other] * dp_size
            if given[TRAIN] % parts:
                yield (
                    f"{TRAIN} {given[TRAIN]} does not divide by {other} {given[other]} x "
                    f"parallel.data_parallel_size {dp_size} = {parts} (per replica), so there is no {missing}"
                )
                return
            given[missing] = given[TRAIN] // parts
    product = given[MICRO] * given[STEPS] * dp_size
    if product != given[TRAIN]:
        yield (
            f"{TRAIN} {given[TRAIN]} is not {MICRO} {given[MICRO]} x {STEPS} {given[STEPS]} x "
            f"parallel.data_parallel_size {dp_size} = {product} (per replica)"
        )
    values.update(given)
