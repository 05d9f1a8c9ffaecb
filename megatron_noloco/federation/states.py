"""The state of a replica, as its ranks copy it for another job, and use that of another job.

Every number of another job's state is checked here before any of it is used (`check_numbers`): a member of the
federation can spoil what it gives, and must not end the job that takes it.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from megatron_noloco.job.activity import line_of
from megatron_noloco.job.agreement import gather_from_all_ranks
from megatron_noloco.outer import ROUNDS, VECTORS
from megatron_noloco.outer.finite_mean import MEASURED
from megatron_noloco.settings import MOST_SLOTS

Value = TypeVar("Value")
Numbers = dict[str, int | float | None]

FAST_WEIGHTS = "fast_weights"  # the vector that every state has beside those of the outer optimizer
PREFIX = "inner."  # of the names of the inner optimizer's fields
MOST_STEPS = 2**53  # a float holds each whole number up to here
_LARGEST = 2.0**100  # far above any number of a state, and in the range of fp32
_COUNTS = {  # the least and the greatest value of each whole number
    "step": (0, 2**30),  # kernels have 32 bits for the steps of the inner optimizer
    **dict.fromkeys(("global_steps", "global_samples", "skipped_steps"), (0, MOST_STEPS)),
    **dict.fromkeys(("cur_iter", "cur_hysteresis"), (0, MOST_STEPS)),
    **dict.fromkeys(("schedule_step", "last_overflow_iter"), (-1, MOST_STEPS)),
}
_RANGES = {
    "lr": (0, 1e4),
    "initial_lr": (0, 1e4),
    "mu_product": (0, 1),
    "cur_scale": (1e-30, _LARGEST),
    **_COUNTS,
}
_NOT_NEGATIVE = {"exp_avg_sq", "exp_inf", "max_exp_avg_sq"}
_DUE = 2  # in a row of `Round.numbers`, after fragment and round; then come what was measured, and the group
_GROUP_FROM = _DUE + 1 + len(MEASURED)
MOMENTS = {"exp_avg", "momentum_buffer", *_NOT_NEGATIVE}  # fields with a number for each weight


class NotTakenError(Exception):
    """Raised for a state that is not taken over. The message says why."""


class State(NamedTuple):
    """The state of a replica after `step` local steps, as one of its ranks has it.

    Attributes:
        facts: for JSON; the leader's are given.
        vectors: what this rank has of each canonical vector, fp32 in host memory, by name; all ranks have the same
            names in the same order.
        rest: what is no such vector; the leader's is given.
    """

    step: int
    facts: dict[str, Any]
    vectors: dict[str, Tensor]
    rest: bytes = b""


@dataclass(frozen=True)
class Facts:
    """The numbers of a state, which both the trainer and an attached job write.

    Attributes:
        optimizer: name of the inner optimizer.
        inner: for each kind of its groups, its numbers by name; None for a vector. May have other values as well.
        engine: see `engine.state.numbers_of`.
        rounds: see `OuterOptimizer.state`.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    optimizer: str
    inner: dict[str, dict[str, Any]]
    engine: dict[str, int | float | Numbers | None]
    rounds: dict[str, list[Any]]

    def numbers(self) -> Iterator[tuple[str, Any]]:
        """Yield the values of the inner optimizer and of the engine, with their names."""
        yield from self.engine.items()
        for fields in (self.engine.get("loss_scale"), *self.inner.values()):
            for name, value in fields.items() if isinstance(fields, dict) else ():
                yield from value.items() if isinstance(value, dict) else ((name, value),)


_FACTS = TypeAdapter(Facts)
_Number = Annotated[float, Field(ge=-1, le=_LARGEST, allow_inf_nan=False)]
_Count = Annotated[int, Field(gt=0, le=MOST_STEPS)]
_ROUNDS = TypeAdapter(  # the values of `rounds`
    tuple[Annotated[list[list[_Number]], Field(min_length=1)], tuple[_Count, _Count]],
    config=ConfigDict(strict=True),
)


def read_facts(facts: Mapping[str, Any], names: Collection[str]) -> Facts:
    """Return the facts of a state with vectors of these names. Raises NotTakenError where a number is wrong.

    A number with a known name has its type and its range. Any other number is finite.
    """
    try:
        found = _FACTS.validate_json(json.dumps(facts))
    except (ValueError, TypeError, RecursionError):
        raise NotTakenError("its numbers are not those of a state") from None
    rounds = ROUNDS.keys() if "correction" in names else set()
    if not {FAST_WEIGHTS, VECTORS[0]} <= {*names} or found.rounds.keys() != rounds:
        raise NotTakenError(f"its vectors {', '.join(names)} are not those of a state")
    for name, value in found.numbers():
        if not _is_sound(name.removeprefix(PREFIX), value):
            raise NotTakenError(f"its {name} is {value!r:.40}, which no state has")
    done, skipped = (dict[str, Any](found.engine).get(name, 0) for name in ("global_steps", "skipped_steps"))
    if skipped > done:
        raise NotTakenError(f"its skipped_steps are {skipped} of {done} steps")
    if rounds and not _are_sound(found.rounds):
        raise NotTakenError("its rounds that are not merged yet cannot be read")
    return found


def _is_sound(name: str, value: Any) -> bool:
    """Return whether a state may have this value under this name."""
    is_number = type(value) in (int, float)
    if name in MOMENTS:
        return value is None
    if value is None and name == "schedule_step":
        return True
    if name in _RANGES:
        least, most = _RANGES[name]
        return is_number and least <= value <= most and not (name in _COUNTS and value % 1)
    if name == "loss_scale":
        return isinstance(value, dict)
    return not is_number or -_LARGEST <= value <= _LARGEST  # False for NaN


def _are_sound(rounds: Mapping[str, list[Any]]) -> bool:
    """Return whether each row is that of a fragment of its own, as `Round.numbers` returns it."""
    try:
        rows, (_, fragments) = _ROUNDS.validate_json(json.dumps([rounds[name] for name in ROUNDS]))
    except ValidationError:
        return False
    if {len(row) for row in rows} != {len(rows[0])} or len(rows[0]) <= _GROUP_FROM:
        return False
    for row in rows:
        places, group = row[: _DUE + 1], row[_GROUP_FROM:]
        if min(row[:_GROUP_FROM]) < 0 or max(places) > MOST_STEPS or row[0] >= fragments:
            return False
        if any(number % 1 for number in places + group) or not 0 <= max(group) < MOST_SLOTS:
            return False
    return len({row[0] for row in rows}) == len(rows)


def check_step(step: int, least: int, steps: int | None) -> None:
    """Raise NotTakenError for the step of a state that is of no use, or of no run.

    Args:
        least: local steps that a state must have.
        steps: of the run; None: not known.
    """
    if step < least:
        raise NotTakenError(f"it is at local step {step} by now, as it was started anew")
    if step > (MOST_STEPS if steps is None else steps):
        raise NotTakenError(f"it is said to be beyond the last local step of the run, {steps or MOST_STEPS}")


def check_numbers(state: State) -> Facts:
    """Return the facts of a state that has come as a whole, once all of its numbers are checked. A collective.

    Call it before anything of the state is used. Raises NotTakenError on all ranks where it raises it on any: the
    ranks have different parts of the vectors.
    """
    return agreed(lambda: _checked(state))


def _checked(state: State) -> Facts:
    check_step(state.step, 0, None)
    found = read_facts(state.facts, state.vectors)
    for name, vector in state.vectors.items():
        if not vector.numel():
            continue
        least, most = (float(bound) for bound in vector.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):  # either is NaN where an element is
            raise NotTakenError(f"its {name} is not finite")
        if least < 0 and name.removeprefix(PREFIX) in _NOT_NEGATIVE:
            raise NotTakenError(f"its {name} has negative numbers")
    (local_steps, _), rows = found.rounds.get("delayed_with", (0, 0)), found.rounds.get("delayed_rounds", ())
    if any(row[_DUE] > state.step + local_steps for row in rows):
        raise NotTakenError("its rounds that are not merged yet are due too late")
    return found


def agreed(work: Callable[[], Value]) -> Value:
    """Do something on all ranks. Raises NotTakenError on all where it raises it on any. A collective."""
    found, why = list[Value](), ""
    try:
        found.append(work())
    except NotTakenError as error:
        why = line_of(error)
    for text in gather_from_all_ranks(why):
        if text:
            raise NotTakenError(text)
    return found[0]


class StateAdapter(Protocol):
    """What a job does with states. All methods are called on all ranks of the replica."""

    def copy(self, done: int) -> State:
        """Return a copy of the state after `done` local steps."""
        ...

    def allocate(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
        """Return where the vectors of these names go; raises NotTakenError as `read_facts` does."""
        ...

    def load(self, state: State) -> None:
        """Continue with a state that has come as a whole.

        Raises NotTakenError, on all ranks and before anything of the state is used, as `check_numbers` does, and
        where `rest` cannot be read.
        """
        ...
