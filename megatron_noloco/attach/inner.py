"""What goes with the weights from one job to another: the state of the inner optimizer, and of a schedule."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_noloco.attach.trained import Stateful


class Several:
    """Several states as one; of the same parts in all jobs."""

    def __init__(self, parts: Sequence[Stateful]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        states = state_dict["parts"]
        if len(states) != len(self._parts):
            raise ValueError(
                f"attach: inner has {len(self._parts)} parts here, and {len(states)} where the state comes from; "
                "give all jobs the same"
            )
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


class OwnPart(Several):
    """This rank's part of the state of an optimizer that divides it among ranks: of the torch optimizers inside.

    Args:
        with_weights: a context in which the groups of those have their parameters.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        with_weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(optimizers)
        self._with_weights = with_weights

    def state_dict(self) -> dict[str, Any]:
        with self._with_weights():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        with self._with_weights():
            super().load_state_dict(state_dict)
