"""The learning rates of a run, as its schedule gives them, and where they are not what the file suggests."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile

from megatron_noloco.config.optimizer_block import by_default
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.engine.schedules import rates_in
from megatron_noloco.fields import count

_EVALUATED = 1000  # local steps, besides those around the borders of a schedule's phases


def rates_in_words(config: RunConfig) -> str:
    """Return the learning rates of a run, and a line for each contradiction.

    With a schedule it loads DeepSpeed, whose own schedule is evaluated.
    """
    scheduler = config.as_deepspeed().get("scheduler")
    peaks, steps = config.optimizer.rates, config.training.train_iters
    if scheduler is None:
        return f"{_each(peaks, peaks.values())} in every local step"
    params = scheduler["params"]
    end = max(steps, params.get("total_num_steps", 0), params["warmup_num_steps"] + 2)
    borders = (1, steps, end, *(value for value in params.values() if isinstance(value, int)))
    evaluated = rates_in(scheduler, list(peaks.values()), _around(borders, end))
    in_run = {step: rates for step, rates in evaluated.items() if step <= steps}
    highest = max(in_run, key=lambda step: in_run[step])
    first = (
        f"{_each(peaks, in_run[1])} in the first local step, {_each(peaks, in_run[highest])} at the peak "
        f"(local step {highest:,}), {_each(peaks, in_run[steps])} in the last"
    )
    return "\n".join([first, *_contradictions(config, peaks, evaluated)])


def _around(borders: Iterable[int], end: int) -> set[int]:
    """Return local steps from 1 to `end`: those around the borders, where a schedule bends, and some between."""
    near = (border + shift for border in borders for shift in range(-3, 4))
    return {step for step in (*near, *range(1, end, end // _EVALUATED + 1)) if 1 <= step <= end}


def _contradictions(
    config: RunConfig, peaks: Mapping[str, float], evaluated: Mapping[int, list[float]]
) -> Iterator[str]:
    steps, params = config.training.train_iters, config.as_deepspeed()["scheduler"]["params"]
    peak = params.get("warmup_max_lr")
    for name, rate in peaks.items():
        if peak not in (None, rate) and name in config.optimizer.params.model_fields_set:
            yield f"scheduler.params.warmup_max_lr {peak:g} holds, not optimizer.params.{name} {rate:g}"
    highest = max(evaluated.values())
    if highest > max(rates for step, rates in evaluated.items() if step <= steps):
        assert config.scheduler is not None
        yield (
            f"the run of {count(steps, 'local step')} ends in the warm-up of "
            f"{params['warmup_num_steps']:,}{by_default(config.scheduler)}, below {_each(peaks, highest)}"
        )
    total = params.get("total_num_steps", steps)
    if total > steps:
        yield (
            f"the run ends before the schedule does: training.train_iters {steps:,} is less than "
            f"scheduler.params.total_num_steps {total:,}"
        )
    if total < steps:
        last = evaluated[steps]
        in_run = sorted((step for step in evaluated if step <= steps), reverse=True)
        first = min(takewhile(lambda step: evaluated[step] == last, in_run))
        without_effect = f"; the last {count(steps - first + 1, 'local step')} would change no weight"
        yield (
            f"{_each(peaks, last)} from local step {first:,} on: scheduler.params.total_num_steps {total:,} is "
            f"less than training.train_iters {steps:,}" + without_effect * (not any(last))
        )


def _each(names: Iterable[str], rates: Iterable[float]) -> str:
    return " and ".join(f"{name} {rate:.4g}" for name, rate in zip(names, rates, strict=True))
