"""Random routing: which replica's next stage a microbatch visits. Every rank computes it alone.

At the boundary between stages s and s+1 a permutation of the replicas sends the activations of replica i's
microbatch to replica pi(i); the gradient returns over the same hop. With a permutation, unlike independent
choices, every replica's stage receives exactly one microbatch, so the load stays balanced.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron_noloco.plans.draws import Stream, draw_permutation

RoutingInterval = Literal["off", "round", "microbatch"]


@dataclass(frozen=True)
class Routes:
    """Holds the routes of one step.

    Boundary b lies between stages b and b+1 (with virtual stages: between chunks b and b+1 of the model,
    including the wrap from the last stage back to the first). All ranks at a boundary use its one permutation, so
    a send and its receive name each other.

    Attributes:
        replicas: their number.
        seed: the same on all ranks.
        counters: of the draw, by microbatch; None: routes that never leave their replica.
    """

    replicas: int
    seed: int
    counters: tuple[int, ...] | None

    def next_replica(self, boundary: int, replica: int, microbatch: int) -> int:
        """Return the replica whose stage after `boundary` receives what `replica` computed before it."""
        return self._drawn(boundary, microbatch, 0, replica)

    def previous_replica(self, boundary: int, replica: int, microbatch: int) -> int:
        """Return the replica whose stage before `boundary` computed what `replica` receives after it."""
        return self._drawn(boundary, microbatch, 1, replica)

    def origin(self, stage: int, replica: int, microbatch: int) -> int:
        """Return the replica whose data is in the microbatch at `stage` of `replica`."""
        for boundary in reversed(range(stage)):
            replica = self.previous_replica(boundary, replica, microbatch)
        return replica

    def _drawn(self, boundary: int, microbatch: int, way: int, replica: int) -> int:
        if self.counters is None:  # also of a federation, where a replica has any number
            return replica
        return _permutation(self.replicas, self.seed, self.counters[microbatch], boundary)[way][replica]


@lru_cache(maxsize=1024)
def _permutation(
    replicas: int, seed: int, counter: int, boundary: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a uniform permutation of the replicas and its inverse."""
    forward = draw_permutation(replicas, seed, Stream.ROUTING, counter, boundary)
    return tuple(forward.tolist()), tuple(forward.argsort().tolist())


@dataclass(frozen=True)
class Routing:
    """Draws routes for each round or for each microbatch, or never ("off", the default of `noloco.routing`).

    Attributes:
        replicas: their number.
        microbatches: of a replica in a local step.
        seed: the same on all ranks.
        interval: for which new routes are drawn.
        pp: stages of a replica; with one there is no boundary.
    """

    replicas: int
    microbatches: int
    seed: int
    interval: RoutingInterval
    pp: int = 2

    @property
    def active(self) -> bool:
        """Whether any microbatch ever leaves its replica."""
        return self.interval != "off" and self.replicas > 1 and self.pp > 1

    def routes(self, step: int, round_index: int) -> Routes:
        """Return the routes of one step, which belongs to the local phase before round `round_index`."""
        if not self.active:
            return self.straight()
        first = step * self.microbatches
        by_microbatch = range(first, first + self.microbatches)
        counters = (round_index,) * self.microbatches if self.interval == "round" else tuple(by_microbatch)
        return Routes(self.replicas, self.seed, counters)

    def straight(self) -> Routes:
        """Return routes that never leave their replica: for evaluation, and for routing "off"."""
        return Routes(self.replicas, self.seed, None)
