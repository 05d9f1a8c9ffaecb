"""A round of one fragment, which may be under way while training goes on.

With d = `delay_steps` > 0, the round after local step t = (r + 1) k is taken apart:

    after step t        theta_s = theta,  Delta = theta_s - phi,  c as ever; its exchange begins
    after step t + d    delta <- alpha * delta + mean_G(c) - gamma * phi
                        phi   <- phi + delta
                        theta <- theta + (phi - theta_s)

In between, the local steps go on from theta_s. They are kept in full: after the merge theta is phi plus their
updates, as if they had been taken from phi. Which step merges is known beforehand and the same on all ranks,
whenever the messages arrive: a rank that is early waits. d = 0 is the round of `optimizer` itself, and d <= k, so
that one exchange of a fragment is under way at a time.

What it changes, for any grouping:

- (phi, delta) follow the same recursions, with Delta = theta_s - phi. Each local update enters exactly one Delta;
  were updates independent of the weights, phi and delta would be those of d = 0. What changes is where the first d
  gradients of each phase are taken: at weights that lack the correction phi - theta_s.
- So with all replicas in one group and equal phi it is DiLoCo's outer step; a bye is one's own; the mean over the
  replicas of (phi, delta) follows DiLoCo's recursion; c is the same, and so is the spread measured on it.
- Two replicas with equal phi and delta keep them bitwise equal. Their theta are not: never during the flight, and
  after it they differ by the d local steps. At d = 0 they are equal after each round.
- Without gradients theta = phi at every snapshot, so rho (`plans.stability`) is the same. It says nothing about
  the effect of late corrections on training, which can be measured only.

Sources. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, also apply the
outer step some local steps late, but then mix: theta <- a * theta + (1 - a) * phi. That discards a part of the
local steps taken meanwhile, and lets a part of theta_s - phi enter the next Delta as well. Kale et al., "Eager
updates for overlapped communication and computation in DiLoCo", arXiv 2502.12996, take an outer step at once,
from a mixture of the replica's own new Delta and the others' Deltas of the phase before. Here theta itself
stands in until the mean is there: it contains the replica's own Delta with weight 1. Both papers average over
all replicas; here only the group has to have reached step t.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_noloco.outer.exchange import AnyExchange
from megatron_noloco.outer.fragments import Fragment
from megatron_noloco.outer.mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.memory import HOST, Kept
from megatron_noloco.outer.vectors import OuterVectors
from megatron_noloco.plans.grouping import Group


@dataclass(frozen=True)
class RoundReport:
    """One round of a fragment as this rank saw it.

    Attributes:
        spread: standard deviation over the group of the fast weights before the round, root mean square over the
            weights; nan for a bye. Exactly that where consensus_weight = outer_lr, with payload "fp32" and in
            pairs: else it is of c / gamma = phi + (beta / gamma) Delta (of Delta where gamma is 0), of codes, and
            in a larger group of this rank's part of the weights.
        pause_seconds: for which local steps stood still because of it.
    """

    round_index: int
    exchange: ExchangeReport
    spread: float
    pause_seconds: float
    fragment: int = 0


class Round:
    """One round of one fragment, from its beginning until it is merged; then another one.

    Owns the memory of a round: c, the messages, and with a delay the correction. It is kept for the next.

    Args:
        vectors: of all weights.
        exchange: of this object alone.
        longest: elements of the longest fragment.

    Attributes:
        index: of the round.
        fragment: whose round it is.
        due: local steps done when it is merged; 0 where nobody trains meanwhile.
        landed: whether phi and delta are updated and the correction phi - theta_s is there to be merged.
        report: of the exchange; complete once it has landed.
    """

    def __init__(self, vectors: OuterVectors, exchange: AnyExchange, longest: int) -> None:
        self._vectors = vectors
        self._exchange = exchange
        self._longest = longest
        self._kept = Kept()
        self.index = self.due = 0
        self.fragment = Fragment(())
        self.landed = True
        self.report = exchange.report

    def begin(self, index: int, fragment: Fragment, group: Group, number: int, due: int) -> None:
        """Post the messages; `number` is that of the exchange."""
        self.index, self.fragment, self.due, self.landed = index, fragment, due, False
        combined = self.combined[: fragment.length]
        self._vectors.combine(fragment, combined, self._snapshot)
        self._exchange.begin(combined, group, number, f"round {index}{fragment.name}", fragment.exact)
        self.report = self._exchange.report

    def finish(self) -> None:
        """Without delay: wait for the exchange, and move the slow and the fast weights."""
        with self._vectors.weights.writing() as write, self._vectors.side.used():
            for mean in self._vectors.to_step(self._exchange.finish()):
                for start, phi in self._vectors.step(self.fragment, mean, None):
                    write(start, phi)
        self.landed = True

    def progress(self) -> None:
        """With delay: use what has landed, without waiting."""
        if not self.landed:
            self._use(self._exchange.progress())

    def land(self) -> None:
        """With delay: wait for the exchange, if it is under way."""
        if not self.landed:
            self._use(self._exchange.finish())
            self.landed = True

    def merge(self) -> None:
        """With delay: move the fast weights by the correction; the exchange must have landed."""
        self._vectors.merge(self.fragment, self.correction, self.combined[: self.fragment.length])

    @property
    def combined(self) -> Tensor:
        """c, shape [longest], where messages are sent from; free once the exchange has landed."""
        device = self._vectors.home if self._exchange.sends_from_device else HOST
        return self._kept.take("combined", torch.float32, self._longest, device=device)

    @property
    def correction(self) -> Tensor:
        """theta_s, then phi - theta_s; shape [fragment.length]."""
        whole = self._kept.take("correction", torch.float32, self._longest, device=self._vectors.home)
        return whole[: self.fragment.length]

    def numbers(self) -> Tensor:
        """What a checkpoint keeps of a landed round. Its times are left out: they belong to this process."""
        exchange = self.report
        numbers = [
            self.fragment.index,
            self.index,
            self.due,
            exchange.bytes_sent,
            exchange.squared_deviation,
            exchange.compared_elements,
            exchange.poisoned_elements,
            exchange.squared_error,
            exchange.resent_elements,
            *exchange.group,
        ]
        return torch.tensor(numbers, dtype=torch.float64)

    def resume(self, numbers: Tensor, fragments: Sequence[Fragment], correction: Tensor) -> None:
        """Become the landed round of which `numbers` tell; `correction` is that of all weights."""
        fragment, index, due, sent, squared_deviation, compared, *more = numbers.tolist()
        poisoned, squared_error, resent, *group = more
        self.index, self.due, self.landed = int(index), int(due), True
        self.fragment = fragments[int(fragment)]
        self.fragment.gather(correction, self.correction)
        self.report = ExchangeReport(
            tuple(int(member) for member in group if member >= 0),
            bytes_sent=int(sent),
            squared_deviation=squared_deviation,
            compared_elements=int(compared),
            poisoned_elements=int(poisoned),
            squared_error=squared_error,
            resent_elements=int(resent),
        )

    @property
    def _snapshot(self) -> Tensor | None:
        return self.correction if self.due else None

    def _use(self, means: Iterator[MeanPiece]) -> None:
        with self._vectors.side.used():
            for mean in self._vectors.to_step(means):
                self._vectors.step(self.fragment, mean, self._snapshot)
