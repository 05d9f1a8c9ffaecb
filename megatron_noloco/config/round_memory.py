"""The memory of the outer state and of rounds in progress, in bytes per parameter."""

from megatron_noloco.plans.fragments import most_under_way
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import NolocoSettings


def bytes_of_state(noloco: NolocoSettings, replicas: int | None) -> dict[str, float]:
    """Return the bytes per parameter of what is kept from round to round."""
    rounding = noloco.among(replicas).keeps_rounding
    kept = {"outer momentum": bool(noloco.outer_momentum), "rounding errors": rounding}
    return {"slow weights": 4.0} | {vector: 4.0 for vector, held in kept.items() if held}


def bytes_of_rounds(noloco: NolocoSettings, topology: Topology) -> dict[str, float]:
    """Return the bytes per parameter of all rounds that are in progress at a time."""
    of_round = {"combined vector": 4.0}
    if noloco.among(topology.total_replicas).keeps_rounding:
        of_round["new rounding errors"] = 4
    if topology.separate_jobs:
        of_round["mean"] = 4  # which waits until it is certain
    if noloco.overlap_steps != 0:
        of_round["snapshot"] = 4
    share = _rounds_at_a_time(noloco) / noloco.fragments
    return {vector: size * share for vector, size in of_round.items()}


def on_accelerator(noloco: NolocoSettings, topology: Topology) -> set[str]:
    """Return which of the vectors of these two functions lie in the memory of an accelerator, if there is any."""
    if noloco.slow_weights == "host":
        return set()
    vectors = {"slow weights", "outer momentum", "rounding errors", "snapshot"}
    if noloco.codes_on_device(topology.separate_jobs):
        vectors |= {"combined vector", "new rounding errors"}
    return vectors


def outer_state(noloco: NolocoSettings, topology: Topology) -> str:
    """Return what `outer` keeps beside the weights, in words."""
    vectors = bytes_of_state(noloco, topology.total_replicas) | bytes_of_rounds(noloco, topology)
    there = [vector for vector in vectors if vector in on_accelerator(noloco, topology)]
    alone = topology.total_replicas == 1  # which receives nothing
    at_a_time = _rounds_at_a_time(noloco)
    rounds = "" if at_a_time == 1 else f" for each of {at_a_time} rounds"
    return (
        f"{sum(vectors.values()):.3g} bytes per parameter ("
        + ", ".join(f"{vector} {size:.2g}" for vector, size in vectors.items())
        + (")" if alone else f"), and at most 128 MiB to receive in{rounds}")
        + (f"; on the accelerator: {', '.join(there)}" if there else "")
    )


def _rounds_at_a_time(noloco: NolocoSettings) -> int:
    return most_under_way(noloco.local_steps, noloco.fragments, noloco.longest_overlap_steps)
