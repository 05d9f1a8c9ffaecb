"""The memory of the outer optimizer: its state, and rounds in progress."""

from typing import NamedTuple

from megatron_noloco.plans.fragments import most_under_way
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import NolocoSettings


class OuterVector(NamedTuple):
    """A vector that the outer optimizer keeps beside the weights.

    Attributes:
        bytes: per weight; of vectors of a round, those of all rounds in progress at a time.
        on_device: whether it lies in the memory of an accelerator, if there is any.
    """

    name: str
    bytes: float
    on_device: bool


def rounds_at_a_time(noloco: NolocoSettings) -> int:
    """Return how many rounds can be in progress at a time."""
    return most_under_way(noloco.local_steps, noloco.fragments, noloco.longest_overlap_steps)


def outer_vectors(noloco: NolocoSettings, topology: Topology) -> list[OuterVector]:
    """Return the vectors that the outer optimizer keeps: first its state, then those of rounds in progress."""
    keeps_rounding = noloco.among(topology.total_replicas).keeps_rounding
    rounds = rounds_at_a_time(noloco) / noloco.fragments
    device = noloco.slow_weights == "device"
    coded = device and noloco.codes_on_device(topology.separate_jobs)
    rows = (
        ("slow weights", True, 1.0, device),
        ("outer momentum", bool(noloco.outer_momentum), 1.0, device),
        ("rounding errors", keeps_rounding, 1.0, device),
        ("combined vector", True, rounds, coded),
        ("new rounding errors", keeps_rounding and noloco.fragments > 1, rounds, coded),
        ("mean", topology.separate_jobs, rounds, False),  # which waits until it is certain
        ("snapshot", noloco.overlap_steps != 0, rounds, device),
    )
    return [OuterVector(name, 4.0 * vectors, there) for name, kept, vectors, there in rows if kept]
