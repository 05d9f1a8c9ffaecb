"""The exchange: a group of replicas computes the mean of one vector, in messages between two ranks.

A pair swaps its vectors, one message each way. A larger group of n uses two phases, as the bandwidth-optimal
all-reduce of Patarasuk and Yuan does ("Bandwidth optimal all-reduce algorithms for clusters of workstations", J.
Parallel Distrib. Comput. 69(2), 2009: reduce-scatter, then all-gather), but by direct messages instead of a ring:

1. Each member owns 1/n of the elements. It receives them from the other members and averages them.
2. It sends the mean of its elements to the other members.

A member sends 2 (n-1)/n vectors, the least possible; sending the vector to all members would cost n-1. In both
schemes all members use bitwise the same mean, which the method's recursion of the mean rests on (docs/method.md).

Between `begin` and `finish` the caller may compute, and call `progress` now and then. It collects what has
arrived, and posts what depends on it (the second phase, the next stretch), so that `finish` waits for little.
"""

import time
from collections.abc import Generator, Iterator
from typing import Protocol

import torch
from torch import Tensor

from megatron_noloco.outer.mean import ExchangeReport, MeanPiece, finite_mean
from megatron_noloco.outer.messages import CHANNELS, PartnerLostError, PartnerTimeoutError, Waiting, tag_of
from megatron_noloco.outer.vectors import Buffers, Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.protocol import ExchangeTimeoutError, Message, Transport

_NAMED = 3  # of those that an exchange waits for
STRETCH = 1 << 24  # elements that are under way at a time by default: 64 MiB


class AnyExchange(Protocol):
    """What a round needs of an `Exchange`; a federation wraps one (`federation.commit.CommittedExchange`)."""

    @property
    def report(self) -> ExchangeReport: ...

    @property
    def rounding(self) -> Tensor | None: ...

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None: ...

    def progress(self) -> Iterator[MeanPiece]: ...

    def finish(self) -> Iterator[MeanPiece]: ...


class Exchange:
    """Averages this rank's vector with those of its counterparts (`Place.rank_of`) in the replica's group.

    An exchange owns the memory that messages arrive in, its tags and its report, so several exchanges of one rank
    may be under way at once, each with its own channel or number. Each has one vector under way at a time.

    Args:
        transport: carries the messages.
        place: of this rank; its rank is the transport's.
        channel: 0 to CHANNELS - 1, the same for the counterparts.
        deadline_seconds: how long to wait for a member, see `messages.Waiting`.
        stretch: elements that are under way at a time, the same for the counterparts. The exchange's buffers hold
            one such stretch for a pair, two for a larger group. `begin` posts the first stretch.

    Attributes:
        report: of the exchange begun last; complete when `finish` is exhausted.
        rounding: what is left out of this rank's vector in the mean, to be added to its next one; as long as the
            vector, in host memory, valid where a piece has been yielded. None: nothing is left out, as here.
        waiting: its `deadline_seconds` may be changed between two exchanges.
        complete: whether all of the mean has been yielded, and all that was sent has arrived.
    """

    def __init__(
        self,
        transport: Transport,
        place: Place,
        channel: int,
        deadline_seconds: float = 600.0,
        stretch: int = STRETCH,
    ) -> None:
        if not 0 <= channel < CHANNELS:
            raise ValueError(f"channel {channel} must lie between 0 and {CHANNELS - 1}")
        if place.rank != transport.rank:
            raise ValueError(
                f"the place is that of rank {place.rank}, the transport that of {transport.rank}"
            )
        self.transport = transport
        self.place = place
        self.channel = channel
        self.stretch = stretch
        self.rounding: Tensor | None = None
        self.report = ExchangeReport(group=())
        self._what, self._tag = "", 0
        self._exact: Ranges = ()
        self._under_way = False
        self.complete = False
        self.waiting = Waiting(deadline_seconds)
        self._pieces: Generator[MeanPiece | None]
        self._buffers = Buffers()

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Post the messages of this rank, and return without waiting for any.

        Args:
            vector: fp32, flat, on any device; not to be written until `finish` is exhausted. One that is not in
                host memory is copied there, stretch by stretch.
            group: the replicas to average over, ascending, this one included.
            number: the same in the whole group, different from that of other exchanges on this channel.
            what: names the exchange in errors.
            exact: parts of the vector that are sent in fp32 (as all of it is here) where others are sent as codes.

        Raises RuntimeError when the exchange begun before is not finished, ValueError when this replica is
        not in the group.
        """
        if self._under_way:
            raise RuntimeError(f"{self._what} is still under way: finish it before {what} begins")
        if self.place.replica not in group:
            raise ValueError(f"{what}: replica {self.place.replica} is not in group {list(group)}")
        self.report = ExchangeReport(group)
        self._what, self._exact, self.complete = what, exact, False
        self._tag = tag_of(number, self.channel)
        self.waiting.stop()
        posted = self._post(vector[: self.stretch]) if len(vector) else iter(())
        self._pieces = self._all_pieces(vector, posted)
        self._under_way = True

    def progress(self) -> Iterator[MeanPiece]:
        """Yield the pieces of the mean that are available, without waiting; none without `begin`.

        Moves messages where the library moves them only when it is called. All members must use the pieces of
        `progress` as they do those of `finish`, which yields the others.
        """
        while self._under_way and (piece := next(self._pieces, None)) is not None:
            yield piece

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the pieces of the mean that are left, each element once, as chunks arrive.

        Raises RuntimeError when nothing was begun, PartnerLostError when the connection to a member is lost,
        and its subclass PartnerTimeoutError when a member does not answer within the deadline. The exchange is
        then over, and may be begun again.
        """
        if not self._under_way:
            raise RuntimeError("nothing is under way: begin comes before finish")
        self.waiting.start(self._awaited())
        try:
            yield from (piece for piece in self._pieces if piece is not None)
        finally:
            self._pieces.close()
            self._under_way = False

    def _awaited(self) -> str:
        others = [member for member in self.report.group if member != self.place.replica]
        named = [f"rank {self.place.rank_of(other)} (replica {other})" for other in others[:_NAMED]]
        if len(others) > _NAMED:
            named.append(f"{len(others) - _NAMED} more")
        return f"waiting for {' and '.join(named)} in {self._what}"

    def _all_pieces(self, vector: Tensor, posted: Iterator[MeanPiece | None]) -> Generator[MeanPiece | None]:
        """Yield the pieces of the mean; None where the next one has not arrived and the caller does not wait."""
        try:
            for first in range(0, len(vector), self.stretch):
                if first:
                    posted = self._post(vector[first : first + self.stretch])
                for piece in posted:
                    yield piece and MeanPiece(first + piece.start, first + piece.stop, piece.mean)
            self.complete = True
        except ExchangeTimeoutError as error:
            partner = error.rank // self.place.ranks_per_replica
            raise PartnerTimeoutError(
                f"replica {self.place.replica}: no answer from partner {partner} (rank {error.rank}) in "
                f"{self._what} after {error.waited_seconds:.1f} s (deadline_seconds)"
            ) from error
        except ConnectionError as error:
            raise PartnerLostError(
                f"replica {self.place.replica} lost a partner in {self._what}: {error}"
            ) from error
        finally:
            if not self.complete:
                self._under_way = False
                # Late messages must not overwrite the next exchange's memory; the transport keeps the old one.
                self._buffers.release()
            self.report.seconds = time.perf_counter() - self.report.started

    def whole_mean(self, vector: Tensor, group: Group, number: int, what: str) -> Tensor:
        """Return the mean in new memory: `begin` and `finish` in one."""
        whole = torch.empty_like(vector)
        self.begin(vector, group, number, what)
        for start, stop, mean in self.finish():
            whole[start:stop] = mean
        return whole

    def _post(self, part: Tensor) -> Iterator[MeanPiece | None]:
        """Post the first messages of one stretch, and return the iterator that collects its pieces."""
        group = self.report.group
        if part.device.type != "cpu":
            part = self._buffers.take("outbox", torch.float32, len(part)).copy_(part)
        match len(group):
            case 1:
                return iter([MeanPiece(0, len(part), self._inbox(len(part)).copy_(part))])
            case 2:
                return self._swap(part, group[1] if group[0] == self.place.replica else group[0])
            case _:
                return self._share(part, group)

    def _swap(self, vector: Tensor, partner: int) -> Iterator[MeanPiece | None]:
        rank, inbox = self.place.rank_of(partner), self._inbox(len(vector))
        flight = self.transport.post([Message(rank, vector)], [Message(rank, inbox)], self._tag)
        self.report.bytes_sent += vector.nbytes
        arrivals = self.waiting.collect(flight)

        def pieces() -> Iterator[MeanPiece | None]:
            for arrival in arrivals:
                if arrival is None:
                    yield None
                    continue
                _, start, stop = arrival
                mine, theirs = vector[start:stop], inbox[start:stop]
                yield MeanPiece(start, stop, finite_mean([mine, theirs], theirs, self.report))
            self.report.wait_seconds += flight.wait_seconds

        return pieces()

    def _share(self, vector: Tensor, group: Group) -> Iterator[MeanPiece | None]:
        ranks = [self.place.rank_of(member) for member in group]
        me = group.index(self.place.replica)
        others = [member for member in range(len(group)) if member != me]
        bounds = [len(vector) * member // len(group) for member in range(len(group) + 1)]
        parts = [slice(bounds[member], bounds[member + 1]) for member in range(len(group))]
        width = bounds[me + 1] - bounds[me]
        slices = list(self._buffers.take("slices", torch.float32, len(group), width))
        slices[me] = vector[parts[me]]
        inbox = self._inbox(len(vector))
        flight = self.transport.post(
            [Message(ranks[j], vector[parts[j]]) for j in others],
            [Message(ranks[j], slices[j]) for j in others],
            self._tag,
        )
        arrivals = self.waiting.collect(flight)

        def pieces() -> Iterator[MeanPiece | None]:
            yield from (None for arrival in arrivals if arrival is None)
            self.report.wait_seconds += flight.wait_seconds
            mean = finite_mean(slices, inbox[parts[me]], self.report)
            handing_out = self.transport.post(
                [Message(ranks[j], mean) for j in others],
                [Message(ranks[j], inbox[parts[j]]) for j in others],
                self._tag + 1,
            )
            self.report.bytes_sent += vector.nbytes - slices[me].nbytes + len(others) * mean.nbytes
            yield MeanPiece(parts[me].start, parts[me].stop, mean)
            for arrival in self.waiting.collect(handing_out):
                if arrival is None:
                    yield None
                    continue
                start, stop = (parts[others[arrival.message]].start + at for at in arrival[1:])
                yield MeanPiece(start, stop, inbox[start:stop])
            self.report.wait_seconds += handing_out.wait_seconds

        return pieces()

    def _inbox(self, length: int) -> Tensor:
        return self._buffers.take("inbox", torch.float32, length)
