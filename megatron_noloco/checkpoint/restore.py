"""Putting one rank's state back: its own, or what it takes over from ranks of another layout."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatron_noloco.checkpoint import elastic
from megatron_noloco.checkpoint.catalog import WEIGHTS, Manifest
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.rank_reader import RankReader
from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.checkpoint.settings import CheckpointSettings
from megatron_noloco.checkpoint.vector import OUTER_VECTORS
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.engine.state import PREFIXES
from megatron_noloco.model.dropout import seed_dropout, set_random_state
from megatron_noloco.model.families import table_of
from megatron_noloco.outer import Rounds


def restore(
    folder: Path,
    manifests: list[Manifest],
    engine: ReplicaEngine,
    outer: Rounds,
    settings: CheckpointSettings,
) -> None:
    """Continue from the checkpoint in `folder`, which was verified; all ranks of a replica call it.

    Args:
        manifests: of all saved ranks, in rank order.
    """
    groups, saved = engine.groups, manifests[0].topology
    place = groups.position
    at = replace(place, replica=elastic.source_replica(place.replica, saved))
    reader = RankReader(
        CheckpointReader(Ensemble.of(folder, manifests)),
        table_of(engine.stage.architecture),
        groups.topology,
        at,
        engine.parameter_layout(),
    )
    engine.restore(reader.of_weights(*PREFIXES), reader.source.engine)
    state = _outer_state(reader)
    if settings.fold and groups.topology.ensemble < saved.replicas:
        for name in filter(reader.has_vector, elastic.FOLDED):
            shift = elastic.shift_of_mean(reader, name, saved.replicas, groups.topology.ensemble)
            state[name] += shift
            if name == WEIGHTS:
                engine.weights.add(shift)
    outer.restore(state, moved=reader.moved)
    if reader.moved or at != place:  # nobody drew here before
        seed_dropout(settings.seed, groups, manifests[0].step)
    else:
        set_random_state(reader.tensors("rng."))


def _outer_state(reader: RankReader) -> dict[str, Tensor]:
    state = {name: reader.vector(name) for name in OUTER_VECTORS if reader.has_vector(name)}
    return state | reader.tensors("delayed_")
