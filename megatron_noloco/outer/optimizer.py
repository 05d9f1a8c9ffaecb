"""The round: a modified Nesterov step with momentum that also pulls a random group of replicas together.

For replica i of a group G of n replicas (NoLoCo, arXiv 2506.10911, Eq. 1-3; the sign of beta as in its code):

    Delta_i = theta_i - phi_i
    delta_i <- alpha * delta_i + beta * mean_G(Delta) - gamma * (phi_i - mean_G(phi))
    phi_i   <- phi_i + delta_i
    theta_i <- phi_i

| symbol | here                   | meaning                                              |
|--------|------------------------|------------------------------------------------------|
| theta  | weights                | fast weights: what the inner optimizer moved         |
| phi    | slow_weights           | the replica's weights after its last round           |
| Delta  |                        | outer gradient (pseudo-gradient)                     |
| delta  | momentum               | outer momentum buffer                                |
| alpha  | outer_momentum         |                                                      |
| beta   | outer_lr               |                                                      |
| gamma  | consensus_weight       |                                                      |
| c      | combined               | beta * Delta + gamma * phi, all that has to travel   |

Both means enter only as beta * mean(Delta) + gamma * mean(phi) = mean(c), so one vector travels instead of two:

    c_i     = beta * theta_i + (gamma - beta) * phi_i
    delta_i <- alpha * delta_i + mean_G(c) - gamma * phi_i

Written like this, replicas with equal phi and delta take bitwise equal steps. With everybody in one group and
equal phi the gamma terms cancel and the rule is DiLoCo's; alone (a bye) it is delta <- alpha*delta + beta*Delta.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_noloco.outer.coded_exchange import CodedExchange, Coding
from megatron_noloco.outer.exchange import STRETCH, Channel, Exchange
from megatron_noloco.outer.mean import ExchangeReport
from megatron_noloco.outer.memory import HOST, buffer
from megatron_noloco.outer.settings import OuterSettings
from megatron_noloco.outer.weights import Weights
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.protocol import Transport

_AT_ONCE = 1 << 20  # elements of c formed at a time: they stay in cache


@dataclass(frozen=True)
class RoundReport:
    """One round as this rank saw it."""

    round_index: int
    exchange: ExchangeReport
    spread: float  # standard deviation over the group of the fast weights before the round; nan for a bye


class OuterOptimizer:
    """Holds one rank's slow weights and outer momentum buffer, and runs rounds.

    All replicas must start from equal weights, and call `after_local_step` after each of their local steps.

    Args:
        weights: the fast weights, read and overwritten in each round. As they are now they become the first slow
            weights.
        transport: carries the exchanges.
        place: of this rank.
        grouping: the groups of each round; the same on all ranks.
        settings: the same on all ranks.

    Attributes:
        slow_weights: phi, fp32, shape [weights.length].
        momentum: delta, likewise.

    Three vectors of memory in all, and what an exchange needs: the third holds the combined vector during a round,
    and the fast weights while others are `evaluating` in their place.
    """

    def __init__(
        self,
        weights: Weights,
        transport: Transport,
        place: Place,
        grouping: Grouping,
        settings: OuterSettings,
    ) -> None:
        if grouping.replicas != place.replicas:
            raise ValueError(f"the grouping is one of {grouping.replicas} replicas, not {place.replicas}")
        self.weights = weights
        self.place = place
        self.grouping = grouping
        self.settings = settings
        length = weights.length
        home = weights.device if settings.slow_weights == "device" else HOST
        self.slow_weights = buffer(length, home)
        weights.read_into(self.slow_weights)
        self.momentum = buffer(length, home).zero_()
        bits = settings.payload_bits
        self._spare = buffer(length, home if transport.device_buffers and bits is None else HOST)
        # A pair has its whole vectors under way at once; in a larger group that would cost two more of them.
        stretch = max(1, length) if grouping.group_size <= 2 else STRETCH
        deadline_seconds = settings.deadline_seconds
        self._exchange = (
            Exchange(transport, place, Channel.ROUNDS, deadline_seconds, stretch)
            if bits is None
            else CodedExchange(
                transport, place, Channel.ROUNDS, deadline_seconds, Coding(bits, stretch, weights.copied())
            )
        )

    def after_local_step(self, done: int) -> RoundReport | None:
        """Run a round when one is due.

        Args:
            done: local steps done since the beginning of the training, this one included.

        Returns None when no round is due, which is every `local_steps` steps. Raises as `run_round` does.
        """
        if done % self.settings.local_steps:
            return None
        return self.run_round(done // self.settings.local_steps - 1)

    @torch.no_grad()
    def run_round(self, round_index: int) -> RoundReport:
        """Exchange with this round's group and move the slow and the fast weights.

        Raises PartnerTimeoutError: the group's round is then incomplete, and training has to go back to its
        last checkpoint.
        """
        group = self.grouping.group(self.place.replica, round_index, self.place.stage)
        self._combine()
        self._exchange.begin(self._spare, group, round_index, f"round {round_index}")
        with self.weights.writing() as write:
            for start, stop, mean in self._exchange.finish():
                # Piece by piece while it is in cache: several passes over memory become one.
                phi, delta = self.slow_weights[start:stop], self.momentum[start:stop]
                delta.mul_(self.settings.outer_momentum).add_(mean.to(delta.device))
                delta.sub_(phi, alpha=self.settings.gamma)
                phi.add_(delta)
                write(start, phi)
        report = self._exchange.report
        # For gamma = beta, c / gamma is theta itself; otherwise the point phi + (beta / gamma) * Delta near it.
        scale = self.settings.gamma or self.settings.outer_lr
        return RoundReport(round_index, report, report.standard_deviation / scale)

    @contextmanager
    def evaluating(self) -> Iterator[Tensor]:
        """Inside, other weights may stand in the place of the fast ones; on leaving these are back.

        Gives the slow weights, not to be written. Makes no copy of the model. No round may run inside.
        """
        with self.weights.kept_in(self._spare):
            yield self.slow_weights

    def state(self) -> dict[str, Tensor]:
        """What a resume needs of the outer optimizer: "slow_weights" and "outer_momentum"; live tensors."""
        return {"slow_weights": self.slow_weights, "outer_momentum": self.momentum}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state` returned. The fast weights are not in it: restore them before."""
        self.slow_weights.copy_(state["slow_weights"])
        self.momentum.copy_(state["outer_momentum"])

    def _combine(self) -> None:
        """c = beta * theta + (gamma - beta) * phi, formed where phi lies."""
        pull = self.settings.gamma - self.settings.outer_lr
        for start in range(0, len(self._spare), _AT_ONCE):
            phi, combined = (vector[start : start + _AT_ONCE] for vector in (self.slow_weights, self._spare))
            piece = combined if combined.device == phi.device else torch.empty_like(phi)
            self.weights.read_into(piece, start)
            piece.mul_(self.settings.outer_lr)
            if pull:
                piece.add_(phi, alpha=pull)
            if piece is not combined:
                combined.copy_(piece)
