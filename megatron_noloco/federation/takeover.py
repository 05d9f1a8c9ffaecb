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

    A slot whose connection is lost meanwhile is asked once more, when it is there again.

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
        try:
            offer = _take_from(giver, handover, taker, slot, least, seconds)
        except _NotTakenError as error:
            if error.may_pass and slot not in asked_again:
                asked_again.add(slot)
                handover.wait_for(giver)
            else:
                tell(f"the state of replica {slot} was not taken over: {error}")
                given_up.add(slot)
        else:
            return Taken(slot, time.monotonic() - started), offer


class _NotTakenError(Exception):
    """Why the state of a slot was not taken, and whether it may be when it is asked again."""

    def __init__(self, why: str, may_pass: bool = False) -> None:
        super().__init__(why)
        self.may_pass = may_pass


def _take_from(
    giver: int, handover: Handover, taker: Taker[Offer], slot: int, least: int, seconds: float
) -> Offer:
    """Take the state of one slot. Raises _NotTakenError, alike on all ranks of the replica."""
    offer, tag, problem = None, 0, None
    try:
        tag, description = handover.ask(giver, seconds)
        offer = taker.check(slot, description)
    except (OSError, ValueError) as error:
        problem = error
    offered = _agree(problem, offer.step if offer else 0)
    assert offer is not None
    if len(offered) > 1:  # some of its ranks had a copy for another taker, others made a new one
        raise _NotTakenError(f"its ranks offer the steps {offered}", may_pass=True)
    if offered[0] < least:
        raise _NotTakenError(f"it is at local step {offered[0]} by now, as it was started anew")
    try:
        taker.take(offer, partial(handover.take, giver, tag))
    except (OSError, ValueError) as error:
        problem = error
    try:
        _agree(problem)
    except _NotTakenError:
        taker.settle(offer, False)
        raise
    taker.settle(offer, True)
    return offer


def _agree(problem: OSError | ValueError | None, step: int = 0) -> list[int]:
    """Return the steps that the ranks of the replica are offered; raises _NotTakenError if one has a problem."""
    own = line_of(problem) if problem else "", isinstance(problem, ConnectionError), step
    told = of_all_ranks(own)
    if problems := [text for text, _, _ in told if text]:
        raise _NotTakenError(problems[0], may_pass=any(lost for _, lost, _ in told))
    return sorted({step for _, _, step in told})


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
