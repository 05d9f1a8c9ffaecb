"""The state of another job in a trainer's job: no number of it harms the job."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.federation.states import NotTakenError, State
from megatron_noloco.outer import NoRounds
from megatron_noloco.plans.routing import Routing
from megatron_noloco.training.replica_state import ReplicaState
from tests.kit.ranks import run_ranks
from tests.kit.states import WRONG, changed, leaves
from tests.kit.tiny import MUON, build, microbatch, tiny

WSD = {"scheduler": {"type": "WSD", "params": {"total_num_steps": 50, "decay_num_steps": 10}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}}


class Job:
    """An engine on one rank, and its state."""

    def __init__(self, raw: Any, steps: int) -> None:
        self.config, self.groups, stage = build(raw, 1)
        self.engine = ReplicaEngine(stage, self.groups, self.config.as_deepspeed())
        self.routes, self.lines = Routing(1, self.config.microbatches, 0, "off").straight(), list[str]()
        kind = self.config.optimizer.type
        self.state = ReplicaState(self.engine, NoRounds(self.engine.weights), kind, 1, self.lines.append)
        for _ in range(steps):
            self.local_step()

    def local_step(self) -> Tensor:
        self.engine.train_batch(
            lambda replica, index: microbatch(self.config, self.groups, 0, replica, index), self.routes
        )
        return torch.cat([part.flatten() for part in self.engine.weights.parts()])

    def take(self, given: State) -> None:
        places = self.state.allocate(given.facts, list(given.vectors))
        for name, vector in given.vectors.items():
            places[name].copy_(vector)
        self.state.load(given._replace(vectors=places))


def put(value: Any, at: dict[str, Any], name: str) -> None:
    at[name] = value


def take_changed_states(rank: int, world_size: int, raw: Any) -> tuple[int, int]:
    """Take an honest state, and one with each change; return how many states were taken, and how many refused."""
    giver, own = Job(raw, 3), Job(raw, 2)
    given, taken, refused = giver.state.copy(20), 0, 0
    own.take(given)
    assert not own.lines
    assert torch.equal(own.local_step(), giver.local_step())
    paths = list(leaves(given.facts))
    for path in [*paths, ("engine", "loss_scale", "cur_scale")]:
        for value in WRONG:
            facts = changed(given.facts, path, partial(put, value))
            before = own.engine.weights.read()
            try:
                own.take(given._replace(facts=facts))
                taken += 1
            except NotTakenError:
                assert torch.equal(own.engine.weights.read(), before)
                refused += 1
                continue
            assert own.local_step().isfinite().all(), (path, value)
            own.take(given)
    for name, value in (("inner.exp_avg_sq", -1.0), ("fast_weights", math.nan)):
        vectors = given.vectors | {name: torch.full_like(given.vectors["fast_weights"], value)}
        with pytest.raises(NotTakenError, match=f"its {name} "):
            own.take(given._replace(vectors=vectors))
    for path in (path for path in paths if path[0] in ("inner", "engine")):
        own = Job(raw, 0)  # keeps nothing yet
        own.take(given._replace(facts=changed(given.facts, path, lambda at, name: at.pop(name))))
        assert own.local_step().isfinite().all(), path
    return taken, refused


@pytest.mark.parametrize("raw", [tiny() | WSD, tiny() | SGD, tiny(MUON)], ids=["AdamW", "SGD", "Muon"])
def test_no_number_of_a_state_harms_a_trainer_that_takes_it(raw: Any) -> None:
    ((taken, refused),) = run_ranks(1, take_changed_states, raw)
    assert taken
    assert refused > 50
