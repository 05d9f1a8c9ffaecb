"""The exchange of a pair of replicas, each of which may have several ranks."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from megatron_noloco.federation.movement import Following, Movement, Pass, Speaking, run
from megatron_noloco.outer.exchange import Exchange
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.messages import PartnerLostError, tag_of
from megatron_noloco.outer.vectors import Buffers, Ranges
from megatron_noloco.plans.grouping import Group
from megatron_noloco.transport.interface import ExchangeTimeoutError


class MovedExchange:
    """An exchange of a pair whose vectors are moved in slabs; has the interface of `Exchange`, on all ranks.

    Yields the mean in one piece, at the end. The other ranks of the replica learn from their speaker whether it is
    one (`commit`): where the exchange has failed they get back their own vector.

    Args:
        make: makes the speaker's exchanges, one for each slab that may be under way, each on a channel of its own.
        tag: see `Pass`.
        background: whether a thread moves the vector between `begin` and `finish`; else `progress` does.

    Attributes:
        squared_norm: of the vector, on the speaker.
    """

    rounding = None  # of pairs nothing is kept

    def __init__(
        self, movement: Movement, make: Callable[[], Sequence[Exchange]], tag: int, background: bool = True
    ) -> None:
        self.movement = movement
        self._make = make
        self.exchanges = [] if movement.rank else make()
        self.squared_norm = 0.0
        self._holdings = [movement.own.ascending(interval.start) for interval in movement.intervals]
        self.deadline_seconds = 600.0
        self.report = ExchangeReport(())
        self._tag = tag
        self._background = background
        self._buffers = Buffers()
        self._moving: Speaking | Following
        self._begun: tuple[Group, int, str] = (), 0, ""
        self._mean = torch.empty(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._awaited_since: float | None = None

    @property
    def done(self) -> bool:
        return self._moving.done

    def begin(self, vector: Tensor, group: Group, number: int, what: str, exact: Ranges = ()) -> None:
        """Begin as `Exchange.begin` does; `group` is a pair. All ranks of the replica call it."""
        fragment = number % len(self.movement.intervals)
        interval, holding = self.movement.intervals[fragment], self._holdings[fragment]
        self._mean = self._buffers.get("mean", torch.float32, len(vector))
        moves = self.movement.own.before(interval.stop) - self.movement.own.before(interval.start)
        self._mean[moves:] = vector[moves:]  # padding
        self._begun, self._error, self._awaited_since = (group, number, what), None, None
        self.report, self.squared_norm = ExchangeReport(group), 0.0
        way = Pass(self.movement, interval, holding, self._tag, vector, self._mean)
        if self.movement.rank:
            self._moving = Following(way)
        else:
            exchanges = cycle(self.exchanges)  # of the slabs in their order, on both sides alike
            self._moving = Speaking(way, partial(self._exchange, exchanges))
        if self._background:
            self._thread = threading.Thread(target=self._run, name="noloco-moving", daemon=True)
            self._thread.start()

    def progress(self) -> Iterator[MeanPiece]:
        """Move what can be moved. Yields nothing; raises PartnerLostError as `finish` does."""
        if self._thread is None:
            self._moving.poll()
        self._check()
        yield from ()

    def finish(self) -> Iterator[MeanPiece]:
        """Wait for the mean, and yield it. Raises PartnerLostError where there is none."""
        self._awaited_since = started = time.monotonic()
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
            self._thread = None
        self.report.wait_seconds += time.monotonic() - started
        self._check()
        yield MeanPiece(0, len(self._mean), self._mean)

    def _exchange(
        self, exchanges: Iterator[Exchange], place: range, content: Tensor, result: Tensor
    ) -> "_Exchanged":
        """Begin the exchange of a slab."""
        self.squared_norm += float(torch.dot(content, content))
        exact = [(max(first, place.start), min(last, place.stop)) for first, last in self.movement.exact]
        inside = [(first - place.start, last - place.start) for first, last in exact if first < last]
        exchange = next(exchanges)
        exchange.begin(content, *self._begun, inside)
        return _Exchanged(exchange, result, self.report)

    def _run(self) -> None:
        try:
            run(self._moving, self._check_deadline)
        except BaseException as error:  # raised where the exchange is awaited
            self._error = error
        self.report.seconds = time.perf_counter() - self.report.started

    def _check_deadline(self) -> None:
        """Fail where the partner has not answered for so long."""
        since, moving = self._awaited_since, self._moving
        if since is None or not isinstance(moving, Speaking) or moving.failure is not None:
            return
        seconds = time.monotonic() - since
        if seconds > self.deadline_seconds and moving.deals:
            (group, number, what), place = self._begun, self.exchanges[0].place
            (partner,) = set(group) - {place.replica}
            failure = PartnerLostError(f"replica {place.replica}: no answer from partner {partner} in {what}")
            tag = tag_of(number, self.exchanges[0].channel)
            failure.__cause__ = ExchangeTimeoutError(place.rank_of(partner), tag, seconds)
            moving.fail(failure)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._moving.done and isinstance(self._moving, Speaking) and self._moving.failure is not None:
            self.exchanges = self._make()  # late messages may still come to the others
            raise self._moving.failure


class _Exchanged:
    """A slab that is exchanged; its report is added to `report`."""

    def __init__(self, exchange: Exchange, result: Tensor, report: ExchangeReport) -> None:
        self._exchange, self._result, self._report = exchange, result, report
        self.done = False

    def poll(self) -> bool:
        moved = False
        for piece in self._exchange.progress():
            self._result[piece.start : piece.stop] = piece.mean
            moved = True
        if self._exchange.done and not self.done:
            for _ in self._exchange.finish():  # nothing: it is done
                pass
            self._report.add(self._exchange.report)
            self.done = moved = True
        return moved
