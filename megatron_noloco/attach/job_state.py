"""What an attached job gives of its state to other jobs of a federation, and what it does with that of another."""

import io
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_noloco.attach.adapter import Stateful
from megatron_noloco.attach.other_state import buffers_of, check_buffers, write_buffers
from megatron_noloco.federation.handover import Part, State
from megatron_noloco.federation.movement import Movement
from megatron_noloco.outer import OuterOptimizer

_WEIGHTS = "weights"
_NEEDED = {_WEIGHTS, "slow_weights"}
_VECTORS = {*_NEEDED, "outer_momentum", "rounding", "correction"}


class JobState:
    """Copies the state of this rank, and uses that of another job; implements `federation.handover.Keeper`.

    The state is weights, buffers, the outer optimizer's, and that of the inner optimizer.

    Args:
        movement: of the weights.
        inner: whose state is the same on all ranks; None: it begins anew.
        modules: that have the buffers.

    Attributes:
        taken: what was taken last, for `OuterOptimizer.restore`, with "local_steps_done".
        took_inner: whether it had the state of an inner optimizer.
    """

    def __init__(
        self, outer: OuterOptimizer, movement: Movement, inner: Stateful | None, modules: Sequence[nn.Module]
    ) -> None:
        self.taken: dict[str, Tensor] = {}
        self.took_inner = False
        self._outer, self._movement = outer, movement
        self._inner, self._modules = inner, modules

    def copy(self, done: int) -> State:
        state = {_WEIGHTS: self._outer.weights.read()} | self._outer.state(wait=False)
        vectors = {name: state.pop(name) for name in sorted(state.keys() & _VECTORS)}
        rest = {
            "outer": state,
            "inner": None if self._inner is None else self._inner.state_dict(),
            "buffers": buffers_of(self._modules),
        }
        file = io.BytesIO()
        torch.save(rest, file)
        parts = {
            name: Part(vector if name == _WEIGHTS else vector.to("cpu", copy=True), self._movement)
            for name, vector in vectors.items()
        }
        return State(done, {}, parts, file.getvalue())

    def room(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Part]:
        if not _NEEDED <= {*names} <= _VECTORS:
            raise ValueError(f"its vectors {', '.join(names)} are not those of a state")
        return {name: Part(torch.zeros(self._outer.weights.length), self._movement) for name in names}

    def use(self, state: State) -> None:
        try:
            rest = torch.load(io.BytesIO(state.rest), map_location="cpu", weights_only=True)
            outer, inner, buffers = rest["outer"], rest["inner"], rest["buffers"]
            check_buffers(self._modules, buffers)
        except Exception as error:  # torch.load says neither which errors, nor always the same
            raise ValueError(f"it is not a state: {type(error).__name__}: {error}") from None
        self.took_inner = self._inner is not None and inner is not None
        if self._inner is not None and inner is not None:
            self._inner.load_state_dict(inner)  # before the weights, which some load as well
        elif self._inner is not None:
            warnings.warn(
                "a state without that of an inner optimizer was taken; it begins anew", stacklevel=4
            )
        vectors = {name: part.vector for name, part in state.parts.items()}
        with self._outer.weights.writing() as write:
            write(0, vectors.pop(_WEIGHTS))
        write_buffers(self._modules, buffers)
        self.taken = vectors | outer | {"local_steps_done": torch.tensor(state.step)}
