"""What an attached job gives of its state to other jobs of a federation, and what it does with that of another.

The numbers are in the form of the trainer. A job of the trainer takes them and the vectors of an attached job, and
leaves the rest. An attached job gets from the trainer no state of a schedule, no settings of the optimizer, and no
buffers, and keeps its own.
"""

import io
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.attach.adapter import EngineAdapter
from megatron_noloco.attach.inner import PREFIX, InnerState
from megatron_noloco.attach.other_state import buffers_of, check_buffers, write_buffers
from megatron_noloco.errors import UserError
from megatron_noloco.federation.movement import Movement
from megatron_noloco.federation.states import FAST_WEIGHTS, NotTakenError, State
from megatron_noloco.files import outside
from megatron_noloco.outer import VECTORS, OuterOptimizer, rounds_from_lists, rounds_to_lists
from megatron_noloco.outer.vectors import HOST, number_tensor

_NEEDED = {FAST_WEIGHTS, VECTORS[0]}
_KIND = "others"  # the trainer's name for groups that Muon does not train


class JobState:
    """Copies the state of this rank, and uses that of another job; implements `federation.states.Keeper`.

    The state is weights, buffers, the outer optimizer's, and that of the inner optimizer.

    Args:
        movement: of the weights.
        inner: None: it begins anew.

    Attributes:
        inner_from: the local steps of the state of the inner optimizer that was taken last; -1: none was.
    """

    def __init__(
        self, outer: OuterOptimizer, movement: Movement, inner: InnerState | None, adapter: EngineAdapter
    ) -> None:
        self.inner_from = -1
        self._outer, self.movement = outer, movement
        self._inner, self._adapter = inner, adapter

    def copy(self, done: int) -> State:
        outer = self._outer.state(wait=False)
        vectors = {FAST_WEIGHTS: self._outer.weights.read()}
        vectors |= {name: vector.to(HOST, copy=True) for name, vector in outer.items() if name in VECTORS}
        inner, rest_of_inner, problem = self._copy_inner()
        rest = {"inner": rest_of_inner, "problem": problem, "buffers": buffers_of(self._adapter.modules)}
        file = io.BytesIO()
        torch.save(rest, file)
        facts = _facts_for_trainer(done, outer, inner, rest_of_inner)
        return State(done, facts, dict(sorted((vectors | inner).items())), file.getvalue())

    def _copy_inner(self) -> tuple[dict[str, Tensor], dict[str, Any] | None, str]:
        """Return vectors and rest of the inner optimizer; or no rest, and why there is none."""
        if self._inner is None:
            return {}, None, "it was not given to attach there"
        try:
            return self._inner.vectors(self._adapter), self._inner.rest(self._adapter), ""
        except UserError as error:
            return {}, None, str(error)

    def room(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
        if not {*names} >= _NEEDED:
            raise NotTakenError(f"its vectors {', '.join(names)} are not those of a state")
        length = self._outer.weights.length
        return {name: torch.zeros(length, dtype=torch.float32, device=HOST) for name in names}

    def use(self, state: State) -> None:
        try:
            rounds = rounds_from_lists(state.facts["rounds"])
            rest = _read(state.rest) if state.rest else _rest_of_trainer(state.facts)
            if rest["buffers"] is not None:
                check_buffers(self._adapter.modules, rest["buffers"])
        except Exception as error:  # torch.load says neither which errors, nor always the same
            raise NotTakenError(f"it is not a state: {type(error).__name__}: {error}") from None
        vectors = state.vectors
        inner = {name: vector for name, vector in vectors.items() if name.startswith(PREFIX)}
        if self._inner is not None and self._use_inner(self._inner, inner, rest):
            self.inner_from = state.step
        with self._outer.weights.writing() as write:
            write(0, vectors[FAST_WEIGHTS])
        if rest["buffers"] is not None:
            write_buffers(self._adapter.modules, rest["buffers"])
        self._outer.restore({name: vectors[name] for name in VECTORS if name in vectors} | rounds)

    def _use_inner(self, own: InnerState, vectors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> bool:
        """Continue from the state of another inner optimizer; return whether all of it was there."""
        problem = str(rest["problem"])
        if not problem:
            try:
                own.load(self._adapter, vectors, rest["inner"])
            except UserError as error:
                problem = str(error)
        if problem:
            warnings.warn(outside(f"the inner optimizer begins anew: {problem}"), stacklevel=5)
        return not problem and rest["inner"]["others"] is not None


def _read(rest: bytes) -> dict[str, Any]:
    found = torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True)
    return {name: found[name] for name in ("inner", "problem", "buffers")}


def _facts_for_trainer(
    done: int, outer: Mapping[str, Tensor], vectors: Collection[str], inner: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the numbers of a state after `done` local steps, for JSON.

    Args:
        outer: see `OuterOptimizer.state`.
        vectors: names of those of the inner optimizer.
        inner: see `InnerState.rest`; None: there is none.
    """
    optimizers: list[dict[str, Any]] = [] if inner is None else inner["optimizers"]
    entry: dict[str, int | float | None] = dict.fromkeys(vectors)
    for optimizer in optimizers:
        for name, value in optimizer["common"].items():
            if value is not None:
                entry[PREFIX + name] = value.item() if torch.is_tensor(value) else value
    return {
        "optimizer": " and ".join(one["kind"] for one in optimizers).lower(),
        "inner": {_KIND: entry},
        "engine": {"global_steps": done, "skipped_steps": 0, "schedule_step": None, "loss_scale": {}},
        "rounds": rounds_to_lists(outer),
    }


def _rest_of_trainer(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the trainer's state as what `JobState` reads of an attached job's."""
    kinds: Mapping[str, Mapping[str, float | None]] = facts["inner"]
    optimizers: list[dict[str, Any]] = [
        {
            "kind": facts["optimizer"] if len(kinds) == 1 else f"{facts['optimizer']} of {kind}",
            "groups": [],
            "common": {name.removeprefix(PREFIX): _number(value) for name, value in numbers.items()},
            "named": {},
        }
        for kind, numbers in kinds.items()
    ]
    return {"inner": {"optimizers": optimizers, "others": None}, "problem": "", "buffers": None}


def _number(value: float | None) -> Any:
    """Return a number as torch's optimizers keep it; DeepSpeed's kernels count in Python's integers."""
    return number_tensor(value) if isinstance(value, float) else value
