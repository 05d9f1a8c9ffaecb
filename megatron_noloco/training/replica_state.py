"""What a trainer's job gives of its state to other jobs of a federation, and what it does with that of another."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.federation.states import FAST_WEIGHTS, Facts, Numbers, State, check_numbers, read_facts
from megatron_noloco.files import outside
from megatron_noloco.model.dropout import seed_dropout
from megatron_noloco.model.families import table_of
from megatron_noloco.outer import VECTORS, Rounds, rounds_from_lists, rounds_to_lists


class ReplicaState:
    """Copies the state of this rank, and uses that of another replica; a `federation.states.StateAdapter`.

    The state is the fast weights, the vectors of the outer and the inner optimizer, and their numbers: counters,
    schedule, loss scale. The counters of the monitor and the place in the data stay the job's own.

    Args:
        optimizer: name of the inner optimizer.
        seed: of the run.
        say: is called with lines for the log.
    """

    def __init__(
        self,
        engine: ReplicaEngine,
        outer: Rounds,
        optimizer: str,
        seed: int,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._engine, self._outer = engine, outer
        self._optimizer, self._seed, self._say = optimizer.lower(), seed, say
        layout = engine.parameter_layout()
        ends = pairwise(accumulate((part.length for part in layout), initial=0))
        self._groups = [slice(*pair) for pair in ends]  # of the inner optimizer, in the weights of this rank
        table, muon = table_of(engine.stage.architecture), self._optimizer == "muon"
        of_muon = [muon and table.find(part.parameters[0][0]).linear for part in layout]
        self._kinds = ["muon" if one else "others" for one in of_muon]

    def copy(self, done: int) -> State:
        outer = self._outer.state(wait=False)
        vectors = {name: outer[name].to("cpu", copy=True) for name in VECTORS if name in outer}
        inner: dict[str, dict[str, Any]] = {kind: {} for kind in self._kinds}
        for full_name, tensor in self._engine.tensors().items():
            name, _, group = full_name.rpartition(".")
            if name != FAST_WEIGHTS:
                inner[self._kinds[int(group)]][name] = None if tensor.dim() else tensor.item()
            if tensor.dim():
                if name not in vectors:
                    vectors[name] = torch.zeros(self._engine.weights.length)
                vectors[name][self._groups[int(group)]] = tensor
        facts = Facts(
            optimizer=self._optimizer,
            inner=inner,
            engine=self._engine.numbers(),
            rounds=rounds_to_lists(outer),
        )
        return State(done, asdict(facts), {name: vectors[name] for name in sorted(vectors)})

    def allocate(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
        read_facts(facts, names)
        return {name: torch.zeros(self._engine.weights.length) for name in names}

    def load(self, state: State) -> None:
        vectors = state.vectors
        found = check_numbers(state)
        inner, line = self._known_inner(found, vectors)
        if line:
            self._say(f" the inner optimizer {outside(line)} |")
        own = self._engine.numbers()  # a loss scale belongs to a precision, which may be another
        scale = {**own["loss_scale"], **_known(found.engine.get("loss_scale") or {}, own["loss_scale"])}
        numbers = {**own, **_known(found.engine, own), "loss_scale": scale}
        self._engine.restore(self._tensors(inner, vectors), numbers)
        outer = {name: vectors[name] for name in VECTORS if name in vectors}
        self._outer.restore(outer | rounds_from_lists(found.rounds))
        seed_dropout(self._seed, self._engine.groups, state.step)

    def _known_inner(self, facts: Facts, vectors: Collection[str]) -> tuple[dict[str, Numbers], str]:
        """Return what the inner optimizer takes over, and a line about the rest, as `known_fields` does."""
        if facts.optimizer != self._optimizer:
            return (
                {},
                f"starts anew: it is {self._optimizer} here, and {facts.optimizer} in the state taken over",
            )
        fields: dict[str, dict[str, bool]] = {kind: {} for kind in self._kinds}
        for full_name, tensor in self._engine.tensors().items():
            name, _, group = full_name.rpartition(".")
            if name != FAST_WEIGHTS:
                fields[self._kinds[int(group)]][name] = tensor.dim() > 0
        first = {kind: fields[kind] or self._first_fields(kind) for kind in fields}
        return known_fields(first, facts.inner, vectors)

    def _first_fields(self, kind: str) -> dict[str, bool]:
        """Return the fields without which an optimizer that keeps nothing yet cannot go on; see `known_fields`."""
        if kind == "muon":
            return {"inner.step": False, "inner.momentum_buffer": True}
        if self._optimizer == "sgd":
            return {}
        return {"inner.step": False, "inner.exp_avg": True, "inner.exp_avg_sq": True}

    def _tensors(
        self, inner: Mapping[str, Numbers], vectors: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of each group, as `ReplicaEngine.restore` takes them."""
        for group, (place, kind) in enumerate(zip(self._groups, self._kinds, strict=True)):
            yield f"{FAST_WEIGHTS}.{group}", vectors[FAST_WEIGHTS][place]
            for name, value in inner.get(kind, {}).items():
                yield (
                    f"{name}.{group}",
                    vectors[name][place].clone() if value is None else torch.tensor(value),
                )


def known_fields(
    own: Mapping[str, Mapping[str, bool]], theirs: Mapping[str, Mapping[str, Any]], vectors: Collection[str]
) -> tuple[dict[str, Numbers], str]:
    """Return the fields of another job's optimizer that this job's takes over, and a line about the rest.

    Where a field that is kept here is missing or cannot be read, the optimizer starts anew with all of its fields:
    a second moment that is zero after many steps makes the next steps too long.

    Args:
        own: for each kind of groups, the fields that are kept here, and whether a field is a vector. No fields:
            the optimizer keeps nothing yet, and takes all fields.
        theirs: see `Facts.inner`.
        vectors: names of those that have come.
    """
    known, others = dict[str, Numbers](), set[str]()
    for kind, fields in own.items():
        given = theirs.get(kind, {})
        for name in fields or given:
            value = given.get(name, "")
            if value is None:
                can_be_read = name in vectors and fields.get(name, True)
            else:
                can_be_read = type(value) in (int, float) and not fields.get(name, False)
            if not can_be_read:
                return {}, f"starts anew: {name} cannot be read in the state taken over"
        known[kind] = {name: given[name] for name in fields or given}
        others |= given.keys() - known[kind].keys()
    line = f"leaves out {', '.join(sorted(others))} of the state taken over, which it does not keep here"
    return known, line if others else ""


def _known(theirs: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of their numbers that this job has as well."""
    return {name: theirs[name] for name in own if name in theirs}
