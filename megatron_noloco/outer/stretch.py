"""The exchange of one stretch of a vector, in fp32: an object that is polled until it is done.

A pair swaps its vectors (`Swap`), one message each way. A larger group of n uses two phases (`Share`), as the
bandwidth-optimal all-reduce of Patarasuk and Yuan does ("Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69(2), 2009: reduce-scatter, then all-gather), but by direct messages
instead of a ring:

1. Each member owns 1/n of the elements, receives them from the other members and averages them.
2. Each member sends the mean of its elements to the others.

A member sends 2 (n-1)/n vectors, the least possible; sending the vector to all members would cost n-1. In both
schemes all members use bitwise the same mean, which the method's recursion of the mean rests on (docs/method.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece, finite_mean
from megatron_noloco.outer.vectors import Buffers
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import Flight, Message, Transport


@dataclass(frozen=True)
class Session:
    """Holds what the stretches of an exchange share; `tag` is of phase 0, messages arrive in `buffers`."""

    transport: Transport
    place: Place
    tag: int
    report: ExchangeReport
    buffers: Buffers

    @property
    def ranks(self) -> list[int]:
        """The ranks of the members, this one included, ascending."""
        return [self.place.rank_of(member) for member in self.report.group]


class Stretch(ABC):
    """Exchanges one stretch; its constructor posts the messages of the first phase.

    Args:
        vector: fp32, flat, in host memory; a coded stretch takes any.

    Attributes:
        awaited: the messages without which it cannot go on; None: it has work to do before it waits for any.
        done: whether all of the mean has been yielded, and all that was sent has arrived.
    """

    def __init__(self, session: Session, vector: Tensor) -> None:
        self.session, self.vector = session, vector
        self.phase = 0
        self.awaited: Flight | None = None
        self.done = False

    @abstractmethod
    def poll(self) -> Iterator[MeanPiece]:
        """Yield the pieces of the mean that have become available, and post what they allow; never waits.

        To be called, and exhausted, until the stretch is done. Places are counted from its beginning.
        """

    def send(
        self, phase: int, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]
    ) -> Flight:
        """Post messages to and from ranks; from here on the stretch is in this phase, and waits for them."""
        outgoing, incoming = (
            [Message(rank, buffer.view(-1)) for rank, buffer in way] for way in (sends, receives)
        )
        session, self.phase = self.session, phase
        self.awaited = session.transport.post(outgoing, incoming, session.tag + phase)
        session.report.bytes_sent += sum(message.buffer.nbytes for message in outgoing)
        return self.awaited

    def has(self, phase: int) -> bool:
        """Return whether the stretch is in this phase, and its messages have come and gone; moves them."""
        if self.phase != phase or self.awaited is None or self.done:
            return False
        self.awaited.arrived()
        return self.awaited.done()


def in_fp32(session: Session, vector: Tensor) -> Stretch:
    """Return the stretch for a group of this size."""
    kinds: dict[int, type[Stretch]] = {1: Alone, 2: Swap}
    return kinds.get(len(session.report.group), Share)(session, vector)


class Alone(Stretch):
    """Exchanges a stretch of a replica that is its own group."""

    def poll(self) -> Iterator[MeanPiece]:
        self.done = True
        yield MeanPiece(0, len(self.vector), self.vector)


class Swap(Stretch):
    """Exchanges a stretch of a pair. The mean of each chunk takes the place of the partner's."""

    def __init__(self, session: Session, vector: Tensor) -> None:
        super().__init__(session, vector)
        (partner,) = set(session.ranks) - {session.place.rank}
        self._theirs = session.buffers.get("inbox", torch.float32, len(vector))
        self._flight = self.send(0, [(partner, vector)], [(partner, self._theirs)])

    def poll(self) -> Iterator[MeanPiece]:
        for _, start, stop in self._flight.arrived():
            mine, theirs = self.vector[start:stop], self._theirs[start:stop]
            yield MeanPiece(start, stop, finite_mean([mine, theirs], theirs, self.session.report))
        self.done = self._flight.done()


class Share(Stretch):
    """Exchanges a stretch of a larger group: averages the own part, then hands out the means of all parts."""

    def __init__(self, session: Session, vector: Tensor) -> None:
        super().__init__(session, vector)
        self._own, self._parts = divided(len(vector), session)
        width, own = self._own.stop - self._own.start, vector[self._own]
        received = session.buffers.get("slices", torch.float32, len(self._parts), width)
        of_rank = dict(zip(self._parts, received, strict=True))
        self._members = [of_rank.get(rank, own) for rank in session.ranks]  # the same order everywhere
        self._means = session.buffers.get("inbox", torch.float32, len(vector))
        self.send(0, ((rank, vector[part]) for rank, part in self._parts.items()), of_rank.items())

    def poll(self) -> Iterator[MeanPiece]:
        if self.has(0):
            mean = finite_mean(self._members, self._means[self._own], self.session.report)
            theirs = ((rank, self._means[part]) for rank, part in self._parts.items())
            self.send(1, ((rank, mean) for rank in self._parts), theirs)
            yield MeanPiece(self._own.start, self._own.stop, mean)
        if self.phase == 1 and self.awaited is not None:
            starts = [part.start for part in self._parts.values()]
            for message, first, last in self.awaited.arrived():
                start, stop = starts[message] + first, starts[message] + last
                yield MeanPiece(start, stop, self._means[start:stop])
            self.done = self.awaited.done()


def divided(length: int, session: Session) -> tuple[slice, dict[int, slice]]:
    """Return which part of so many elements this rank owns, and those that the other members own, by rank."""
    ranks = session.ranks
    bounds = [length * member // len(ranks) for member in range(len(ranks) + 1)]
    parts = {rank: slice(*ends) for rank, ends in zip(ranks, pairwise(bounds), strict=True)}
    return parts.pop(session.place.rank), parts
