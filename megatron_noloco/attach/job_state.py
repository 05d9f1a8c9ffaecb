"""The state of a rank beside model and optimizer: as a checkpoint keeps it, and as jobs of a federation give it.

What is given are facts in the form of the trainer, vectors, and a rest. A job of the trainer takes facts and
vectors. An attached job keeps its own buffers, settings of the optimizer and schedule where the trainer gives.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.attach.first_state import buffers_of, digest_of_weights, write_buffers
from megatron_noloco.attach.inner import Inner
from megatron_noloco.attach.registered import Functions, bytes_of, loaded, read, saved
from megatron_noloco.attach.shards import Engine
from megatron_noloco.errors import UserError
from megatron_noloco.federation.states import FAST_WEIGHTS, NotTakenError, State, check_numbers, read_facts
from megatron_noloco.files import outside
from megatron_noloco.outer import VECTORS, OuterOptimizer, rounds_from_lists, rounds_to_lists
from megatron_noloco.outer.vectors import HOST, number_tensor

_SAVED = ("slow_weights", "local_steps_done", "first_weights", "first_buffers")
_INNER = "the inner optimizer"


class JobState:
    """The outer optimizer's state, the inner's, weights, buffers, and what is registered.

    Implements `federation.states.StateAdapter`.

    Args:
        inner: None: in a state of another job it begins anew.
        first: digests of the weights and of the buffers with which training began.

    Attributes:
        inner_from: the local steps of the state of `inner` that was taken over last; -1: none was.
    """

    def __init__(
        self,
        engine: Engine,
        outer: OuterOptimizer,
        inner: Inner | None,
        registered: Functions,
        first: Mapping[str, str],
    ) -> None:
        self._engine, self.outer, self._inner = engine, outer, inner
        self._registered, self._first = registered, first
        buffers = partial(buffers_of, engine), partial(write_buffers, engine)
        self._beside: Functions = {**registered, "the model's buffers": buffers}
        self.inner_from = -1

    def state_dict(self, done: int) -> dict[str, Tensor]:
        """Return what `restore` continues from, live, with the digest of the present weights."""
        found = self.outer.state() | {
            "local_steps_done": number_tensor(done),
            "first_weights": tensor_of(self._first["weights"]),
            "first_buffers": tensor_of(self._first["buffers"]),
            "weights": tensor_of(digest_of_weights(self._engine)),
        }
        if self._registered:
            states = saved(self._registered)
            for name, state in states.items():
                if isinstance(state, str):
                    raise UserError(f"registered {name!r}: {state}")
            found["registered"] = torch.frombuffer(bytearray(bytes_of(states)), dtype=torch.uint8)
        return found

    def restore(self, state: dict[str, Tensor]) -> int:
        """Continue from what `state_dict` returned; return the local steps done."""
        self.outer.restore(state)
        states = read(state["registered"].cpu().numpy().tobytes()) if "registered" in state else {}
        unknown = sorted(states.keys() - self._registered.keys())
        dropped = [f"{name} begins anew: the state has it, but it is not registered" for name in unknown]
        _warn(loaded(self._registered, states) + dropped)
        return int(state["local_steps_done"])

    def copy(self, done: int) -> State:
        outer = self.outer.state(wait=False)
        vectors = {name: vector.to(HOST, copy=True) for name, vector in outer.items() if name in VECTORS}
        vectors[FAST_WEIGHTS] = self._engine.read()
        facts: dict[str, Any] = {
            "optimizer": "",
            "inner": {},
            "engine": {"global_steps": done, "skipped_steps": 0, "schedule_step": None, "loss_scale": {}},
            "rounds": rounds_to_lists(outer),
        }
        states = saved(self._beside, for_all_ranks=True)
        if self._inner is None:
            states[_INNER] = "it was not given to attach there"
        else:
            states |= saved(self._inner.functions, for_all_ranks=True)
            try:
                facts |= {"optimizer": self._inner.kind, "inner": self._inner.facts()}
                vectors |= self._inner.vectors()
            except UserError as error:
                states[_INNER] = str(error)
        return State(done, facts, dict(sorted(vectors.items())), bytes_of(states))

    def allocate(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
        read_facts(facts, names)
        length = self._engine.length
        return {name: torch.zeros(length, dtype=torch.float32, device=HOST) for name in names}

    def load(self, state: State) -> None:
        rounds = rounds_from_lists(check_numbers(state).rounds)
        try:
            states = dict(read(state.rest)) if state.rest else None  # a job of the trainer gives none
        except Exception as error:  # torch.load says neither which errors, nor always the same
            raise NotTakenError(f"it is not a state: {type(error).__name__}: {error}") from None
        if self._inner is not None:
            self._use_inner(self._inner, state, states)
        _warn(loaded(self._registered, {}) if states is None else loaded(self._beside, states))
        with self._engine.writing() as write:
            write(0, state.vectors[FAST_WEIGHTS])
        vectors = {name: vector for name, vector in state.vectors.items() if name in VECTORS}
        self.outer.restore(vectors | rounds)

    def _use_inner(self, inner: Inner, state: State, states: Mapping[str, Any] | None) -> None:
        """Continue from the state of another inner optimizer, or have all of it begin anew.

        Args:
            states: of a schedule and the like; None: they go on as they are.
        """
        try:
            if states and _INNER in states:
                raise UserError(str(states[_INNER]))
            inner.check(state.facts["optimizer"], state.facts["inner"], state.vectors)
            if states is not None and (lines := loaded(inner.functions, states)):
                raise UserError(lines[0])
        except UserError as error:
            _warn([f"{_INNER} begins anew: {error}"])
            return
        _warn(inner.load(state.facts["inner"], state.vectors))
        if states is not None:
            self.inner_from = state.step


def check_state(state: Mapping[str, Tensor], engine: Engine) -> None:
    """Raise UserError for a state that was not saved together with the present weights."""
    if missing := [name for name in _SAVED if name not in state]:
        raise UserError(
            f"attach: state has no {missing[0]}; it must be what Attached.state_dict returned, or None"
        )
    if (length := len(state["slow_weights"])) != engine.length:
        raise UserError(
            f"attach: the state is of {length} weights, this rank has {engine.length}; each rank needs the one "
            "that it saved itself"
        )
    saved = state.get("weights")  # a loop that saves its weights rounded leaves it out
    if saved is not None and hexadecimal(saved) != digest_of_weights(engine):
        raise UserError(
            "attach: the model is not the one this state was saved with: load its checkpoint first, with the "
            "optimizer's state, and give each rank the state that it saved itself"
        )


def tensor_of(digest: str) -> Tensor:
    """Return a hexadecimal digest as a state holds it: uint8, shape [bytes]."""
    return torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)


def hexadecimal(digest: Tensor) -> str:
    """Return a digest that a state holds."""
    return digest.cpu().numpy().tobytes().hex()


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        warnings.warn(outside(line), stacklevel=6)
