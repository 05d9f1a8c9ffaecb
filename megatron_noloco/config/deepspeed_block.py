"""DeepSpeed's part of the file: checked, with every "auto" and every missing batch number worked out.

The functions below work on one copy of the user's keys, in the order of `resolve`; each yields what is wrong
instead of stopping at the first problem.
"""

import copy
from collections.abc import Iterator
from typing import Any

from megatron_noloco.config import deepspeed_keys as keys
from megatron_noloco.config import deepspeed_models, deepspeed_optimizer
from megatron_noloco.config.deepspeed_values import TOP_LEVEL
from megatron_noloco.config.wording import Problem, unknown_key, value_problems, wrong_value

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
AUTO = "auto"

_OFFLOAD = (
    "is not supported: the inner optimizer works where the model is; the outer one's weights are in host memory "
    'already (noloco.slow_weights "host")'
)
_ORDER = "changes the order of the flat weights, which checkpoints and exports rely on; leave it out"
# Switches of zero_optimization that must stay off.
_ZERO_OFF = {
    "round_robin_gradients": _ORDER,
    "parameter_alignment": _ORDER,
    "offload_optimizer": _OFFLOAD,
    "offload_param": _OFFLOAD,
    "cpu_offload": _OFFLOAD,
    "cpu_offload_param": _OFFLOAD,
}


def resolve(
    raw: dict[str, Any], dp_size: int | None, train_iters: int | None
) -> tuple[dict[str, Any], list[Problem]]:
    """What DeepSpeed is given for the user's top-level keys, and what is wrong with them.

    Args:
        raw: the top-level keys that are not one of our blocks and are known to DeepSpeed.
        dp_size: DeepSpeed's world size, since a replica is a whole DeepSpeed world; None when it is not known.
        train_iters: local steps of the run: scheduler.params.total_num_steps "auto"; None when not known.
    """
    values = copy.deepcopy(raw)
    problems = [
        *_old_names(values),
        *_objects(values),
        *_autos(values, train_iters),
        *_batch(values, dp_size),
        *_scalars(values),
        *deepspeed_optimizer.check(values, "optimizer" in raw, train_iters),
        *_zero(values),
        *_disabled(values),
    ]
    for block in sorted(keys.CHECKED & values.keys()):
        problems += deepspeed_models.problems_in(block, values[block])
    return values, [*problems, *_precision(values)]


def check_top_level(raw: dict[str, Any], blocks: tuple[str, ...], fields: list[str]) -> list[Problem]:
    """Keys that nobody would read, or that nothing here would obey.

    Args:
        fields: dotted names of the fields of our blocks, of which a wrong key may be one without its block.
    """
    problems = []
    for key in raw:
        if key in blocks:
            continue
        if key in keys.REMOVED:
            problems.append(Problem((key,), f"{key} was removed from DeepSpeed 0.19; delete it"))
        elif key in keys.NOT_HERE:
            problems.append(Problem((key,), f"{key} has no effect here: {keys.NOT_HERE[key]}"))
        elif key not in keys.TOP_LEVEL:
            known = [*blocks, *(keys.TOP_LEVEL - keys.NOT_HERE.keys())]
            problems.append(unknown_key((key,), known, fields))
    return problems


def _old_names(values: dict[str, Any]) -> Iterator[Problem]:
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):  # DeepSpeed's old spelling
        values["zero_optimization"] = {"stage": int(zero)}
    if "bfloat16" in values:  # DeepSpeed's old name
        if "bf16" in values:
            text = "bf16 and bfloat16 are two names for one setting; give one of them"
            yield Problem(("bfloat16",), text)
        values.setdefault("bf16", values.pop("bfloat16"))


def _objects(values: dict[str, Any]) -> Iterator[Problem]:
    """A block that is no object would make every later question fail: it is reported and dropped."""
    for block in sorted((keys.CHECKED | {"optimizer", "scheduler"}) & values.keys()):
        if not isinstance(values[block], dict):
            if values[block] != AUTO or block == "optimizer":
                yield wrong_value((block,), "an object", values[block])
            del values[block]


def _autos(values: dict[str, Any], train_iters: int | None) -> Iterator[Problem]:
    """ "auto" means DeepSpeed's default, except where DeepSpeed has none that suits."""
    if values.get("gradient_clipping") == AUTO:
        values["gradient_clipping"] = 1.0
    for block in ("optimizer", "scheduler"):
        params = values.get(block, {}).get("params")
        for name, value in params.items() if isinstance(params, dict) else ():
            if value == AUTO and name == "total_num_steps":
                params[name] = train_iters or AUTO
            elif value == AUTO:
                text = f'{block}.params.{name}: "auto" has no meaning here; give a number'
                yield Problem((block,), text)
    for block in keys.CHECKED & values.keys():
        values[block] = {name: value for name, value in values[block].items() if value != AUTO}
    for key in [key for key, value in values.items() if value == AUTO]:
        del values[key]


def _batch(values: dict[str, Any], dp_size: int | None) -> Iterator[Problem]:
    """DeepSpeed's rule, per replica: train_batch_size = micro batch x accumulation steps x dp."""
    given = {key: values[key] for key in (TRAIN, MICRO, STEPS) if key in values}
    wrong = [key for key, value in given.items() if type(value) is not int or value < 1]
    if wrong:
        yield from (wrong_value((key,), 'an integer >= 1 or "auto"', given[key]) for key in wrong)
    elif TRAIN not in given and MICRO not in given:
        yield Problem((MICRO,), f"{MICRO} or {TRAIN} is missing (samples per replica; one of them is needed)")
    elif dp_size is not None:
        yield from _derive_batch(given, dp_size)
        values.update(given)


def _derive_batch(given: dict[str, int], dp_size: int) -> Iterator[Problem]:
    """Fills in the numbers that are missing."""
    if len(given) == 1:  # as DeepSpeed does
        given[STEPS] = 1
    if TRAIN not in given:
        given[TRAIN] = given[MICRO] * given[STEPS] * dp_size
    for missing, other in ((MICRO, STEPS), (STEPS, MICRO)):
        if missing not in given:
            parts = given[other] * dp_size
            if given[TRAIN] % parts:
                yield Problem(
                    (TRAIN,),
                    f"{TRAIN} {given[TRAIN]} does not divide by {other} {given[other]} x "
                    f"parallel.data_parallel_size {dp_size} = {parts} (per replica), so there is no {missing}",
                )
                return
            given[missing] = given[TRAIN] // parts
    product = given[MICRO] * given[STEPS] * dp_size
    if product != given[TRAIN]:
        yield Problem(
            (TRAIN,),
            f"{TRAIN} {given[TRAIN]} is not {MICRO} {given[MICRO]} x {STEPS} {given[STEPS]} x "
            f"parallel.data_parallel_size {dp_size} = {product} (per replica)",
        )


def _scalars(values: dict[str, Any]) -> Iterator[Problem]:
    for key in TOP_LEVEL.keys() & values.keys():
        yield from value_problems((key,), TOP_LEVEL[key], values[key])


def _zero(values: dict[str, Any]) -> Iterator[Problem]:
    """Stage 0 is run as 1: the same numbers, and DeepSpeed's own stage 0 clips wrongly with stages."""
    zero = values.setdefault("zero_optimization", {})
    stage, path = zero.get("stage", 1), ("zero_optimization",)
    if type(stage) is not int or not 0 <= stage <= 3:
        yield wrong_value((*path, "stage"), "0 or 1", stage)
    elif stage >= 2:
        yield Problem(
            path,
            f"zero_optimization.stage {stage} is not supported, use 0 or 1: 2 and 3 need DeepSpeed's own "
            "backward, and Megatron-core's schedule runs the backward outside of DeepSpeed",
        )
    for key, reason in _ZERO_OFF.items():
        if zero.get(key):
            yield Problem(path, f"zero_optimization.{key} {reason}")
    if zero.get("compute_grad_norm") is False:
        text = "zero_optimization.compute_grad_norm: the norm is logged, and clipped by; leave it out"
        yield Problem(path, text)
    zero["stage"] = 1


def _disabled(values: dict[str, Any]) -> Iterator[Problem]:
    for key, reason in keys.DISABLED.items():
        value = values.get(key)
        if isinstance(value, dict) and value.get("enabled"):
            yield Problem((key,), f"{key}.enabled is not supported: {reason}")
        elif value is True:
            yield Problem((key,), f"{key} is not supported: {reason}")


def _precision(values: dict[str, Any]) -> Iterator[Problem]:
    bf16, types = values.get("bf16", {}), values.get("data_types", {})
    if bf16.get("enabled") is not True:
        return
    if values.get("fp16", {}).get("enabled") is True:
        yield Problem(("fp16",), "bf16 and fp16 are both enabled; choose one of them")
    if bf16.get("check_grad_overflow") is False:
        text = "bf16.check_grad_overflow: a step without a finite gradient is always skipped; leave it out"
        yield Problem(("bf16",), text)
    if types.get("grad_accum_dtype") == "fp32" and bf16.get("immediate_grad_update") is False:
        yield Problem(
            ("data_types",),
            'data_types.grad_accum_dtype "fp32" needs bf16.immediate_grad_update: true (the default here)',
        )
