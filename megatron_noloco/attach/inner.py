"""The state of inner optimizer and schedule, as jobs give it to each other; optimizers that keep weights."""

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy, deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megatron_noloco.attach.adapter import EngineAdapter, Stateful, Stepped
from megatron_noloco.errors import UserError

_NEAR = 0.1  # of the norm of the weights: no moment is as near to them
PREFIX = "inner."  # of the names of vectors

Entry = dict[str, Any]
"""The state of a tensor: numbers by name, and None for what is a vector."""


def inner_state(inner: Stateful | Sequence[Stateful]) -> "InnerState":
    """Return this rank's state of an optimizer, or of several objects such as optimizer and schedule.

    Of an optimizer around others it is the state of these: DeepSpeed's ZeRO cannot load what its `state_dict`
    returns, and that of Megatron-core lacks the moments.

    Raises UserError for a model and for what has no state, and as `check_modes` does.
    """
    parts, contexts = list[Any](), list[Callable[[], AbstractContextManager[None]]]()
    for part in inner if isinstance(inner, Sequence) else [inner]:
        if isinstance(part, nn.Module) or not isinstance(part, Stateful):
            raise UserError(
                f"attach: inner is a {type(part).__name__}; give the optimizer, or a list of objects with "
                "state_dict and load_state_dict"
            )
        check_modes(part)
        packages = {cls.__module__.partition(".")[0] for cls in type(part).__mro__}
        inside: list[Any] = []
        if "deepspeed" in packages:
            from megatron_noloco.engine.zero import steps_another, with_weights

            if steps_another(part):
                inside = [part.optimizer]  # type: ignore[attr-defined]
                contexts.append(partial(with_weights, part))
        elif "megatron" in packages:
            from megatron_noloco.attach.megatron_optimizer import optimizers_in

            inside = list(optimizers_in(part))
        parts += map(_innermost, inside or [part])  # a schedule has none inside
    return InnerState(parts, contexts)


def _innermost(part: Any) -> Any:
    """Return the optimizer inside a wrapper such as Accelerate's; any other object as it is."""
    while isinstance(part, torch.optim.Optimizer) and isinstance(
        below := getattr(part, "optimizer", None), torch.optim.Optimizer
    ):
        part = below
    return part


class InnerState:
    """Joins the states of several objects; `inner_state` makes it.

    The ranks of another job may have other parts of the weights. So what torch's optimizers keep for each weight
    is given as vectors with the layout of the weights, and all else must be the same on all ranks.

    Args:
        parts: the same in all jobs.
        contexts: in which the optimizers have their parameters.

    Attributes:
        optimizers: those of torch among the parts.
    """

    def __init__(
        self, parts: Iterable[Any], contexts: Sequence[Callable[[], AbstractContextManager[None]]]
    ) -> None:
        self.optimizers, self._others = list[torch.optim.Optimizer](), list[Stateful]()
        for part in parts:
            if isinstance(part, torch.optim.Optimizer):
                self.optimizers.append(part)
            else:
                self._others.append(part)
        self._contexts = contexts

    def vectors(self, adapter: EngineAdapter) -> dict[str, Tensor]:
        """Return what the optimizers keep for each weight, by name, as copies in host memory.

        A weight for which nothing is kept under a name has zeros. Raises UserError, which says what an optimizer
        does, where it keeps something that is neither like a weight nor a number.
        """
        stepped, states, names = adapter.stepped(), list[Mapping[str, Any]](), set[str]()
        for tensor, _ in stepped:
            owner = next((one for one in self.optimizers if tensor in one.state), None)
            states.append({} if owner is None else owner.state[tensor])
            entry = {} if owner is None else _entry(owner, tensor)
            names |= {name for name, value in entry.items() if value is None}
        found = {}
        for name in sorted(names):
            kept = (state.get(name) for state in states)
            values = [
                torch.zeros_like(tensor) if one is None else one
                for (tensor, _), one in zip(stepped, kept, strict=True)
            ]
            found[PREFIX + name] = adapter.view(values).read()
        return found

    def rest(self, adapter: EngineAdapter) -> dict[str, Any]:
        """Return what is not in `vectors`, for `torch.save`; the same on all ranks.

        What a group has besides numbers, text and tensors, such as a function, is of the program: it is left out.
        Raises UserError where another object has more.
        """
        with self._entered():
            stepped, names = adapter.stepped(), adapter.names
            optimizers = [_rest_of(optimizer, stepped, names) for optimizer in self.optimizers]
        others = [with_plain_numbers(one.state_dict()) for one in self._others]
        for part, state in zip(self._others, others, strict=True):
            if not _can_be_read(state):
                raise UserError(f"{type(part).__name__} keeps more than numbers, text and tensors")
        return {"optimizers": with_plain_numbers(optimizers), "others": others}

    def load(self, adapter: EngineAdapter, vectors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        """Continue from `vectors` and `rest` of another job. A collective of the replica.

        Args:
            rest: "others" may be None: they stay as they are.

        Raises UserError where they are of other optimizers, or cannot be read; no optimizer is changed then.
        """
        own = _in_words([type(one).__name__ for one in self.optimizers], self._others)
        try:
            others = self._others if rest["others"] is None else list(rest["others"])
            theirs = _in_words([one["kind"] for one in rest["optimizers"]], others)
            entries = [
                entry for one in rest["optimizers"] for entry in (one["common"], *one["named"].values())
            ]
            fields = [field for entry in entries for field in entry.items()]
            for group in (group for one in rest["optimizers"] for group in one["groups"]):
                dict(group)
        except (KeyError, TypeError, ValueError, AttributeError):  # another version, or a liar
            raise UserError("its state cannot be read") from None
        if own.lower() != theirs.lower():
            raise UserError(
                f"inner is {own} here, and {theirs} where the state comes from; give all jobs the same"
            )
        for name, value in fields:
            if not (PREFIX + name in vectors if value is None else _is_number(value)):
                raise UserError(f"its {name} cannot be read")
        for part, state in zip(self._others, rest["others"] or (), strict=False):
            try:
                part.load_state_dict(state)
            except Exception as error:  # of a class that this package does not know
                raise UserError(f"{type(part).__name__} cannot load its state: {error}") from None
        with self._entered():
            filled = {name.removeprefix(PREFIX): _filled(adapter, one) for name, one in vectors.items()}
            for optimizer, given in zip(self.optimizers, rest["optimizers"], strict=True):
                _load(optimizer, given, _states(given, adapter, filled))

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context())
            yield


def _entry(optimizer: torch.optim.Optimizer, tensor: Tensor) -> Entry:
    """Return the entry of a tensor. Raises UserError for a state that is neither like the tensor nor a number."""
    found: Entry = {}
    keeps = f"{type(optimizer).__name__} keeps"
    for name, value in with_plain_numbers(optimizer.state.get(tensor, {})).items():
        if torch.is_tensor(value) and value.dim():
            if value.shape != tensor.shape or not value.is_floating_point():
                raise UserError(
                    f'{keeps} "{name}", of shape {list(value.shape)} and {value.dtype}, for a weight of shape '
                    f"{list(tensor.shape)}"
                )
            found[name] = None
        elif torch.is_tensor(value):
            found[name] = value.detach().to("cpu", copy=True)
        elif isinstance(value, int | float):
            found[name] = value
        elif value is not None:
            raise UserError(f'{keeps} "{name}", a {type(value).__name__}, for each weight')
    return found


def _rest_of(optimizer: torch.optim.Optimizer, stepped: Stepped, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the kind of an optimizer, the settings of its groups, and its entries.

    "common" is the entry that most tensors have, "named" has those of other parameters.
    """
    own = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    entries = [(_entry(optimizer, tensor), parameters) for tensor, parameters in stepped if id(tensor) in own]
    counted = Counter(repr(entry) for entry, _ in entries)
    common = next((one for one, _ in entries if repr(one) == counted.most_common(1)[0][0]), {})
    return {
        "kind": type(optimizer).__name__,
        "groups": [_settings(group) for group in optimizer.param_groups],
        "common": common,
        "named": {
            names[id(parameter)]: entry
            for entry, parameters in entries
            if repr(entry) != repr(common)
            for parameter in parameters
        },
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (torch.is_tensor(value) and not value.dim())


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in group.items()
        if name not in ("params", "param_names") and _is_setting(value)
    }


def _is_setting(value: object) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_is_setting, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, int | float | str | np.generic | Tensor)


def _can_be_read(state: object) -> bool:
    """Return whether torch.load takes what torch.save makes of a state, the contents of tensors left out."""
    file = io.BytesIO()
    try:
        torch.save(tree_map(lambda one: None if type(one) is Tensor else one, state), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # neither says which errors, nor always the same
        return False
    return True


def with_plain_numbers(value: Any) -> Any:
    """Return a state with Python's numbers in place of numpy's and of other kinds, which torch.load refuses."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int | float) and type(value) is not bool:
        return int(value) if isinstance(value, int) else float(value)
    if type(value) in (list, tuple):
        return type(value)(map(with_plain_numbers, value))
    if isinstance(value, MutableMapping):
        entries = [(with_plain_numbers(name), with_plain_numbers(one)) for name, one in value.items()]
        made = copy(value)  # also a Counter, as MultiStepLR has
        made.clear()
        made.update(dict(entries))
        return made
    return value


def _filled(adapter: EngineAdapter, vector: Tensor) -> list[Tensor]:
    """Return tensors like the stepped ones, with the elements of a vector. A collective of the replica."""
    values = [torch.zeros_like(tensor) for tensor, _ in adapter.stepped()]
    with adapter.view(values).writing() as write:
        write(0, vector)
    return values


def _states(
    given: Mapping[str, Any], adapter: EngineAdapter, filled: Mapping[str, Sequence[Tensor]]
) -> dict[int, dict[str, Any]]:
    """Return the state that each tensor gets, by its id, if it is the optimizer's to which `given` is.

    Args:
        given: as `_rest_of` returns it.
        filled: for each name of a vector, the values of all tensors.
    """
    states, names = {}, adapter.names
    for at, (tensor, parameters) in enumerate(adapter.stepped()):
        first = names.get(id(parameters[0])) if parameters else None
        entry: Entry = given["named"].get(first, given["common"])
        states[id(tensor)] = {
            name: filled[name][at] if value is None else deepcopy(value) for name, value in entry.items()
        }
    return states


def _load(
    optimizer: torch.optim.Optimizer, given: Mapping[str, Any], states: Mapping[int, dict[str, Any]]
) -> None:
    """Load the states of tensors, and the settings of groups where there are as many as here."""
    groups, settings = optimizer.state_dict()["param_groups"], given["groups"]
    numbered = {
        number: states[id(tensor)]
        for group, saved in zip(optimizer.param_groups, groups, strict=True)
        for tensor, number in zip(group["params"], saved["params"], strict=True)
        if states.get(id(tensor))
    }
    if len(groups) == len(settings):
        groups = [{**own, **theirs} for own, theirs in zip(groups, settings, strict=True)]
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def _in_words(kinds: Sequence[str], others: Sequence[Any]) -> str:
    return " and ".join([*kinds, f"{len(others)} other objects"] if others else kinds)


def check_modes(optimizer: object) -> None:
    """Raise UserError for an optimizer with other weights to train than to evaluate, also inside another one."""
    # Not getattr: of Megatron-core's ChainedOptimizer it is a property that fails.
    while (below := getattr(optimizer, "__dict__", {}).get("optimizer")) is not None:
        optimizer = below
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise UserError(
            f"attach: {type(optimizer).__name__} has other weights to train than to evaluate (train(), eval()), "
            "and keeps them in its state, which rounds do not exchange; use an optimizer without these modes"
        )


@torch.no_grad()
def check_no_weights(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for an optimizer whose state holds weights, such as a copy in fp32, or an average of them.

    A round would not move these. Call it when the optimizer has taken steps. Torch's own optimizers keep none.
    """
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
            raise UserError(
                f'attach: {type(optimizer).__name__} keeps weights of its own (state "{name}"), which rounds do '
                "not exchange; use an optimizer that keeps none"
            )
