"""The exchange: a group of replicas computes the mean of one vector, in messages between two ranks.

A vector is exchanged in buckets, of which a few are under way at a time; `bucket_exchange` says how. Between
`begin` and `finish` the caller may compute, and call `progress` now and then: it goes on with each bucket whose
messages have come and gone. So `finish`, which also waits, has little to wait for.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_noloco.job.activity import now
from megatron_noloco.outer.bucket_code import Code, blocks_to_code
from megatron_noloco.outer.bucket_exchange import BucketExchange, Members, UnderWay, in_codes, in_fp32
from megatron_noloco.outer.channels import CHANNELS, WINDOW, PartnerLostError, PartnerTimeoutError, tag_of
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.host_codec import codec_for
from megatron_noloco.outer.payload import Codec, signs_of
from megatron_noloco.outer.vectors import BUCKET, HOST, NOTHING, Buffers, Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.payloads import keeps_rounding
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import ExchangeTimeoutError, Transport

_NAMED = 3  # of those that an exchange waits for


class AnyExchange(Protocol):
    """Defines what a round needs of an exchange; a federation has others than `Exchange` (`federation.rounds`)."""

    @property
    def report(self) -> ExchangeReport: ...

    @property
    def done(self) -> bool:
        """Whether it is known that all messages have come and gone."""
        ...

    def begin(
        self,
        vector: Tensor,
        group: Group,
        number: int,
        what: str,
        exact: Ranges = (),
        rounding: Tensor | None = None,
    ) -> None: ...

    def progress(self, until: float = math.inf) -> Iterator[MeanPiece]: ...

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

    In codes (`bits`), the mean of a piece is this replica's estimate of it. The mean of a group's estimates is
    that of its vectors, to the rounding of fp32; two estimates differ by a step at most. Where rounding errors are
    kept (payload.py) all members have the same bits, which lack the mean of these errors.

    Args:
        transport: carries the messages.
        place: of this rank; its rank is the transport's.
        channel: 0 to CHANNELS - 1, the same for the counterparts.
        deadline_seconds: how long to wait for a message, from when it was posted, or from the call of `finish` if
            that was later.
        bits: of codes (`plans.payloads.BITS`), the same for the counterparts; None: fp32.

    Attributes:
        deadline_seconds: may be changed between two exchanges.
        bucket: elements of a bucket, the same for the counterparts; a multiple of `payload.BLOCK` in codes.
        report: of the exchange begun last; complete when `finish` is exhausted.
        done: whether all of the mean has been yielded, and all that was sent has arrived.
    """

    bucket = BUCKET

    def __init__(
        self,
        transport: Transport,
        place: Place,
        channel: int,
        deadline_seconds: float = 600.0,
        bits: int | None = None,
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
        self.report = ExchangeReport(group=())
        self.done = False
        self._bits = bits
        self._codec: Codec | None = None if bits is None else codec_for(bits)
        self._begun = False
        self._vector = self._signs = NOTHING
        self._what, self._tag = "", 0
        self._exact: Ranges = ()
        self._rounding: Tensor | None = None
        self._posted = 0  # buckets
        self._under_way = deque[UnderWay]()  # in the order of the vector
        # Of the buckets under way, by their numbers modulo WINDOW.
        self._buffers = [Buffers() for _ in range(WINDOW)]

    def begin(
        self,
        vector: Tensor,
        group: Group,
        number: int,
        what: str,
        exact: Ranges = (),
        rounding: Tensor | None = None,
    ) -> None:
        """Post the first messages of this rank, and return without waiting for any.

        Args:
            vector: fp32, flat, on any device; not to be written until `finish` is exhausted. What is sent of a
                vector on an accelerator is copied to host memory. In codes the mean takes its place.
            group: the replicas to average over, ascending, this one included.
            number: the same in the whole group, different from that of other exchanges on this channel.
            what: names the exchange in errors.
            exact: parts of the vector that are sent in fp32 where others are sent as codes.
            rounding: to be filled with what the mean lacks of this vector, to be added to the next one; as long as
                the vector, beside it, valid where a piece has been yielded. None: nothing may be left out.

        Raises RuntimeError when the exchange begun before is not finished, ValueError when this replica is
        not in the group.
        """
        if self._begun:
            raise RuntimeError(f"{self._what} is still under way: finish it before {what} begins")
        if self.place.replica not in group:
            raise ValueError(f"{what}: replica {self.place.replica} is not in group {list(group)}")
        self.report = ExchangeReport(group)
        self._vector, self._what, self._exact = vector, what, exact
        self._tag = tag_of(number, self.channel)
        self._posted, self.done = 0, False
        self._under_way.clear()
        self._rounding = rounding
        if rounding is not None and not keeps_rounding(self._bits, len(group)):
            rounding.zero_()
            self._rounding = None
        if self._bits is not None:
            self._prepare_codes(self._bits, number)
        self._open_buckets()
        self._begun = True

    def progress(self, until: float = math.inf) -> Iterator[MeanPiece]:
        """Yield the pieces of the mean that are available, without waiting; none without `begin`.

        Moves messages where the library moves them only when it is called. All members must use the pieces of
        `progress` as they do those of `finish`, which yields the others. An iterator that is not exhausted ends
        the exchange, as an error does. Raises PartnerLostError as `finish` does.

        Args:
            until: a time of the monotonic clock, from which on nothing more is computed.
        """
        return self._pieces(None, until) if self._begun else iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the pieces of the mean that are left, each element once.

        Raises RuntimeError when nothing was begun, PartnerLostError when the connection to a member is lost,
        and its subclass PartnerTimeoutError when a member does not answer within the deadline. The exchange is
        then over, and may be begun again.
        """
        if not self._begun:
            raise RuntimeError("nothing is under way: begin comes before finish")
        yield from self._pieces(time.monotonic())
        self._begun = False

    def _prepare_codes(self, bits: int, number: int) -> None:
        device = self._vector.device
        if self._codec is None or self._codec.device != device:
            self._codec = codec_for(bits, device)
        self._signs = signs_of(number).to(device, non_blocking=True)

    def _open_buckets(self) -> None:
        """Post the first messages of the next buckets, as far as there is room."""
        while len(self._under_way) < WINDOW and (start := self._posted * self.bucket) < len(self._vector):
            self._under_way.append(UnderWay(start, self._exchange(slice(start, start + self.bucket))))
            self._posted += 1
        if not self._under_way:
            self.done = True
            self.report.seconds = time.perf_counter() - self.report.started

    def _exchange(self, at: slice) -> BucketExchange:
        """Return what exchanges a bucket."""
        slot = self._posted % WINDOW
        ranks = [self.place.rank_of(member) for member in self.report.group]
        members = Members(self.transport, ranks, self._tag + slot, self.report, self._buffers[slot])
        bucket = self._vector[at]
        if self._codec is None:
            if bucket.device != HOST:
                bucket = members.buffers.get("outbox", torch.float32, len(bucket)).copy_(bucket)
            return in_fp32(members, bucket)
        coded = blocks_to_code(range(at.start, at.start + len(bucket)), self._exact)
        rounding = None if self._rounding is None else self._rounding[at]
        return in_codes(members, bucket, Code(self._codec, self._signs, coded, len(ranks) - 1, rounding))

    def _pieces(self, since: float | None, until: float = math.inf) -> Iterator[MeanPiece]:
        """Yield the pieces of the mean; wait for those that are not there, `since` this time, or not (None)."""
        try:
            while self._under_way:
                ready = [bucket for bucket in self._under_way if bucket.is_ready]
                yield from _available(ready, until)
                while self._under_way and self._under_way[0].has_ended:
                    self._under_way.popleft()
                self._open_buckets()
                if since is None and (not ready or time.monotonic() >= until):
                    return
                if since is not None and not ready:
                    self._wait(since)
        except BaseException as error:  # also where the caller takes no more
            self._begun = False
            self._under_way.clear()
            self.report.seconds = time.perf_counter() - self.report.started
            # Late messages must not overwrite the next exchange's memory; the transport keeps the old one.
            for buffers in self._buffers:
                buffers.release()
            if named := self._named(error):
                raise named from error
            raise

    def _wait(self, since: float) -> None:
        """Wait for the messages that were posted first."""
        now.part(self._awaited())
        started = time.monotonic()
        flight = min((one.flight for one in self._under_way if one.flight), key=lambda flight: flight.posted)
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


def _available(ready: Sequence[UnderWay], until: float) -> Iterator[MeanPiece]:
    """Go on with buckets, and yield pieces of the mean, until this time."""
    for bucket in ready:
        for piece in bucket.go_on():
            yield piece
            if time.monotonic() >= until:
                return
        if time.monotonic() >= until:
            return
