"""Continuing with other ranks: from whom each replica of the new run takes its state, and what it counted."""

from torch import Tensor

from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.rank_reader import RankReader, same_sizes
from megatron_noloco.plans.topology import Position, Topology

FOLDED = ("slow_weights", "outer_momentum")  # whose mean over the replicas is kept


def source_replica(replica: int, saved: Topology) -> int:
    """The saved replica that `replica` continues: itself, or where it was not saved, one of the others in turn."""
    return saved.slot + (replica - saved.slot) % saved.replicas


def needed(manifests: list[Manifest], now: Topology, fold: bool) -> list[Manifest]:
    """Those whose files will be read, by one rank or another of a run of this layout."""
    sources = {source_replica(replica, manifests[0].topology) for replica in now.numbers}
    return [manifest for manifest in manifests if fold or manifest.position.replica in sources]


def what_happened(saved: Topology, now: Topology, fold: bool) -> list[str]:
    """A line per replica that was cloned, dropped or folded; nothing when they are the same."""
    cloned = [
        f"replica {replica} is new: a clone of replica {source_replica(replica, saved)}, "
        f"with data of its own from here on"
        for replica in now.numbers
        if replica not in saved.numbers
    ]
    fate = "folded into the mean of those kept" if fold else "dropped"
    lost = [f"replica {replica} is {fate}" for replica in range(now.ensemble, saved.replicas)]
    return cloned + lost


def shift_of_mean(reader: RankReader, name: str, saved_replicas: int, replicas: int) -> Tensor:
    """What each kept replica must add so that the mean over those kept becomes the mean over all saved.

    The replicas are read one after the other: few vectors of memory, however many there were.
    """
    every, kept = (list(range(count)) for count in (saved_replicas, replicas))
    return reader.vector(name, every).sub_(reader.vector(name, kept))


def counters_of(manifests: list[Manifest], topology: Topology, at: Position) -> dict[str, float]:
    """What a rank has counted since the start of the run; of what ranks of another layout counted, its share.

    Bytes add up over the ranks of a replica, so each rank takes an equal part; anything else is the largest.
    """
    saved = manifests[0].topology
    source = source_replica(at.replica, saved)
    if same_sizes(saved, topology):
        return manifests[saved.rank(Position(source, at.stage, at.dp, at.tp))].counters
    counted: dict[str, list[float]] = {}
    for manifest in manifests:
        if manifest.position.replica == source:
            for name, value in manifest.counters.items():
                counted.setdefault(name, []).append(value)
    return {
        name: sum(values) / topology.replica_size if name.endswith("_bytes") else max(values)
        for name, values in counted.items()
    }
