"""DeepSpeed's blocks `optimizer` and `scheduler`, which it hands to constructors without a look."""

from collections.abc import Iterator
from typing import Any

from megatron_noloco.config import aliases, schedule, weight_decay
from megatron_noloco.config import deepspeed_keys as keys
from megatron_noloco.config.deepspeed_values import REQUIRED, SCHEDULE
from megatron_noloco.config.wording import (
    Path,
    Problem,
    expected,
    is_size,
    nearest,
    shown,
    unknown_key,
    value_problems,
    wrong_value,
)
from megatron_noloco.engine.schedules import SCHEDULES

_WARMUP_DEFAULT = 1000  # DeepSpeed's warmup_num_steps
# DeepSpeed's for Muon; the rates where the file has no `lr` either.
MUON_DEFAULTS = {
    "momentum": 0.95,
    "ns_method": "gram",
    "betas": [0.9, 0.95],
    "eps": 1e-10,
}
MUON_RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}


def check(values: dict[str, Any], given: bool, train_iters: int | None) -> Iterator[Problem]:
    """What is wrong with the two blocks, which are objects; completes them where DeepSpeed needs it.

    Args:
        given: whether the file has an optimizer; one that is no object is no longer in `values`.
        train_iters: local steps of the run; None when not known.
    """
    if "optimizer" in values:
        yield from _form("optimizer", values["optimizer"])
        yield from _optimizer(values)
        params = values["optimizer"]["params"]
        yield from weight_decay.problems_in(params, train_iters)
        if "start_weight_decay" not in params:
            params.setdefault("weight_decay", 0.0)  # as in DeepSpeed's own; torch's AdamW would take 0.01
        if is_muon(values["optimizer"]):
            values["optimizer"]["params"] = _complete_muon(params)
    elif not given:
        text = 'optimizer is missing (such as {"type": "AdamW", "params": {"lr": 3e-4}})'
        yield Problem(("optimizer",), text)
    if "scheduler" in values:
        yield from _form("scheduler", values["scheduler"])
        yield from _scheduler(values["scheduler"])
        yield from _two_rates(values.get("optimizer", {}), values["scheduler"].get("type"))


def is_muon(optimizer: dict[str, Any]) -> bool:
    return str(optimizer.get("type")).lower() == "muon"


def _form(block: str, value: dict[str, Any]) -> Iterator[Problem]:
    """The form {type, params}; params that are no object are dropped."""
    known = ("type", "params", "legacy_fusion") if block == "optimizer" else ("type", "params")
    yield from (unknown_key((block, name), known) for name in value if name not in known)
    if "type" not in value:
        yield Problem((block,), f"{block}.type is missing (text)")
    elif not isinstance(value["type"], str):
        yield wrong_value((block, "type"), "text", value["type"])
    if not isinstance(value.setdefault("params", {}), dict):  # DeepSpeed unpacks it, also when it is missing
        yield wrong_value((block, "params"), "an object", value["params"])
        value["params"] = {}


def _optimizer(values: dict[str, Any]) -> Iterator[Problem]:
    name, params = values["optimizer"].get("type"), values["optimizer"]["params"]
    known = keys.DEEPSPEED_OPTIMIZERS | keys.TORCH_OPTIMIZERS
    if isinstance(name, str) and not {name, name.lower()} & known:
        yield _unknown_type("optimizer", name, ["AdamW", "Adam", "Lion", *sorted(keys.TORCH_OPTIMIZERS)])
    if str(name) in keys.TORCH_OPTIMIZERS or is_muon(values["optimizer"]):
        values["zero_allow_untested_optimizer"] = True  # as it calls all but Adam and Lion
    if "max_grad_norm" in params:
        text = "optimizer.params.max_grad_norm: use the top-level gradient_clipping"
        yield Problem(("optimizer",), text)
    allowed = keys.OPTIMIZER_PARAMS.get(str(name).lower(), frozenset(params)) | keys.GROUP_PARAMS
    for key, value in params.items():
        path = ("optimizer", "params", key)
        if key == "max_grad_norm" or value == "auto":
            continue  # reported already
        if key not in allowed:
            yield unknown_key(path, allowed)
        else:
            yield from _optimizer_value(path, value)


def _complete_muon(params: dict[str, Any]) -> dict[str, Any]:
    """All that Muon reads; lr, which stands for both rates, is not among them."""
    rates = {name: params.get("lr", default) for name, default in MUON_RATES.items()}
    completed = {**rates, **MUON_DEFAULTS, **params}
    return {name: value for name, value in completed.items() if name != "lr"}


def _optimizer_value(path: Path, value: Any) -> Iterator[Problem]:
    if path[-1] == "betas":
        if not (isinstance(value, list) and len(value) == 2 and all(is_size(b) and b < 1 for b in value)):
            yield wrong_value(path, "two numbers from 0 to below 1", value)
    elif path[-1] == "momentum":
        if not (is_size(value) and value < 1):
            yield wrong_value(path, "a number from 0 to below 1", value)
    elif path[-1] == "ns_method":
        if value not in ("gram", "standard"):
            yield wrong_value(path, '"gram" or "standard"', value)
    elif path[-1] == "weight_decay_incr_steps":
        if type(value) is not int or value < 1:
            yield wrong_value(path, "an integer >= 1", value)
    elif path[-1] == "weight_decay_incr_style":
        pass  # see config/weight_decay.py
    elif path[-1] in keys.OPTIMIZER_SWITCHES:
        if type(value) is not bool:
            yield wrong_value(path, "true or false", value)
    elif not is_size(value):
        yield wrong_value(path, "a number >= 0", value)


def _scheduler(scheduler: dict[str, Any]) -> Iterator[Problem]:
    name, params = scheduler.get("type"), scheduler["params"]
    if not isinstance(name, str):
        return
    if name in SCHEDULES:
        yield from schedule.problems_in(name, params)
        return
    if name not in keys.SCHEDULES:
        yield _unknown_type("scheduler", name, [*SCHEDULES, *keys.SCHEDULES])
        return
    known = keys.SCHEDULES[name]
    for key, value in params.items():
        path = ("scheduler", "params", key)
        if key not in known:
            yield unknown_key(path, known)
        elif value != "auto":  # one that is left is reported already, or has no number yet
            yield from value_problems(path, SCHEDULE[key], value)
    for key in REQUIRED:
        if key in known and key not in params:
            yield Problem(("scheduler",), f"scheduler.params.{key} is missing ({expected(SCHEDULE[key])})")
    if "total_num_steps" in known:
        yield from _warm_up(params)


def _two_rates(optimizer: dict[str, Any], schedule: Any) -> Iterator[Problem]:
    """Ours and WarmupCosineLR scale the learning rates of the optimizer, the others set one for all weights."""
    if not isinstance(schedule, str) or schedule not in keys.SCHEDULES.keys() - {"WarmupCosineLR"}:
        return
    params = optimizer.get("params", {})
    first, *others = MUON_RATES if is_muon(optimizer) else ["lr"]
    rate = params.get(first, "(by default)")
    for other in [*others, "decoupled_lr"]:
        if params.get(other, rate) != rate:
            yield Problem(
                ("scheduler",),
                f"scheduler.type {schedule} sets one learning rate for all weights, but optimizer.params.{first} "
                f"{rate} is not {other} {params[other]}; use WarmupCosineLR or WSD, which keep their ratio",
            )


def _warm_up(params: dict[str, Any]) -> Iterator[Problem]:
    total, warm_up = params.get("total_num_steps"), params.get("warmup_num_steps", _WARMUP_DEFAULT)
    if is_size(total) and is_size(warm_up) and warm_up > total:
        default = "" if "warmup_num_steps" in params else " (DeepSpeed's default)"
        yield Problem(
            ("scheduler",),
            f"scheduler.params.warmup_num_steps {warm_up}{default} is more than "
            f"scheduler.params.total_num_steps {total}",
        )


def _unknown_type(block: str, name: str, known: list[str]) -> Problem:
    meant = nearest((name,), known)
    hint = aliases.hint(name) or (f"did you mean {meant}?" if meant else "known are " + ", ".join(known))
    return Problem((block,), f"{block}.type: {shown(name)} is not a known {block}; {hint}")
