"""What a job does at its start with the states that others can give: it takes the furthest one."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from megatron_noloco.federation.handover import Handover
from megatron_noloco.job.activity import line_of
from megatron_noloco.job.agreement import of_all_ranks, of_rank_0
from megatron_noloco.plans.topology import Place


class Offered(Protocol):
    """What a description says."""

    @property
    def step(self) -> int: ...


Offer = TypeVar("Offer", bound=Offered)


class Taker(Protocol[Offer]):
    """What a rank does with the state of another job. All its methods are called on all ranks of the replica."""

    def check(self, slot: int, description: bytes) -> Offer:
        """Return what a slot offers; raises ValueError where that is of no use here."""
        ...

    def take(self, offer: Offer, fill: Callable[[Sequence[Tensor]], None]) -> None:
        """Receive the parts: `fill` is `Handover.take` into these buffers. Raises OSError, ValueError."""
        ...

    def settle(self, offer: Offer, whole: bool) -> None:
        """Use what was taken; or throw it away, where a rank of this replica has not got its part."""
        ...


class Taken(NamedTuple):
    """Whose state was taken over, and how long that took."""

    slot: int
    seconds: float


def take_over(
    handover: Handover,
    taker: Taker[Offer],
    least: int,
    seconds: float,
    tell: Callable[[str], object],
) -> tuple[Taken, Offer] | None:
    """Take the state of the slot that is furthest, else of the next one. A collective of the replica.

    Args:
        least: local steps that a state must have.
        seconds: for a rank that trains to come to the next boundary between two local steps.
        tell: is called with a line about each state that could not be taken.

    Returns None where there is none to take.
    """
    place, given_up, asked_again = handover.place, set[int](), set[int]()
    while True:
        steps = handover.steps() if place.rank % place.ranks_per_replica == 0 else {}
        slot = of_rank_0(furthest(steps, place, least, given_up))
        if slot is None:
            return None
        started, giver = time.monotonic(), place.rank_of(slot)
        offer, tag, problem = None, 0, ""
        try:
            tag, description = handover.ask(giver, seconds)
            offer = taker.check(slot, description)
        except (OSError, ValueError) as error:
            problem = line_of(error)
        told = of_all_ranks((problem, offer.step if offer else 0))
        problem, offered = next((text for text, _ in told if text), ""), sorted({step for _, step in told})
        if not problem and len(offered) > 1:
            if slot not in asked_again:
                asked_again.add(slot)  # some of its ranks had a copy for another taker, others made a new one
                continue
            problem = f"its ranks offer the steps {offered}"
        elif not problem and offered[0] < least:
            problem = f"it is at local step {offered[0]} by now, as it was started anew"
        if offer is not None and not problem:
            try:
                taker.take(offer, partial(handover.take, giver, tag))
            except (OSError, ValueError) as error:
                problem = line_of(error)
            problem = next(filter(None, of_all_ranks(problem)), "")
            taker.settle(offer, not problem)
            if not problem:
                return Taken(slot, time.monotonic() - started), offer
        tell(f"the state of replica {slot} was not taken over: {problem}")
        given_up.add(slot)


def furthest(
    steps: Mapping[int, int], place: Place, least: int, given_up: Collection[int] = ()
) -> int | None:
    """Return the slot that can give the latest step; of several, the next one after this job's. None: no slot.

    Args:
        steps: that each rank can give.
        place: of a rank of this job.
        least: the first step that is worth taking.
        given_up: slots not to be asked again.
    """
    by_slot = {rank // place.ranks_per_replica: step for rank, step in steps.items()}
    found = [slot for slot, step in by_slot.items() if step >= least and slot not in given_up]
    own, slots = place.replica, place.replicas
    return min(found, key=lambda slot: (-by_slot[slot], (slot - own) % slots), default=None)
