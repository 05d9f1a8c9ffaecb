"""DeepSpeed's part of the file: an allow list of its keys that do something here, and the rules between them.

DeepSpeed ignores a key that it does not know, and has many that cannot do here what they promise. So every key
that is not a field below is refused.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, field_validator, model_validator

from megatron_noloco.config.optimizer_block import OPTIMIZERS, Offered, Optimizer, Schedule
from megatron_noloco.errors import UserError
from megatron_noloco.fields import NonNegative, Positive, Size, field
from megatron_noloco.model.architecture import Precision

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
AUTO = "auto"
_SPELLINGS = {name.lower(): name for name in OPTIMIZERS}  # DeepSpeed ignores their case

Dtype = Literal["fp32", "bf16", "fp16"]
# 5e8 is an integer to DeepSpeed, whose users write it so.
Whole = Annotated[int, BeforeValidator(lambda v: int(v) if isinstance(v, float) and v.is_integer() else v)]


class Bf16Config(Offered):
    enabled: bool = field(False, "Whether weights and activations are bf16, with fp32 master weights.")


class Fp16Config(Offered):
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

    def rules(self) -> Iterator[str]:
        if self.model_fields_set and "enabled" not in self.model_fields_set:
            yield "enabled is missing: without it the run is not fp16; set it to true or false"
        if self.loss_scale:
            for name in sorted(self.model_fields_set - {"enabled", "loss_scale"}):
                yield (
                    f"{name} has no effect beside the static fp16.loss_scale {self.loss_scale:g}; leave one of "
                    "them out"
                )


class DataTypesConfig(Offered):
    grad_accum_dtype: Dtype | None = field(
        None,
        "Type in which the gradients of microbatches are added up; null: fp32 with bf16, else that of the "
        "weights.",
    )


class ZeroConfig(Offered):
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


class Batch(NamedTuple):
    """Samples of a replica in a local step, samples of a microbatch, microbatches of a data-parallel rank."""

    samples: int
    micro: int
    steps: int


class DeepSpeedConfig(Offered):
    """Top-level keys of DeepSpeed that do something here. A replica is a whole DeepSpeed world. "auto" stands for
    the default, but for 1.0 in gradient_clipping; "enabled" must be true or false. At most one of bf16 and fp16
    may be enabled; with neither, the run is fp32.
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
    optimizer: Optimizer = field(..., 'such as {"type": "AdamW", "params": {"lr": 3e-4}}')
    scheduler: Schedule | None = field(None, "Without a scheduler the rate stays.")
    gradient_clipping: Size | Literal["auto"] = field(
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

    @model_validator(mode="before")
    @classmethod
    def _in_one_spelling(cls, given: Any) -> Any:
        """Return the file in one spelling of DeepSpeed's names, with "auto" and null left out."""
        if not isinstance(given, dict):
            return given
        values = {name: value for name, value in given.items() if name != "$schema"}
        if isinstance(zero := values.get("zero_optimization"), bool):
            values["zero_optimization"] = {"stage": int(zero)}
        if "bfloat16" in values and "bf16" not in values:
            values["bf16"] = values.pop("bfloat16")
        optimizer = values.get("optimizer")
        if isinstance(optimizer, dict) and isinstance(kind := optimizer.get("type"), str):
            values["optimizer"] = {**optimizer, "type": _SPELLINGS.get(kind.lower(), kind)}
        for name in DeepSpeedConfig.model_fields.keys() & values.keys() - {"gradient_clipping"}:
            if values[name] in (AUTO, None):
                del values[name]
            elif isinstance(values[name], dict):
                values[name] = _without_auto(values[name])
        return values

    def batch_of(self, dp_size: int) -> Batch:
        """Apply DeepSpeed's rule to one replica: train_batch_size = micro batch x accumulation steps x dp.

        Raises UserError for numbers that do not fit.
        """
        given = {name: getattr(self, name) for name in (MICRO, STEPS, TRAIN)}
        found = {name: number for name, number in given.items() if number is not None}
        if TRAIN not in found and MICRO not in found:
            raise UserError(f"{MICRO} or {TRAIN} is missing (samples per replica; one of them is needed)")
        if len(found) == 1:  # as DeepSpeed does
            found[STEPS] = 1
        if TRAIN not in found:
            found[TRAIN] = found[MICRO] * found[STEPS] * dp_size
        for missing, other in ((MICRO, STEPS), (STEPS, MICRO)):
            if missing not in found:
                parts = found[other] * dp_size
                if found[TRAIN] % parts:
                    raise UserError(
                        f"{TRAIN} {found[TRAIN]} does not divide by {other} {found[other]} x "
                        f"parallel.data_parallel_size {dp_size} = {parts} (per replica), so there is no {missing}"
                    )
                found[missing] = found[TRAIN] // parts
        product = found[MICRO] * found[STEPS] * dp_size
        if product != found[TRAIN]:
            raise UserError(
                f"{TRAIN} {found[TRAIN]} is not {MICRO} {found[MICRO]} x {STEPS} {found[STEPS]} x "
                f"parallel.data_parallel_size {dp_size} = {product} (per replica)"
            )
        return Batch(found[TRAIN], found[MICRO], found[STEPS])

    @property
    def precision(self) -> Precision:
        """Return the numbers in which the model is computed."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def zero_stage(self) -> int:
        """Return DeepSpeed's stage of ZeRO, 1 or 2.

        Not 0: without their own backward pass, DeepSpeed's stage-0 optimizers clip by a wrong norm (fp32) or take
        a step in their constructor (bf16, fp16).
        """
        return self.zero_optimization.stage or 1


def _without_auto(block: dict[str, Any]) -> dict[str, Any]:
    """Leave out what stands for a default; for `enabled` it would be False, which nobody means by "auto"."""
    unset = {name for name, value in block.items() if value is None or (value == AUTO and name != "enabled")}
    return {name: value for name, value in block.items() if name not in unset}
