"""The blocks `optimizer` and `scheduler`: the params of each type, and the rules between them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_noloco.config.blocks import Block, NonNegative, Positive, Size, field
from megatron_noloco.engine.schedules import WSD, DecayType
from megatron_noloco.errors import UserError

Share = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[list[Momentum], Field(min_length=2, max_length=2)]
TotalSteps = Positive | Literal["auto"]

_PEAK = "Peak learning rate."
_BETAS = "Decay rates of the first and the second moment."
_EPS = "Added to the root of the second moment."


class OptimizerParams(Block):
    """Parameters of every optimizer."""

    weight_decay: Size = field(
        0.0, "Weight decay of all weights but norms and biases; 0 for every type unless it is given."
    )


class AdamParams(OptimizerParams):
    """DeepSpeed's fused kernel on a GPU where it is available, else torch's."""

    lr: Size = field(1e-3, _PEAK)
    betas: Betas = field([0.9, 0.999], _BETAS)
    eps: Size = field(1e-8, _EPS)
    adam_w_mode: bool = field(True, 'With "Adam": whether weight decay is decoupled, as in AdamW.')
    torch_adam: bool | None = field(
        None, "Whether torch's kernel is used; null: only where DeepSpeed's is not available."
    )
    fused: bool | None = field(None, "With torch_adam true: whether torch's kernel is its fused one.")


class MuonParams(OptimizerParams):
    """Muon for the linear maps of the layers, AdamW for all other weights."""

    lr: Size | None = field(None, "Value of muon_lr and of adam_lr where that is not given.")
    muon_lr: Size = field(0.02, "Peak learning rate of Muon.")
    adam_lr: Size = field(3e-4, "Peak learning rate of AdamW, which trains all other weights.")
    momentum: Momentum = field(0.95, "Nesterov momentum of Muon.")
    ns_method: Literal["gram", "standard"] = field("gram", "DeepSpeed's Newton-Schulz kernel.")
    betas: Betas = field([0.9, 0.95], _BETAS)
    eps: Size = field(1e-10, _EPS)


class LionParams(OptimizerParams):
    """DeepSpeed's Lion, which needs a GPU."""

    lr: Size = field(1e-3, _PEAK)
    betas: Betas = field([0.9, 0.999], "Decay rates of the direction and of the momentum.")


class SgdParams(OptimizerParams):
    """Torch's SGD."""

    lr: Size = field(1e-3, _PEAK)
    momentum: Momentum = field(0.0, "Share of the momentum that stays.")
    nesterov: bool = field(False, "Whether the momentum is Nesterov's.")


# Only optimizers that treat every weight by itself: ZeRO keeps the weights of a stage in flat vectors, where Lamb
# or Adafactor would not find their tensors. Muon finds them by itself (engine/muon.py).
OPTIMIZERS: dict[str, type[OptimizerParams]] = {
    "AdamW": AdamParams,
    "Adam": AdamParams,
    "Muon": MuonParams,
    "Lion": LionParams,
    "SGD": SgdParams,
}
_TOTAL = 'Local steps until the rate is lowest; "auto": training.train_iters.'
_WARM_UP = "The first local steps, in which the rate rises"
_WARM_UP_OF_TWO = f"{_WARM_UP}; DeepSpeed takes 1 as 2."
_WARM_UP_TYPE = "How the rate rises."


class WarmupParams(Block):
    """A warm-up, then the peak."""

    warmup_min_lr: Size = field(0.0, "Lowest rate, the same for all weights.")
    warmup_max_lr: Size | None = field(
        None, "Peak, the same for all weights; null: the rate, or each rate, of the optimizer."
    )
    warmup_num_steps: Positive = field(1000, _WARM_UP_OF_TWO)
    warmup_type: Literal["log", "linear"] = field("log", _WARM_UP_TYPE)


class WarmupDecayParams(WarmupParams):
    """A warm-up, then a linear decay."""

    total_num_steps: TotalSteps = field(..., _TOTAL)


class WarmupCosineParams(Block):
    """A warm-up, then half a cosine; it scales the optimizer's rates."""

    total_num_steps: TotalSteps = field(..., _TOTAL)
    warmup_min_ratio: Share = field(
        0.0,
        "Rate at which the warm-up begins, as a share of the peak; in the first local step the rate is 0.",
    )
    warmup_num_steps: Positive = field(1000, _WARM_UP_OF_TWO)
    warmup_type: Literal["log", "linear"] = field("log", _WARM_UP_TYPE)
    cos_min_ratio: Share = field(1e-4, "Lowest rate, as a share of the peak.")


class WsdParams(Block):
    """A linear warm-up, the peak, and a decay at the end; it scales the optimizer's rates."""

    total_num_steps: TotalSteps = field(..., 'Local steps of the run; "auto": training.train_iters.')
    decay_num_steps: Positive = field(..., "The last local steps, in which the rate decays.")
    warmup_num_steps: NonNegative = field(WSD.warmup_num_steps, f"{_WARM_UP}.")
    decay_type: DecayType = field(
        WSD.decay_type, 'How the rate decays; "1-sqrt" is 1 - sqrt(x) for x from 0 to 1.'
    )
    min_ratio: Share = field(WSD.min_ratio, "Rate at the end of the decay, as a share of the peak.")


PEAK_UP_TO_0_2 = 1e-3  # of WarmupDecayLR without warmup_max_lr: DeepSpeed's default
# Torch's schedules are no choice: they do not accept the optimizer that ZeRO wraps.
SCHEDULES: dict[str, type[Block]] = {
    "WSD": WsdParams,
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
}


def moments(optimizer: Mapping[str, Any]) -> int:
    """Return the number of moments that an optimizer keeps of a weight, with Muon that of its AdamW."""
    kept = {"Lion": 1, "SGD": int(bool(optimizer["params"].get("momentum")))}
    return kept.get(optimizer["type"], 2)


def complete(values: dict[str, Any], train_iters: int) -> None:
    """Complete the blocks `optimizer` and `scheduler`, which have passed their checks."""
    for block in ("optimizer", "scheduler"):
        if block in values:
            given = values[block].get("params", {})
            values[block]["params"] = {key: value for key, value in given.items() if value is not None}
            if given.get("total_num_steps") == "auto":
                values[block]["params"]["total_num_steps"] = train_iters
    if "scheduler" in values and values["scheduler"]["type"] == "WarmupDecayLR":
        # DeepSpeed takes null for the optimizer's rates, and a missing key for 1e-3.
        values["scheduler"]["params"].setdefault("warmup_max_lr", None)
    optimizer = values["optimizer"]
    params = optimizer["params"]
    if "betas" in params:  # torch refuses an integer beside a float: [0, 0.95]
        params["betas"] = list(map(float, params["betas"]))
    params.setdefault("weight_decay", 0.0)  # as in DeepSpeed's own; torch's AdamW would take 0.01
    if optimizer["type"] == "Muon":
        defaults = MuonParams().model_dump(exclude={"lr", *OptimizerParams.model_fields})
        rates = dict.fromkeys(("muon_lr", "adam_lr"), params.pop("lr")) if "lr" in params else {}
        optimizer["params"] = {**defaults, **rates, **params}
    if optimizer["type"] in ("Muon", "SGD"):
        values["zero_allow_untested_optimizer"] = True  # as DeepSpeed calls all but Adam and Lion


def check_optimizer(optimizer: Mapping[str, Any]) -> Iterator[str]:
    """Refuse what torch's SGD refuses, and what has no effect beside the rest of the block as it was given."""
    params = {name: value for name, value in optimizer.get("params", {}).items() if value is not None}
    if params.get("nesterov") and not params.get("momentum"):
        yield "optimizer.params.nesterov needs a momentum > 0"
    if "fused" in params and not params.get("torch_adam"):
        yield "optimizer.params.fused is of torch's kernel; give torch_adam true, too, or leave it out"
    if optimizer["type"] == "AdamW" and params.get("adam_w_mode") is False:
        yield "optimizer.params.adam_w_mode false has no effect on AdamW; use type Adam, or leave it out"


def rates_of(optimizer: Mapping[str, Any]) -> dict[str, float]:
    """Return the learning rates of a completed block `optimizer` by name: two of Muon, else one."""
    params = optimizer["params"]
    if "muon_lr" in params:
        return {name: params[name] for name in ("muon_lr", "adam_lr")}
    return {"lr": params.get("lr", AdamParams.model_fields["lr"].default)}  # of all types


def with_peak(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block `scheduler` of a saved run where it has no peak, which up to version 0.2.0 was 1e-3."""
    scheduler = saved.get("scheduler") or {}
    params = scheduler.get("params", {})
    if scheduler.get("type") != "WarmupDecayLR" or "warmup_max_lr" in params:
        return {}
    of_optimizer = set(rates_of(saved["optimizer"]).values()) == {PEAK_UP_TO_0_2}
    peak = None if of_optimizer else PEAK_UP_TO_0_2
    return {"scheduler": {**scheduler, "params": {**params, "warmup_max_lr": peak}}}


def check_schedule(
    optimizer: Mapping[str, Any], scheduler: Mapping[str, Any], is_auto: bool
) -> Iterator[str]:
    """Yield what a schedule contradicts: itself, or the optimizer.

    Args:
        is_auto: whether the file gives total_num_steps as "auto".
    """
    schedule, params = scheduler["type"], scheduler["params"]
    source = ' ("auto": training.train_iters)' if is_auto else ""
    if schedule in ("WarmupLR", "WarmupDecayLR"):
        yield from _check_one_rate(rates_of(optimizer), schedule, params)
    if schedule == "WSD":
        try:
            WSD(**params)
        except UserError as error:
            yield f"scheduler.params: {error}{source}"
        return
    total, (warm_up, by_default) = params.get("total_num_steps"), warm_up_of(schedule, params)
    if total is not None and warm_up > total:
        yield (
            f"scheduler.params.warmup_num_steps {warm_up}{by_default} is more than "
            f"scheduler.params.total_num_steps {total}{source}"
        )


def warm_up_of(schedule: str, params: Mapping[str, Any]) -> tuple[int, str]:
    """Return the local steps of the warm-up, and a note where the file does not give them."""
    default = SCHEDULES[schedule].model_fields["warmup_num_steps"].default
    by_default = "" if "warmup_num_steps" in params else " (DeepSpeed's default)"
    return params.get("warmup_num_steps", default), by_default


def _check_one_rate(rates: Mapping[str, float], schedule: str, params: Mapping[str, Any]) -> Iterator[str]:
    """Refuse one peak for an optimizer that has two, and a lowest rate above the peak."""
    peak, lowest = params.get("warmup_max_lr"), params.get("warmup_min_lr", 0)
    name, other = (of(rates, key=rates.__getitem__) for of in (min, max))
    rate = rates[name]
    if peak is not None and rate != rates[other]:
        yield (
            f"scheduler.params.warmup_max_lr {peak:g} would be the peak of all weights, but "
            f"optimizer.params.{other} {rates[other]:g} is not {name} {rate:g}; leave it out: {schedule} then "
            "takes both from the optimizer"
        )
    elif lowest > (rate if peak is None else peak):
        source = f"optimizer.params.{name} {rate:g}" if peak is None else f"warmup_max_lr {peak:g}"
        yield f"scheduler.params.warmup_min_lr {lowest:g} is more than the peak, {source}; lower it"
