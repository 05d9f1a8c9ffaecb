"""The exchange of a pair of replicas, each of which may have several ranks."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from megatron_noloco.federation.movement import Movement
from megatron_noloco.federation.passes import Moving, Pass, Speaking, run, runner_of
from megatron_noloco.outer.exchange import Exchange
from megatron_noloco.outer.finite_mean import ExchangeReport
from megatron_noloco.outer.messages import PartnerLostError, tag_of
from megatron_noloco.outer.vectors import NOTHING, Buffers
from megatron_noloco.plans.grouping import Group
from megatron_noloco.transport.interface import ExchangeTimeoutError


class MovedExchange:
    """Averages the vectors of a pair, which are moved in slabs; on all ranks of the replica.

    The other ranks learn from their speaker whether there is a mean (`commit`): where the exchange has failed they
    get back their own vector.

    Args:
        make: makes the speaker's exchanges, one for each slab that may be under way, each on a channel of its own.
        tag: see `Pass`.
        background: whether a thread moves the vector between `begin` and `wait`; else `poll` does.

    Attributes:
        report: of the exchange begun last; complete after `wait`.
        mean: of this rank's vector; complete after `wait`, and valid until the next `begin`.
        squared_norm: of the vector, on the speaker.
    """

    def __init__(
        self, movement: Movement, make: Callable[[], Sequence[Exchange]], tag: int, background: bool = True
    ) -> None:
        self.movement = movement
        self._make = make
        self.exchanges = [] if movement.rank else make()
        self.report = ExchangeReport(())
        self.squared_norm = 0.0
        self._holdings = [movement.own.ascending(interval.start) for interval in movement.intervals]
        self._tag = tag
        self._background = background
        self._buffers = Buffers()
        self._moving: Moving
        self._begun: tuple[Group, int, str] = (), 0, ""
        self.mean = NOTHING
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._deadline = math.inf  # on the monotonic clock

    @property
    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._error is not None or self._moving.done

    def begin(self, vector: Tensor, group: Group, number: int, what: str) -> None:
        """Begin as `Exchange.begin` does; `group` is a pair. All ranks of the replica call it."""
        fragment = number % len(self.movement.intervals)
        interval, holding = self.movement.intervals[fragment], self._holdings[fragment]
        self.mean = self._buffers.get("mean", torch.float32, len(vector))
        moves = self.movement.own.before(interval.stop) - self.movement.own.before(interval.start)
        self.mean[moves:] = vector[moves:]  # padding
        self._begun, self._error, self._deadline = (group, number, what), None, math.inf
        self.report, self.squared_norm = ExchangeReport(group), 0.0
        way = Pass(self.movement, interval, holding, self._tag, vector, self.mean)
        exchanges = cycle(self.exchanges)  # of the slabs in their order, on both sides alike
        self._moving = runner_of(way, None if self.movement.rank else partial(self._exchange, exchanges))
        if self._background:
            self._thread = threading.Thread(target=self._run, name="noloco-moving", daemon=True)
            self._thread.start()

    def poll(self) -> None:
        """Move what can be moved, where no thread does."""
        if self._thread is None:
            self._moving.poll()

    def wait(self, deadline_seconds: float) -> Exception | None:
        """Wait for the mean; return why there is none.

        Raises what has failed inside the replica.

        Args:
            deadline_seconds: after which the partner is not waited for any more.
        """
        started = time.monotonic()
        self._deadline = started + deadline_seconds
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
            self._thread = None
        self.report.wait_seconds += time.monotonic() - started
        if self._error is not None:
            raise self._error
        if self._moving.failure is not None:
            self.exchanges = self._make()  # late messages may still come to the others
        return self._moving.failure

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
        late = time.monotonic() - self._deadline
        if late > 0 and isinstance(self._moving, Speaking) and self._moving.deals:
            (group, number, _), first = self._begun, self.exchanges[0]
            (partner,) = set(group) - {first.place.replica}
            tag = tag_of(number, first.channel)
            self._moving.fail(ExchangeTimeoutError(first.place.rank_of(partner), tag, late))


class _Exchanged:
    """A slab that is exchanged; its report is added to `report`."""

    def __init__(self, exchange: Exchange, result: Tensor, report: ExchangeReport) -> None:
        self._exchange, self._result, self._report = exchange, result, report
        self.done = False

    def poll(self) -> bool:
        moved = False
        try:
            for piece in self._exchange.progress():
                self._result[piece.start : piece.stop] = piece.mean
                moved = True
        except PartnerLostError as failure:
            raise failure.__cause__ or failure from None
        if self._exchange.done and not self.done:
            for _ in self._exchange.finish():  # nothing: it is done
                pass
            self._report.add(self._exchange.report)
            self.done = moved = True
        return moved
