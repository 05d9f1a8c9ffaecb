"""What jobs give each other of their inner optimizers: fields that are known, of torch, DeepSpeed, Megatron-core.

The ranks of another job may have other parts of the weights. So what is kept for each weight is given as vectors
with the layout of the weights, and the numbers must be the same on all ranks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megatron_noloco.attach.registered import Functions, check_alike, plain_numbers
from megatron_noloco.attach.shards import Engine, Shard, local_part
from megatron_noloco.errors import UserError
from megatron_noloco.federation.states import MOMENTS, PREFIX
from megatron_noloco.outer.vectors import HOST, number_tensor

# The known fields beside MOMENTS: with one number, and those of a group that change in a run.
_NUMBERS = {"mu_product", "step"}
_SETTINGS = {"initial_lr", "lr", "step"}
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_NEEDED = {  # fields without which an optimizer that has a state fails, by package and class
    **dict.fromkeys(("torch Adam", "torch AdamW", "torch RAdam"), _ADAM),
    **dict.fromkeys(("deepspeed FusedAdam", "deepspeed DeepSpeedCPUAdam"), _ADAM),
    "torch NAdam": {*_ADAM, "mu_product"},
    "torch Adamax": {"step", "exp_avg", "exp_inf"},
}

Entry = dict[str, Any]
"""The state of a tensor that is stepped: numbers by the name of the field, and None for what is in a vector."""


@runtime_checkable
class Stateful(Protocol):
    """Has a state that goes with the weights: the inner optimizer, a schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Inner:
    """The optimizers and schedules of a loop, the same in all jobs.

    Of an optimizer around others it is the others: DeepSpeed's ZeRO cannot load what its `state_dict` returns, and
    that of Megatron-core lacks the moments.

    Args:
        parts: what was given to `attach`.

    Attributes:
        kind: names of the optimizers' classes, as the trainer writes them.
        functions: that return and load the states of all other objects.

    Raises UserError for a model and for what has no state, for an optimizer of weights that rounds do not
    exchange, and as `check_modes` does.
    """

    def __init__(self, engine: Engine, parts: Stateful | Sequence[Stateful]) -> None:
        self._engine = engine
        given = parts if isinstance(parts, Sequence) else [parts]
        for part in given:
            if isinstance(part, nn.Module) or not isinstance(part, Stateful):
                raise UserError(
                    f"attach: inner is a {type(part).__name__}; give the optimizer, or a list of objects with "
                    "state_dict and load_state_dict"
                )
            check_modes(part)
        inside: list[Any] = [one for part in given for one in _inside(part)]
        optimizers = [one for one in inside if isinstance(one, torch.optim.Optimizer)]
        _check_weights(optimizers, engine)
        self.kind = " and ".join(type(one).__name__ for one in optimizers).lower()
        # A single one has the trainer's name for groups that Muon does not train.
        self._optimizers = {
            f"others {number}" if number else "others": one for number, one in enumerate(optimizers)
        }
        self.functions: Functions = {
            f"part {number} of inner": (one.state_dict, partial(_load_alike, one))
            for number, one in enumerate(inside)
            if one not in optimizers
        }

    def facts(self) -> dict[str, Any]:
        """Return numbers and settings, for JSON; the same on all ranks.

        For each optimizer it is the entry of most of its tensors, in "named" other entries by names of parameters,
        and in "settings" those of the groups. Raises UserError, which names them, for unknown fields.
        """
        facts, kept, usual = dict[str, Any](), dict[Tensor, Entry](), dict[Tensor, Entry]()
        for key, optimizer in self._optimizers.items():
            entries = {one: _entry(optimizer, one) for one in self._engine.stepped if one in optimizer.state}
            counted = Counter[Any](tuple(entry.items()) for entry in entries.values())
            facts[key] = dict(max(counted, key=counted.__getitem__, default=()))
            kept |= entries
            usual |= dict.fromkeys(entries, facts[key])
        named = {
            one.name: kept.get(one.tensor, {})
            for one in self._engine.shards
            if one.name and kept.get(one.tensor, {}) != usual.get(one.tensor)
        }
        settings = (
            {name: _number(group[name]) for name in _SETTINGS & group.keys()} for group in self._groups()
        )
        return facts | {"named": named, "settings": {str(at): one for at, one in enumerate(settings)}}

    def _groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizers.values() for group in one.param_groups]

    @torch.no_grad()
    def vectors(self) -> dict[str, Tensor]:
        """Return what is kept for each weight, by field, as copies in host memory; zeros where nothing is kept."""
        kept = {
            (tensor, name): value
            for optimizer in self._optimizers.values()
            for tensor, state in optimizer.state.items()
            for name, value in state.items()
            if name in MOMENTS and value is not None
        }
        found = {}
        for name in sorted({name for _, name in kept}):
            vector = found[PREFIX + name] = torch.zeros(self._engine.length, dtype=torch.float32, device=HOST)
            for shard, part in self._parts_of(vector):
                if (shard.tensor, name) in kept:
                    part.copy_(shard.of(kept[shard.tensor, name]))
        return found

    def _parts_of(self, vector: Tensor) -> Iterator[tuple[Shard, Tensor]]:
        """Yield all shards, each with its part of a vector."""
        yield from zip(
            self._engine.shards, vector.split([one.length for one in self._engine.shards]), strict=True
        )

    def check(self, kind: str, facts: Mapping[str, Any], vectors: Mapping[str, Tensor]) -> None:
        """Raise UserError where a state is of other optimizers than these, or cannot be read."""
        keys = facts.keys() - {"named", "settings"}
        if len(keys) != len(self._optimizers):  # of the trainer, with Muon
            kind = f"{kind} for {' and '.join(sorted(keys))}"
        if self.kind != kind:
            raise UserError(
                f"inner is {self.kind} here, and {kind} where the state comes from; give all jobs the same"
            )
        try:
            entries = [*(facts[key] for key in self._optimizers), *facts.get("named", {}).values()]
            fields = [field for entry in entries for field in entry.items()]
            for group in facts.get("settings", {}).values():
                fields += [(name, group[name]) for name in _SETTINGS & group.keys()]
        except (AttributeError, KeyError, TypeError, ValueError):  # another version, or a liar
            raise UserError("its state cannot be read") from None
        for full_name, value in fields:
            name = full_name.removeprefix(PREFIX)
            is_vector = value is None and name in MOMENTS and full_name in vectors
            if not is_vector and not (name in _NUMBERS | _SETTINGS and type(value) in (int, float)):
                raise UserError(f"its {name} cannot be read")
        for key, optimizer in self._optimizers.items():
            needed = {PREFIX + name for name in _needed(optimizer)}
            for entry in self._entries(optimizer, facts[key], facts.get("named", {})).values():
                if missing := sorted(needed - entry.keys()):
                    raise UserError(f"its {missing[0].removeprefix(PREFIX)} is missing")

    def _entries(
        self, optimizer: torch.optim.Optimizer, usual: Entry, named: Mapping[str, Entry]
    ) -> dict[int, Entry]:
        """Return the entries, but empty ones, of an optimizer's tensors, which torch numbers from 0."""
        names = {one.tensor: one.name for one in reversed(self._engine.shards)}
        stepped = (one for group in optimizer.param_groups for one in group["params"])
        return {
            number: entry
            for number, one in enumerate(stepped)
            if one in names and (entry := named.get(names[one], usual))
        }

    def load(self, facts: Mapping[str, Any], vectors: Mapping[str, Tensor]) -> list[str]:
        """Continue from `facts` and `vectors` of another job, which `check` has accepted. A collective.

        Settings are used where there are as many groups as here; else a line is returned. A trainer's states have
        no settings.
        """
        named = facts.get("named", {})
        entries = (*(facts[key] for key in self._optimizers), *named.values())
        fields = sorted({name for entry in entries for name, value in entry.items() if value is None})
        moments = {name: self._filled(vectors[name]) for name in fields}
        with self._engine.with_parameters():
            for key, optimizer in self._optimizers.items():
                stepped = [one for group in optimizer.param_groups for one in group["params"]]
                state = {
                    number: _state(entry, {name: moments[name][stepped[number]] for name in moments})
                    for number, entry in self._entries(optimizer, facts[key], named).items()
                }
                groups = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({"state": state, "param_groups": groups})
        groups, settings = self._groups(), facts.get("settings", {}).values()
        if settings and len(groups) != len(settings):
            return [
                f"inner keeps its own learning rates: it has {len(groups)} groups of parameters here, and "
                f"{len(settings)} where the state comes from"
            ]
        for group, theirs in zip(groups, settings, strict=False):
            for name in _SETTINGS & group.keys() & theirs.keys():
                own, given = group[name], theirs[name]
                group[name] = torch.full_like(own, given) if torch.is_tensor(own) else given
        return []

    def _filled(self, vector: Tensor) -> dict[Tensor, Tensor]:
        """Return tensors like the stepped ones, with the elements of a vector. A collective of the replica."""
        filled = {tensor: torch.zeros_like(tensor) for tensor in self._engine.stepped}
        for shard, part in self._parts_of(vector):
            shard.of(filled[shard.tensor]).copy_(part)
        self._engine.share(list(filled.values()))
        return filled


def _check_weights(optimizers: Iterable[torch.optim.Optimizer], engine: Engine) -> None:
    """Raise UserError where an optimizer steps weights that are not the engine's."""
    exchanged = {id(one) for one in engine.stepped}
    for optimizer in optimizers:
        stepped = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        if others := [list(one.shape) for one in stepped if id(one) not in exchanged]:
            raise UserError(
                f"attach: {type(optimizer).__name__} steps {len(others)} tensors (the first of shape {others[0]}) "
                "that are no weights of the attached model, so rounds would not exchange them; make the optimizer "
                "after the model is wrapped or copied, and attach all modules that it trains"
            )


def _inside(part: Any) -> Iterator[Any]:
    """Yield the optimizers inside of one of DeepSpeed, Megatron-core or Accelerate; any other object as it is."""
    if hasattr(part, "chained_optimizers"):
        for one in part.chained_optimizers:
            yield from _inside(one)
        return
    # Schedules have an optimizer, too. One of Megatron-core's has None where this rank has no weights for it.
    below = getattr(part, "__dict__", {}).get("optimizer", part) if hasattr(part, "param_groups") else part
    if below is part:
        yield part
    elif below is not None:
        yield from _inside(below)


def _entry(optimizer: torch.optim.Optimizer, tensor: Tensor) -> Entry:
    entry, unknown = Entry(), list[str]()
    for name, value in sorted(optimizer.state[tensor].items()):
        if name in MOMENTS and _is_moment(value, tensor):
            entry[PREFIX + name] = None
        elif name in _NUMBERS and prod(getattr(value, "shape", ())) == 1:
            entry[PREFIX + name] = _number(value)
        elif value is not None:
            unknown.append(name)
    if unknown:
        raise UserError(
            f"{type(optimizer).__name__} keeps {', '.join(unknown)}, which other jobs cannot take over"
        )
    return entry


def _needed(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the fields without which an optimizer cannot take a step from a state that is not empty."""
    classes = (f"{one.__module__.partition('.')[0]} {one.__name__}" for one in type(optimizer).__mro__)
    found = next((_NEEDED[name] for name in classes if name in _NEEDED), set[str]())
    keeps_most = any(group.get("amsgrad") for group in optimizer.param_groups)
    return found | {"max_exp_avg_sq"} if found and keeps_most else found


def _load_alike(part: Stateful, state: Any) -> None:
    """Load the state of another job's schedule. Raises UserError for a state that could not be this schedule's."""
    own = plain_numbers(part.state_dict())
    check_alike(own, state)
    # A schedule of torch makes each value an attribute, which would replace a method.
    if methods := [name for name in state.keys() - own.keys() if hasattr(type(part), str(name))]:
        raise UserError(f"it has {methods[0]}, which is no value here")
    part.load_state_dict(state)


def _is_moment(value: Any, tensor: Tensor) -> bool:
    """Return whether this is a plain tensor like another one; one of 8 bits has a class of its own."""
    is_plain = type(local_part(value)) in (Tensor, nn.Parameter)
    return is_plain and value.is_floating_point() and value.shape == tensor.shape


def _state(entry: Entry, moments: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of a tensor as optimizers keep it: torch's count in tensors, DeepSpeed's in integers."""
    return {
        name.removeprefix(PREFIX): moments[name]
        if value is None
        else number_tensor(value)
        if isinstance(value, float)
        else value
        for name, value in entry.items()
    }


def _number(value: Any) -> int | float:
    """Return a number as JSON has it; numpy's and tensors are not."""
    return value.item() if hasattr(value, "item") else value


def check_modes(optimizer: object) -> None:
    """Raise UserError for an optimizer with other weights to train than to evaluate, also inside another one."""
    for one in _inside(optimizer):
        if all(callable(getattr(one, mode, None)) for mode in ("train", "eval")):
            raise UserError(
                f"attach: {type(one).__name__} has other weights to train than to evaluate (train(), eval()), "
                "and keeps them in its state, which rounds do not exchange; use an optimizer without these modes"
            )
