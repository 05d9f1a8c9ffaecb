"""The state of a replica, as its ranks copy it for another job, and use that of another job (`takeover`)."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from megatron_noloco.outer import ROUNDS, VECTORS

Numbers = dict[str, int | float | None]

FAST_WEIGHTS = "fast_weights"  # the vector that every state has beside those of the outer optimizer


class NotTakenError(Exception):
    """Raised for a state that is not taken over. The message says why.

    Attributes:
        is_lost: whether the giver was lost, and may be asked again.
    """

    def __init__(self, why: str, is_lost: bool = False) -> None:
        super().__init__(why)
        self.is_lost = is_lost


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


_FACTS = TypeAdapter(Facts)


def read_facts(facts: Mapping[str, Any], names: Collection[str]) -> Facts:
    """Read the facts of a state with vectors of these names, strictly; raises NotTakenError."""
    try:
        found = _FACTS.validate_json(json.dumps(facts))
    except ValidationError:
        raise NotTakenError("its numbers are not those of a state") from None
    rounds = ROUNDS.keys() if "correction" in names else set()
    if not {FAST_WEIGHTS, VECTORS[0]} <= {*names} or found.rounds.keys() != rounds:
        raise NotTakenError(f"its vectors {', '.join(names)} are not those of a state")
    return found


class StateAdapter(Protocol):
    """What a job does with states. All methods are called on all ranks of the replica."""

    def copy(self, done: int) -> State:
        """Return a copy of the state after `done` local steps."""
        ...

    def allocate(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
        """Return where the vectors of these names go; raises NotTakenError where such a state does not fit."""
        ...

    def load(self, state: State) -> None:
        """Continue with a state that has come as a whole. Raises NotTakenError where `rest` does not fit."""
        ...
