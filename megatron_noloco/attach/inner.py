"""The state of inner optimizer and schedule, as jobs give it to each other; optimizers that keep weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_noloco.attach.adapter import Stateful

_NEAR = 0.1  # of the norm of the weights: no moment is as near to them


class InnerState:
    """Joins the states of several objects: of optimizer and schedule, or of the optimizers inside another one.

    Args:
        parts: the same in all jobs.
        with_parameters: a context in which the optimizers have their parameters.
    """

    def __init__(
        self,
        parts: Sequence[Stateful],
        with_parameters: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._parts = parts
        self._with_parameters = with_parameters

    def state_dict(self) -> dict[str, Any]:
        with self._with_parameters():
            return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        states = state_dict["parts"]
        if len(states) != len(self._parts):
            raise ValueError(
                f"attach: inner has {len(self._parts)} parts here, and {len(states)} where the state comes from; "
                "give all jobs the same"
            )
        with self._with_parameters():
            for part, state in zip(self._parts, states, strict=True):
                part.load_state_dict(state)

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the torch optimizers among the parts and in them."""
        for part in self._parts:
            if isinstance(part, InnerState):
                yield from part.optimizers()
            elif isinstance(part, torch.optim.Optimizer):
                yield part


def check_modes(optimizer: object) -> None:
    """Raise ValueError for an optimizer with other weights to train than to evaluate, also inside another one."""
    # Not getattr: of Megatron-core's ChainedOptimizer it is a property that fails.
    while (below := getattr(optimizer, "__dict__", {}).get("optimizer")) is not None:
        optimizer = below
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise ValueError(
            f"attach: {type(optimizer).__name__} has other weights to train than to evaluate (train(), eval()), "
            "and keeps them in its state, which rounds do not exchange; use an optimizer without these modes"
        )


@torch.no_grad()
def check_no_weights(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer whose state holds weights, such as a copy in fp32, or an average of them.

    A round would not move these. Call it when the optimizer has taken steps. Torch's own optimizers keep none.
    """
    while isinstance(below := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = below
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    distances: dict[str, float] = {}
    squares: dict[str, float] = {}
    for weight, states in optimizer.state.items():
        for name, value in states.items() if isinstance(states, dict) else ():
            if torch.is_tensor(value) and value.is_floating_point() and value.shape == weight.shape:
                own, of_state = (getattr(one, "_local_tensor", one).float() for one in (weight, value))
                distances[name] = distances.get(name, 0.0) + float((of_state - own).square().sum())
                squares[name] = squares.get(name, 0.0) + float(own.square().sum())
    for name, distance in distances.items():
        if distance < _NEAR**2 * squares[name]:
            raise ValueError(
                f'attach: {type(optimizer).__name__} keeps weights of its own (state "{name}"), which rounds do '
                "not exchange; use an optimizer that keeps none"
            )
