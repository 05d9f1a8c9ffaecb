"""The blocks `optimizer` and `scheduler`: the params of each type, and the rules between them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_noloco.config.blocks import Block, NonNegative, Positive
from megatron_noloco.config.wording import Problem
from megatron_noloco.engine.schedules import SCHEDULES as OURS
from megatron_noloco.engine.schedules import WSD, DecayType, InverseSquareRoot

Size = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[list[Momentum], Field(min_length=2, max_length=2)]
TotalSteps = Positive | Literal["auto"]

_PEAK = "Peak learning rate."
_BETAS = "Decay rates of the first and the second moment."
_EPS = "Added to the root of the second moment."
_MOMENTUM = "Share of the momentum that stays."


class OptimizerParams(Block):
    """What every optimizer takes."""

    weight_decay: Size = Field(
        default=0.0,
        description="Of all weights but norms and biases; 0 unless it is given, whatever the type.",
    )
    decoupled_lr: Size | None = Field(
        default=None, description="Learning rate of embedding and output layer; null: that of the others."
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="How weight decay changes; other than constant it goes from start_weight_decay to "
        "end_weight_decay, which take the place of weight_decay.",
    )
    start_weight_decay: Size | None = Field(default=None, description="Weight decay of the first local step.")
    end_weight_decay: Size | None = Field(
        default=None, description="Weight decay after weight_decay_incr_steps."
    )
    weight_decay_incr_steps: Positive | None = Field(
        default=None, description="Local steps that the change takes; null: training.train_iters."
    )


class AdamParams(OptimizerParams):
    """DeepSpeed's fused kernel on a GPU where it can be had, else torch's."""

    lr: Size = Field(default=1e-3, description=_PEAK)
    betas: Betas = Field(default=[0.9, 0.999], description=_BETAS)
    eps: Size = Field(default=1e-8, description=_EPS)
    amsgrad: bool = Field(default=False, description="Whether to divide by the largest second moment so far.")
    adam_w_mode: bool = Field(
        default=True, description='With "Adam": whether weight decay is decoupled, as in AdamW.'
    )
    torch_adam: bool | None = Field(
        default=None,
        description="Whether torch's kernel is used; null: only where DeepSpeed's cannot be had.",
    )
    fused: bool | None = Field(default=None, description="With torch_adam: torch's fused kernel.")


class MuonParams(OptimizerParams):
    """Muon for the linear maps of the layers, AdamW for all other weights."""

    lr: Size | None = Field(default=None, description="Stands for both rates.")
    muon_lr: Size = Field(default=0.02, description="Peak learning rate of Muon.")
    adam_lr: Size = Field(
        default=3e-4, description="Peak learning rate of AdamW, which all other weights have."
    )
    momentum: Momentum = Field(default=0.95, description="Nesterov momentum of Muon.")
    ns_method: Literal["gram", "standard"] = Field(
        default="gram", description="DeepSpeed's Newton-Schulz kernel."
    )
    betas: Betas = Field(default=[0.9, 0.95], description=_BETAS)
    eps: Size = Field(default=1e-10, description=_EPS)


class LionParams(OptimizerParams):
    """DeepSpeed's Lion, which needs a GPU."""

    lr: Size = Field(default=1e-3, description=_PEAK)
    betas: Betas = Field(
        default=[0.9, 0.999], description="Decay rates of the direction and of the momentum."
    )


class SgdParams(OptimizerParams):
    """Torch's SGD."""

    lr: Size = Field(default=1e-3, description=_PEAK)
    momentum: Momentum = Field(default=0.0, description=_MOMENTUM)
    dampening: Momentum = Field(
        default=0.0, description="Share of the gradient that is left out of the momentum."
    )
    nesterov: bool = Field(default=False, description="Whether the momentum is Nesterov's.")


# Only optimizers that treat every weight by itself: ZeRO keeps the weights of a stage in flat vectors, where Lamb
# or Adafactor would not find their tensors. Muon finds them by itself (engine/muon.py).
OPTIMIZERS: dict[str, type[OptimizerParams]] = {
    "AdamW": AdamParams,
    "Adam": AdamParams,
    "Muon": MuonParams,
    "Lion": LionParams,
    "SGD": SgdParams,
}
_WARM_UP = "The first local steps, in which the rate rises."
_WARM_UP_TYPE = "How it rises."


class WarmupParams(Block):
    """A warm-up, then the peak; one rate for all weights."""

    warmup_min_lr: Size = Field(default=0.0, description="Lowest rate.")
    warmup_max_lr: Size | None = Field(default=None, description="Peak; null: that of the optimizer.")
    warmup_num_steps: Positive = Field(default=1000, description=_WARM_UP)
    warmup_type: Literal["log", "linear"] = Field(default="log", description=_WARM_UP_TYPE)


class WarmupDecayParams(WarmupParams):
    """A warm-up, then a linear decay; one rate for all weights."""

    total_num_steps: TotalSteps = Field(
        description='Local steps until the rate is lowest; "auto": training.train_iters.'
    )
    warmup_max_lr: Size = Field(default=1e-3, description="Peak.")


class WarmupCosineParams(Block):
    """A warm-up, then half a cosine; it scales the optimizer's rates."""

    total_num_steps: TotalSteps = Field(
        description='Local steps until the rate is lowest; "auto": training.train_iters.'
    )
    warmup_min_ratio: Share = Field(default=0.0, description="Rate of the first local step, to the peak.")
    warmup_num_steps: Positive = Field(default=1000, description=_WARM_UP)
    warmup_type: Literal["log", "linear"] = Field(default="log", description=_WARM_UP_TYPE)
    cos_min_ratio: Share = Field(default=1e-4, description="Lowest rate, to the peak.")


class WsdParams(Block):
    """A linear warm-up, the peak, and a decay at the end; it scales the optimizer's rates."""

    total_num_steps: TotalSteps = Field(description='Local steps of the run; "auto": training.train_iters.')
    decay_num_steps: Positive = Field(description="The last of them, in which the rate decays.")
    warmup_num_steps: NonNegative = Field(default=WSD.warmup_num_steps, description=_WARM_UP)
    decay_type: DecayType = Field(
        default=WSD.decay_type, description='How it decays; "1-sqrt" is 1 - sqrt(x) for x from 0 to 1.'
    )
    min_ratio: Share = Field(default=WSD.min_ratio, description="Rate at the end of the decay, to the peak.")


class InverseSquareRootParams(Block):
    """A linear warm-up of W steps, then sqrt(W / n) of the peak at step n; it scales the optimizer's rates."""

    warmup_num_steps: NonNegative = Field(description=_WARM_UP)
    min_ratio: Share = Field(default=InverseSquareRoot.min_ratio, description="Lowest rate, to the peak.")


# Torch's schedules are no choice: they do not accept the optimizer that ZeRO wraps.
SCHEDULES: dict[str, type[Block]] = {
    "WSD": WsdParams,
    "InverseSquareRoot": InverseSquareRootParams,
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
}


def is_muon(optimizer: Mapping[str, Any]) -> bool:
    """Whether a block `optimizer` names Muon."""
    return str(optimizer.get("type")).lower() == "muon"


def complete(values: dict[str, Any], train_iters: int) -> None:
    """Complete the blocks `optimizer` and `scheduler`, which have passed their checks."""
    for block in ("optimizer", "scheduler"):
        if block in values:
            given = values[block].get("params", {})
            values[block]["params"] = {key: value for key, value in given.items() if value is not None}
            if given.get("total_num_steps") == "auto":
                values[block]["params"]["total_num_steps"] = train_iters
    optimizer = values["optimizer"]
    params = optimizer["params"]
    if params.get("weight_decay_incr_style", "constant") == "constant":  # Megatron's default
        params.pop("weight_decay_incr_style", None)
        params.setdefault("weight_decay", 0.0)  # as in DeepSpeed's own; torch's AdamW would take 0.01
    else:
        params.setdefault("weight_decay_incr_steps", train_iters)
    if is_muon(optimizer):
        defaults = MuonParams().model_dump(exclude={"lr", *OptimizerParams.model_fields})
        rates = dict.fromkeys(("muon_lr", "adam_lr"), params.pop("lr")) if "lr" in params else {}
        optimizer["params"] = {**defaults, **rates, **params}
    if is_muon(optimizer) or optimizer["type"] == "SGD":
        values["zero_allow_untested_optimizer"] = True  # as DeepSpeed calls all but Adam and Lion


def check_weight_decay(params: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse a weight decay that is constant and changes, or changes from or to an unknown value."""
    style = params.get("weight_decay_incr_style", "constant")
    changing = ("start_weight_decay", "end_weight_decay")
    if style == "constant":
        given = [name for name in (*changing, "weight_decay_incr_steps") if params.get(name) is not None]
        if given:
            yield _problem(f'params.{given[0]} needs weight_decay_incr_style "linear" or "cosine"')
        return
    for name in changing:
        if params.get(name) is None:
            yield _problem(
                f'params.{name} is missing (weight_decay_incr_style "{style}" goes from {changing[0]} to '
                f"{changing[1]})"
            )
    if params.get("weight_decay") is not None:
        yield _problem(
            f'params.weight_decay and weight_decay_incr_style "{style}" exclude each other; leave one out'
        )


def check_nesterov(params: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse what torch's SGD refuses."""
    if params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        yield _problem("params.nesterov needs a momentum > 0, and no dampening")


def check_one_rate(optimizer: Mapping[str, Any], schedule: str) -> Iterator[Problem]:
    """Refuse several learning rates where the schedule sets one; the others scale those of the optimizer."""
    if schedule not in ("WarmupLR", "WarmupDecayLR"):
        return
    params = optimizer["params"]
    first, *others = ("muon_lr", "adam_lr", "decoupled_lr") if is_muon(optimizer) else ("lr", "decoupled_lr")
    rate = params.get(first, "(by default)")
    for other in others:
        if params.get(other, rate) != rate:
            yield Problem(
                ("scheduler",),
                f"scheduler.type {schedule} sets one learning rate for all weights, but optimizer.params.{first} "
                f"{rate} is not {other} {params[other]}; use WarmupCosineLR or WSD, which keep their ratio",
            )


def check_warm_up(schedule: str, params: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse phases of a schedule that are longer than the whole."""
    if schedule in OURS:
        try:
            OURS[schedule](**params)
        except ValueError as error:
            yield Problem(("scheduler",), f"scheduler.params: {error}")
        return
    default = SCHEDULES[schedule].model_fields["warmup_num_steps"].default
    total, warm_up = params.get("total_num_steps"), params.get("warmup_num_steps", default)
    if total is not None and warm_up > total:
        by_default = "" if "warmup_num_steps" in params else " (DeepSpeed's default)"
        yield Problem(
            ("scheduler",),
            f"scheduler.params.warmup_num_steps {warm_up}{by_default} is more than "
            f"scheduler.params.total_num_steps {total}",
        )


def _problem(text: str) -> Problem:
    return Problem(("optimizer",), f"optimizer.{text}")
