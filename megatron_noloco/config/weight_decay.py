"""A schedule of the weight decay in the optimizer's params, in Megatron's words."""

from collections.abc import Iterator
from typing import Any

from megatron_noloco.config.wording import Problem, wrong_value
from megatron_noloco.engine.schedules import STYLES

_STYLE, _STEPS = "weight_decay_incr_style", "weight_decay_incr_steps"
_ENDS = ("start_weight_decay", "end_weight_decay")


def problems_in(params: dict[str, Any], train_iters: int | None) -> Iterator[Problem]:
    """What is wrong with it; completes the number of steps, which is that of the run.

    Args:
        train_iters: local steps of the run; None when not known.
    """
    given = [name for name in (*_ENDS, _STEPS) if name in params]
    style = params.get(_STYLE, "constant")
    if style == "constant":  # Megatron's default: `weight_decay` alone
        params.pop(_STYLE, None)
        if given:
            text = f'optimizer.params.{given[0]} needs {_STYLE} "linear" or "cosine"'
            yield Problem(("optimizer",), text)
    elif not isinstance(style, str) or style not in STYLES:
        yield wrong_value(("optimizer", "params", _STYLE), '"constant", "linear" or "cosine"', style)
    else:
        for name in _ENDS:
            if name not in params:
                way = f'{_STYLE} "{style}" goes from {_ENDS[0]} to {_ENDS[1]}'
                yield Problem(("optimizer",), f"optimizer.params.{name} is missing ({way})")
        if "weight_decay" in params:
            text = f'optimizer.params.weight_decay and {_STYLE} "{style}" exclude each other; leave one out'
            yield Problem(("optimizer",), text)
        if train_iters is not None:
            params.setdefault(_STEPS, train_iters)
