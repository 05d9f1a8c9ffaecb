"""A round of one fragment of the weights, which may be under way while training goes on.

With d = `overlap_steps` > 0, the round after local step t = (r + 1) k is taken apart (`step` has the equations):

    after step t        theta_s = theta is noted, c formed, and its exchange begins
    after step t + d    the outer step moves phi and delta, and theta <- theta + (phi - theta_s)

Which step merges is known beforehand and the same on all ranks, whenever the messages arrive: a rank that is early
waits. d <= k, so one exchange of a fragment is under way at a time.

The delay changes this, for any grouping:

- (phi, delta) follow the same recursions, with Delta = theta_s - phi. Each local update enters exactly one Delta.
  If updates were independent of the weights, phi and delta would be those of d = 0. But the first d gradients of
  each phase are taken at weights that lack the correction phi - theta_s.
- So with all replicas in one group and equal phi it is DiLoCo's outer step, and the mean over the replicas of
  (phi, delta) follows DiLoCo's recursion; c and the spread measured on it are the same.
- Two replicas with equal phi and delta keep them bitwise equal. Their theta differ by the d local steps.
- Without gradients theta = phi at every snapshot, so rho (`plans.stability`) is the same. The effect of late
  corrections on training can only be measured.

Sources. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, also apply the
outer step some local steps late, but then mix: theta <- a * theta + (1 - a) * phi. That discards a part of the
local steps taken meanwhile, and lets a part of theta_s - phi enter the next Delta as well. Kale et al., "Eager
updates for overlapped communication and computation in DiLoCo", arXiv 2502.12996, take an outer step at once,
from a mixture of the replica's own new Delta and the others' Deltas of the phase before. Here theta itself
stands in until the mean arrives: it contains the replica's own Delta with weight 1.

Fragments. A rank's weights can be cut into F equal parts whose rounds are at different local steps, each in groups
of its own (`plans.fragments`, `Grouping.groups`). A round is element by element, so all of this holds for each
fragment. Elements that other ranks of the replica hold as well (`Weights.copied`) stay equal if they are exchanged
with the same replicas after the same local steps. They lie at different places of the ranks' vectors, so all of
them are in fragment 0. docs/exchange.md says more about the cuts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.errors import UserError
from megatron_noloco.outer.exchange import AnyExchange
from megatron_noloco.outer.finite_mean import MEASURED, ExchangeReport
from megatron_noloco.outer.vectors import HOST, Buffers, OuterVectors, Ranges, Spans
from megatron_noloco.outer.weights import Joined
from megatron_noloco.plans.grouping import Group


class Fragment(Spans):
    """Holds the ranges of one fragment.

    Attributes:
        index: 0 to F - 1.
        name: names the fragment in errors, after its round; empty if there is only one.
        exact: ranges of the fragment's own vector of which other ranks hold copies.
    """

    def __init__(self, ranges: Ranges, index: int = 0, name: str = "", exact: Ranges = ()) -> None:
        super().__init__(ranges)
        self.index = index
        self.name = name
        self.exact = exact


def cut(length: int, copied: Ranges, fragments: int) -> list[Fragment]:
    """Return the fragments of a vector of `length` elements; fragment 0 begins with those that are `copied`.

    Where these are more than 1/F of the vector, the other fragments share the rest.

    Args:
        copied: see `Weights.copied`; ascending.

    Raises UserError for more fragments than elements.
    """
    if fragments == 1:
        return [Fragment([(0, length)], exact=copied)]
    if fragments > length:
        raise UserError(f"fragments {fragments} are more than the {length} weights of a rank")
    edges = [0, *(edge for range_ in copied for edge in range_), length]
    others = [range_ for range_ in zip(edges[::2], edges[1::2], strict=True) if range_[0] < range_[1]]
    order, copies = Spans([*copied, *others]), Spans(copied).length
    first = max(length // fragments, copies)
    bounds = [0, *(first + (length - first) * part // (fragments - 1) for part in range(fragments))]
    return [
        Fragment(
            [(place.start, place.stop) for _, place in order.within(*ends)],
            index,
            f", fragment {index}",
            [(0, copies)] if copies and index == 0 else (),
        )
        for index, ends in enumerate(pairwise(bounds))
    ]


@dataclass(frozen=True)
class RoundReport:
    """Reports what one round of a fragment cost and showed, on this rank.

    Attributes:
        round_index: from 0.
        exchange: its report.
        spread: standard deviation of the fast weights over the group before the round, root mean square over the
            weights; nan if the round was skipped. Exactly that for consensus_weight = outer_lr, payload "fp32" and
            pairs. Otherwise it is that of c / gamma = phi + (beta / gamma) Delta (of Delta if gamma is 0), of
            codes, and in a larger group of this rank's part of the weights.
        pause_seconds: seconds that local steps stood still for it.
        fragment: of the weights, from 0.
    """

    round_index: int
    exchange: ExchangeReport
    spread: float
    pause_seconds: float
    fragment: int = 0

    def numbers(self, replica: int) -> Iterator[tuple[str, Any, float]]:
        """Yield the numbers of the round for the log of this replica: name, value, and weight among the ranks."""
        exchange = self.exchange
        yield "round/index", self.round_index, 1
        yield "round/partners", [other for other in exchange.group if other != replica], 1
        yield "round/exchange_seconds", exchange.seconds, 1
        yield "round/wait_seconds", exchange.wait_seconds, 1
        yield "round/pause_seconds", self.pause_seconds, 1
        yield "round/sent_bytes", exchange.bytes_sent, 1
        yield "round/spread", self.spread, exchange.compared_elements
        yield "round/poisoned_elements", exchange.poisoned_elements, 1
        yield "round/payload_error", exchange.payload_error, exchange.squared_deviation
        yield "round/resent_elements", exchange.resent_elements, 1
        if exchange.deadline_seconds is not None:
            yield "round/deadline_seconds", exchange.deadline_seconds, 1
        if exchange.missed:
            yield "round/missed", exchange.missed, 1


class Round:
    """Runs a round of one fragment, from its beginning until it is merged; reused for later rounds.

    Owns the memory of a round: c, the messages, and with a delay the correction.

    Args:
        vectors: of all weights.
        exchange: of this object alone.
        longest: elements of the longest fragment.
        where: the device of c: that of the slow weights with an integer payload, else the host, from which
            messages leave.

    Attributes:
        index: of the round.
        fragment: the fragment that is exchanged.
        due: local steps done when it is merged; 0: without delay.
        complete: whether phi and delta are updated, and with a delay the correction phi - theta_s can be merged.
        report: of the exchange; final once the round is complete.
    """

    def __init__(
        self, vectors: OuterVectors, exchange: AnyExchange, longest: int, where: torch.device
    ) -> None:
        self._vectors = vectors
        self._exchange = exchange
        self._longest = longest
        self._where = where
        self._buffers = Buffers()
        self.index = self.due = 0
        self.fragment = Fragment(())
        self.complete = True
        self.report = exchange.report

    def begin(self, index: int, fragment: Fragment, group: Group, number: int, due: int) -> None:
        """Form c and post the messages; `number` is that of the exchange."""
        self.index, self.fragment, self.due, self.complete = index, fragment, due, False
        combined = self.combined[: fragment.length]
        self._vectors.combine(fragment, combined, self.correction if due else None)
        what = f"round {index}{fragment.name}"
        self._exchange.begin(combined, group, number, what, fragment.exact, self._rounding)
        self.report = self._exchange.report

    def finish(self) -> None:
        """Wait for the exchange of a round without delay, and move the slow and the fast weights."""
        self._finish()
        self._vectors.refresh()

    def progress(self, until: float = math.inf) -> None:
        """Use the pieces of a delayed round that have arrived, without waiting; see `Exchange.progress`."""
        if not self.complete:
            with self._vectors.side.used():
                for mean in self._exchange.progress(until):
                    self._vectors.outer_step(self.fragment, mean, self.correction)

    def wait(self) -> None:
        """Wait for the exchange of a delayed round, if it is under way."""
        if not self.complete:
            self._finish()

    def merge(self) -> None:
        """Move the fast weights by the correction of a delayed round that is complete."""
        self._vectors.merge(self.fragment, self.correction)

    @property
    def arrived(self) -> bool:
        """Whether all of the mean is used; False as well where that is not known, in a federation."""
        return self.complete or self._exchange.done

    @property
    def combined(self) -> Tensor:
        """c, shape [longest]; free once the round is complete."""
        return self._buffers.get("combined", torch.float32, self._longest, device=self._where)

    @property
    def correction(self) -> Tensor:
        """theta_s, then phi - theta_s; shape [fragment.length]."""
        whole = self._buffers.get("correction", torch.float32, self._longest, device=self._vectors.home)
        return whole[: self.fragment.length]

    def numbers(self) -> Tensor:
        """Return what a checkpoint keeps of a complete round. Times are left out: they belong to this process."""
        of_exchange = [getattr(self.report, name) for name in MEASURED]
        numbers = [self.fragment.index, self.index, self.due, *of_exchange, *self.report.group]
        return torch.tensor(numbers, dtype=torch.float64, device=HOST)

    def resume(self, numbers: Tensor, fragments: Sequence[Fragment], correction: Tensor) -> None:
        """Become the complete round that `numbers` describe; `correction` is that of all weights."""
        fragment, index, due, *others = numbers.tolist()
        self.index, self.due, self.complete = int(index), int(due), True
        self.fragment = fragments[int(fragment)]
        self.fragment.gather(correction, self.correction)
        group = tuple(int(member) for member in others[len(MEASURED) :] if member >= 0)
        kept = {name: kind(number) for (name, kind), number in zip(MEASURED.items(), others, strict=False)}
        self.report = ExchangeReport(group, **kept)

    @property
    def _rounding(self) -> Tensor | None:
        """What codes leave out of c, to be kept: at its place, or of several ranges beside c."""
        kept, ranges = self._vectors.rounding, self.fragment.ranges
        if kept is None or len(ranges) == 1:
            return None if kept is None else kept[slice(*ranges[0])]
        whole = self._buffers.get("rounding", torch.float32, self._longest, device=kept.device)
        return whole[: self.fragment.length]

    def _finish(self) -> None:
        after = self.correction if self.due else Joined(self._vectors.weights.parts())
        with self._vectors.side.used():
            for mean in self._exchange.finish():
                self._vectors.outer_step(self.fragment, mean, after)
        self._vectors.side.wait()
        whole, kept = self._vectors.rounding, self._rounding
        if whole is not None and kept is not None and len(self.fragment.ranges) > 1:
            self.fragment.scatter(kept, whole)
        self.complete = True
