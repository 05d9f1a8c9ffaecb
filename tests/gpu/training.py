"""The engine of one rank on a GPU."""

from functools import partial
from typing import Any

from torch import Tensor

from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.plans.routing import Routing
from tests.kit.tiny import Recorded, build, microbatch, tiny

STEPS, RATE = 6, 0.01
LOCAL = {"model": {"transformer_impl": "local"}, "scheduler": None}


def trained(changes: dict[str, Any], steps: int = STEPS) -> tuple[list[float], Recorded, dict[str, Tensor]]:
    """The engine's losses, records and weights."""
    config, groups, stage = build(tiny(changes, tiny(LOCAL)), 1)
    recorded = Recorded()
    engine = ReplicaEngine(stage, groups, config.as_deepspeed(), recorded)
    routes = Routing(1, config.microbatches, 0, "off").straight()
    losses = []
    for step in range(steps):
        found = engine.train_batch(partial(microbatch, config, groups, step), routes)
        losses.append(sum(float(loss.loss) for loss in found) / len(found))
    return losses, recorded, {row.name: parameter.detach().float() for row, parameter in stage.named_rows()}
