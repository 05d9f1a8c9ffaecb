"""The blocks `optimizer` and `scheduler`: the params of each type, and the rules between them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from megatron_noloco.engine.schedules import WSD, DecayType
from megatron_noloco.errors import UserError
from megatron_noloco.fields import NonNegative, Positive, Scope, Settings, Size, field

Share = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[list[Momentum], Field(min_length=2, max_length=2)]
TotalSteps = Positive | Literal["auto"]

_PEAK = "Peak learning rate."
_BETAS = "Decay rates of the first and the second moment."
_EPS = "Added to the root of the second moment."


def _params_by_type(*blocks: type[Settings]) -> dict[str, Any]:
    """Return the class of the params of each type that blocks have."""
    fields = (block.model_fields for block in blocks)
    return {kind: of["params"].annotation for of in fields for kind in get_args(of["type"].annotation)}


class Offered(Settings):
    """A block that a newcomer copies."""

    scope = Scope.OFFERED


class OptimizerParams(Offered):
    """Parameters of every optimizer."""

    weight_decay: Size = field(
        0.0, "Weight decay of all weights but norms and biases; 0 for every type unless it is given."
    )


class OneRateParams(OptimizerParams):
    """Parameters of every optimizer with a single learning rate."""

    lr: Size = field(1e-3, _PEAK)


class AdamParams(OneRateParams):
    """DeepSpeed's fused kernel on a GPU where it is available, else torch's."""

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


class SgdParams(OneRateParams):
    """Torch's SGD."""

    momentum: Momentum = field(0.0, "Share of the momentum that stays.")
    nesterov: bool = field(False, "Whether the momentum is Nesterov's.")


# Only optimizers that treat every weight by itself: ZeRO keeps the weights of a stage in flat vectors, where Lamb
# or Adafactor would not find their tensors. Muon finds them by itself (engine/muon.py).


class _OneRate(Offered):
    """An optimizer with a single learning rate."""

    type: str
    params: OneRateParams

    @property
    def rates(self) -> dict[str, float]:
        """Return the peak learning rates by name."""
        return {"lr": self.params.lr}

    def as_deepspeed(self) -> dict[str, Any]:
        """Return DeepSpeed's block `optimizer`."""
        return {"type": self.type, "params": self.rates | self.params.model_dump(exclude_none=True)}


class AdamOptimizer(_OneRate):
    moments: ClassVar[int] = 2  # that are kept of a weight
    type: Literal["AdamW", "Adam"]
    params: AdamParams = AdamParams()

    def rules(self) -> Iterator[str]:
        if self.params.fused is not None and not self.params.torch_adam:
            yield "params.fused applies only with torch_adam true; set that, or leave fused out"
        if self.type == "AdamW" and not self.params.adam_w_mode:
            yield "params.adam_w_mode false has no effect on AdamW; use type Adam, or leave it out"


class SgdOptimizer(_OneRate):
    type: Literal["SGD"]
    params: SgdParams = SgdParams()

    def rules(self) -> Iterator[str]:
        if self.params.nesterov and not self.params.momentum:
            yield "params.nesterov needs a momentum > 0"

    @property
    def moments(self) -> int:
        """Return the number of moments that are kept of a weight."""
        return int(self.params.momentum > 0)


class MuonOptimizer(Offered):
    moments: ClassVar[int] = 2  # that its AdamW keeps of a weight
    type: Literal["Muon"]
    params: MuonParams = MuonParams()

    @property
    def rates(self) -> dict[str, float]:
        """Return the peak learning rates by name."""
        both = self.params.lr
        given = self.params.model_fields_set
        return {
            name: getattr(self.params, name) if both is None or name in given else both
            for name in ("muon_lr", "adam_lr")
        }

    def as_deepspeed(self) -> dict[str, Any]:
        """Return DeepSpeed's block `optimizer`."""
        rest = self.params.model_dump(exclude={"lr", *self.rates})
        return {"type": self.type, "params": self.rates | rest}


Optimizer = Annotated[AdamOptimizer | MuonOptimizer | SgdOptimizer, Field(discriminator="type")]
OPTIMIZERS: dict[str, type[OptimizerParams]] = _params_by_type(AdamOptimizer, MuonOptimizer, SgdOptimizer)


_TOTAL = 'Local steps until the rate is lowest; "auto": training.train_iters.'
_WARM_UP = "The first local steps, in which the rate rises"
_WARM_UP_OF_TWO = f"{_WARM_UP}; DeepSpeed takes 1 as 2."
_WARM_UP_TYPE = "How the rate rises."


class WarmupParams(Offered):
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


class WarmupCosineParams(Offered):
    """A warm-up, then half a cosine; it scales the optimizer's rates."""

    total_num_steps: TotalSteps = field(..., _TOTAL)
    warmup_min_ratio: Share = field(
        0.0,
        "Rate at which the warm-up begins, as a share of the peak; in the first local step the rate is 0.",
    )
    warmup_num_steps: Positive = field(1000, _WARM_UP_OF_TWO)
    warmup_type: Literal["log", "linear"] = field("log", _WARM_UP_TYPE)
    cos_min_ratio: Share = field(1e-4, "Lowest rate, as a share of the peak.")


class WsdParams(Offered):
    """A linear warm-up, the peak, and a decay at the end; it scales the optimizer's rates."""

    total_num_steps: TotalSteps = field(..., 'Local steps of the run; "auto": training.train_iters.')
    decay_num_steps: Positive = field(..., "The last local steps, in which the rate decays.")
    warmup_num_steps: NonNegative = field(WSD.warmup_num_steps, f"{_WARM_UP}.")
    decay_type: DecayType = field(
        WSD.decay_type, 'How the rate decays; "1-sqrt" is 1 - sqrt(x) for x from 0 to 1.'
    )
    min_ratio: Share = field(WSD.min_ratio, "Rate at the end of the decay, as a share of the peak.")


class WarmupSchedule(Offered):
    type: Literal["WarmupLR"]
    params: WarmupParams = WarmupParams()


class WarmupDecaySchedule(Offered):
    type: Literal["WarmupDecayLR"]
    params: WarmupDecayParams


class WarmupCosineSchedule(Offered):
    type: Literal["WarmupCosineLR"]
    params: WarmupCosineParams


class WsdSchedule(Offered):
    type: Literal["WSD"]
    params: WsdParams


# Torch's schedules are no choice: they do not accept the optimizer that ZeRO wraps.
Schedule = Annotated[
    WsdSchedule | WarmupSchedule | WarmupDecaySchedule | WarmupCosineSchedule, Field(discriminator="type")
]
SCHEDULES: dict[str, type[Settings]] = _params_by_type(
    WsdSchedule, WarmupSchedule, WarmupDecaySchedule, WarmupCosineSchedule
)


def schedule_as_deepspeed(schedule: Schedule, train_iters: int) -> dict[str, Any]:
    """Return DeepSpeed's block `scheduler` for a run of so many local steps."""
    params = schedule.params.model_dump()
    if params.get("total_num_steps") == "auto":
        params["total_num_steps"] = train_iters
    return {"type": schedule.type, "params": params}


def check_schedule(optimizer: Optimizer, schedule: Schedule, train_iters: int) -> Iterator[str]:
    """Yield what a schedule contradicts: itself, or the optimizer."""
    params = schedule_as_deepspeed(schedule, train_iters)["params"]
    is_auto = getattr(schedule.params, "total_num_steps", None) == "auto"
    source = ' ("auto": training.train_iters)' if is_auto else ""
    if schedule.type in ("WarmupLR", "WarmupDecayLR"):
        yield from _check_one_rate(optimizer.rates, schedule.type, params)
    if schedule.type == "WSD":
        try:
            WSD(**params)
        except UserError as error:
            yield f"scheduler.params: {error}{source}"
        return
    total, warm_up = params.get("total_num_steps"), params["warmup_num_steps"]
    if total is not None and warm_up > total:
        yield (
            f"scheduler.params.warmup_num_steps {warm_up}{by_default(schedule)} is more than "
            f"scheduler.params.total_num_steps {total}{source}"
        )


def by_default(schedule: Schedule) -> str:
    """Return a note on the warm-up of a schedule where the file does not give it."""
    return "" if "warmup_num_steps" in schedule.params.model_fields_set else " (DeepSpeed's default)"


def _check_one_rate(rates: Mapping[str, float], schedule: str, params: Mapping[str, Any]) -> Iterator[str]:
    """Refuse one peak for an optimizer that has two, and a lowest rate above the peak."""
    peak, lowest = params["warmup_max_lr"], params["warmup_min_lr"]
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
