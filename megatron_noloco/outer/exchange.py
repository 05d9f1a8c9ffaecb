"""The exchange: a group of replicas computes the mean of one vector, in messages between two ranks.

A vector is exchanged in stretches, one after the other; `stretch` says how. Between `begin` and `finish` the
caller may compute, and call `progress` now and then. `progress` polls the stretch that is under way: it collects
what has arrived, and posts what depends on it (the second phase, the next stretch). So `finish`, which polls and
waits, has little to wait for.
"""

import time
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megatron_noloco.job.activity import now
from megatron_noloco.outer.channels import CHANNELS, PartnerLostError, PartnerTimeoutError, tag_of
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.stretch import Session, Stretch, in_fp32
from megatron_noloco.outer.vectors import NOTHING, Buffers, Ranges, Spans
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import ExchangeTimeoutError, Flight, Transport

_NAMED = 3  # of those that an exchange waits for
STRETCH = 1 << 24  # elements that are under way at a time by default: 64 MiB


class AnyExchange(Protocol):
    """Defines what a round needs of an exchange; a federation has others than `Exchange` (`federation.rounds`)."""

    @property
    def report(self) -> ExchangeReport: ...

    @property
    def rounding(self) -> Tensor | None: ...

    @property
    def done(self) -> bool:
        """Whether it is known that all messages have come and gone."""
        ...

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None: ...

    def progress(self) -> Iterator[MeanPiece]: ...

    def finish(self) -> Iterator[MeanPiece]: ...


def group_mean(
    exchange: AnyExchange, vector: Tensor, group: Group, number: int, what: str, out: Tensor
) -> Tensor:
    """Fill `out` with the mean of a vector over a group, and return it: `begin` and `finish` in one.

    Args:
        exchange: with nothing under way.
        vector: see `Exchange.begin`, also for `group`, `number` and `what`.
        out: fp32, as long as the vector, other memory than it.

    Raises as `Exchange.begin` and `Exchange.finish` do.
    """
    exchange.begin(vector, group, number, what)
    for start, stop, mean in exchange.finish():
        out[start:stop] = mean
    return out


class Exchange:
    """Averages this rank's vector with those of its counterparts (`Place.rank_of`) in the replica's group.

    An exchange owns the memory that messages arrive in, its tags and its report, so several exchanges of one rank
    may be under way at once, each with its own channel or number. Each has one vector under way at a time.

    Args:
        transport: carries the messages.
        place: of this rank; its rank is the transport's.
        channel: 0 to CHANNELS - 1, the same for the counterparts.
        deadline_seconds: how long to wait for a message, from when it was posted, or from the call of `finish` if
            that was later.
        stretch: elements that are under way at a time, the same for the counterparts. The exchange's buffers hold
            one such stretch for a pair, two for a larger group. `begin` posts the first stretch.

    Attributes:
        deadline_seconds: may be changed between two exchanges.
        report: of the exchange begun last; complete when `finish` is exhausted.
        rounding: what is left out of this rank's vector in the mean, to be added to its next one; as long as the
            vector, beside it, valid where a piece has been yielded. None: nothing is left out, as here.
        done: whether all of the mean has been yielded, and all that was sent has arrived.
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
        self.deadline_seconds = deadline_seconds
        self.stretch = stretch
        self.rounding: Tensor | None = None
        self.report = ExchangeReport(group=())
        self.done = False
        self._under_way = False
        self._buffers = Buffers()
        self._vector = NOTHING
        self._what = ""
        self._exact: Ranges = ()
        self._session: Session
        self._posted = 0  # elements of the vector
        self._stretch: Stretch | None = None  # that is under way
        self._spans = Spans(())  # where it lies in the vector

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Post the messages of this rank, and return without waiting for any.

        Args:
            vector: fp32, flat, on any device; not to be written until `finish` is exhausted. What is sent of a
                vector on an accelerator is copied to host memory, stretch by stretch.
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
        self._vector, self._what, self._exact = vector, what, exact
        tag = tag_of(number, self.channel)
        self._session = Session(self.transport, self.place, tag, self.report, self._buffers)
        self._posted, self.done = 0, False
        self._go_on()
        self._under_way = True

    def progress(self) -> Iterator[MeanPiece]:
        """Yield the pieces of the mean that are available, without waiting; none without `begin`.

        Moves messages where the library moves them only when it is called. All members must use the pieces of
        `progress` as they do those of `finish`, which yields the others. An iterator that is not exhausted ends
        the exchange, as an error does. Raises PartnerLostError as `finish` does.
        """
        return self._pieces(None) if self._under_way else iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the pieces of the mean that are left, each element once, as chunks arrive.

        Raises RuntimeError when nothing was begun, PartnerLostError when the connection to a member is lost,
        and its subclass PartnerTimeoutError when a member does not answer within the deadline. The exchange is
        then over, and may be begun again.
        """
        if not self._under_way:
            raise RuntimeError("nothing is under way: begin comes before finish")
        yield from self._pieces(time.monotonic())
        self._under_way = False

    def _go_on(self) -> None:
        """Post the first messages of the next stretch, if there is one."""
        part = self._vector[self._posted : self._posted + self.stretch]
        if not len(part):
            self._stretch, self.done = None, True
            self.report.seconds = time.perf_counter() - self.report.started
            return
        self._spans = Spans([(self._posted, self._posted + len(part))])
        self._posted += len(part)
        self._stretch = self._open(part)

    def _open(self, part: Tensor) -> Stretch:
        """Open the stretch of a part of the vector; messages leave from host memory, and arrive there."""
        if part.device.type != "cpu":
            part = self._buffers.get("outbox", torch.float32, len(part)).copy_(part)
        return in_fp32(self._session, part)

    def _pieces(self, since: float | None) -> Iterator[MeanPiece]:
        """Yield the pieces of the mean; wait for those that are not there, `since` this time, or not (None)."""
        try:
            while self._stretch is not None:
                for piece in self._stretch.poll():
                    yield from self._spans.place(piece)
                if self._stretch.done:
                    self._go_on()
                elif since is None:
                    return
                elif self._stretch.awaited is not None:
                    self._wait(self._stretch.awaited, since)
        except BaseException as error:  # also where the caller takes no more
            self._under_way, self._stretch = False, None
            self.report.seconds = time.perf_counter() - self.report.started
            # Late messages must not overwrite the next exchange's memory; the transport keeps the old one.
            self._buffers.release()
            if named := self._named(error):
                raise named from error
            raise

    def _wait(self, flight: Flight, since: float) -> None:
        """Wait until a chunk has arrived, or all that was sent has."""
        now.part(self._awaited())
        started = time.monotonic()
        try:
            flight.wait(self.deadline_seconds + max(0.0, since - flight.posted))
        finally:
            self.report.wait_seconds += time.monotonic() - started
        now.part("")

    def _awaited(self) -> str:
        others = [member for member in self.report.group if member != self.place.replica]
        named = [f"rank {self.place.rank_of(other)} (replica {other})" for other in others[:_NAMED]]
        if len(others) > _NAMED:
            named.append(f"{len(others) - _NAMED} more")
        return f"waiting for {' and '.join(named)} in {self._what}"

    def _named(self, error: BaseException) -> PartnerLostError | None:
        """Return the error that names the exchange and the partner for one of the transport; None for others."""
        if isinstance(error, ExchangeTimeoutError):
            partner = error.rank // self.place.ranks_per_replica
            return PartnerTimeoutError(
                f"replica {self.place.replica}: no answer from partner {partner} (rank {error.rank}) in "
                f"{self._what} after {error.waited_seconds:.1f} s (deadline_seconds)"
            )
        if isinstance(error, ConnectionError):
            return PartnerLostError(f"replica {self.place.replica} lost a partner in {self._what}: {error}")
        return None
