"""The round: a modified Nesterov step with momentum that also pulls a random group of replicas together.

For replica i of a group G of n replicas (NoLoCo, arXiv 2506.10911, Eq. 1-3; the sign of beta as in its code):

    Delta_i = theta_i - phi_i
    delta_i <- alpha * delta_i + beta * mean_G(Delta) - gamma * (phi_i - mean_G(phi))
    phi_i   <- phi_i + delta_i
    theta_i <- phi_i

| symbol | here                   | meaning                                              |
|--------|------------------------|------------------------------------------------------|
| theta  | master_weights         | fast weights: what the inner optimizer moved         |
| phi    | slow_weights           | the replica's weights after its last round           |
| delta  | momentum               | velocity of the outer optimizer                      |
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

from megatron_noloco.config.blocks import NolocoConfig
from megatron_noloco.outer.averaging import ExchangeReport, GroupAveraging, buffer_beside
from megatron_noloco.plans.grouping import Grouping


@dataclass(frozen=True)
class RoundReport:
    """One round as this rank saw it."""

    round_index: int
    exchange: ExchangeReport
    spread: float  # standard deviation over the group of the fast weights before the round; nan for a bye


class OuterOptimizer:
    """Holds one rank's slow weights and outer momentum, as flat fp32 vectors, and runs rounds.

    Args:
        master_weights: flat fp32 tensors on any device; read and overwritten in each round.
        slow_weights: "host" keeps phi and delta in (pinned) host memory, "device" beside the master weights.
    """

    def __init__(
        self,
        master_weights: list[Tensor],
        averaging: GroupAveraging,
        grouping: Grouping,
        settings: NolocoConfig,
    ) -> None:
        self.master_weights = master_weights
        self.averaging = averaging
        self.grouping = grouping
        self.outer_momentum = settings.outer_momentum
        self.outer_lr = settings.outer_lr
        self.consensus_weight = settings.gamma
        length = sum(master.numel() for master in master_weights)
        home = master_weights[0] if settings.slow_weights == "device" else torch.empty(0)
        self.slow_weights = buffer_beside(home, length)
        for part, master in self._parts(self.slow_weights):
            part.copy_(master)
        self.momentum = buffer_beside(home, length).zero_()
        self._combined = buffer_beside(home if averaging.transport.device_buffers else torch.empty(0), length)

    @torch.no_grad()
    def run_round(self, round_index: int) -> RoundReport:
        """Exchange with this round's group and move the slow and the master weights.

        The caller refreshes the working weights. Raises PartnerTimeoutError: the group's round is then
        incomplete, and the run has to go back to its last checkpoint.
        """
        self._combine()
        self._step(round_index)
        for part, master in self._parts(self.slow_weights):
            master.copy_(part)
        report = self.averaging.report
        # For gamma = beta, c / gamma is theta itself; otherwise the point phi + (beta / gamma) * Delta near it.
        scale = self.consensus_weight or self.outer_lr
        return RoundReport(round_index, report, report.standard_deviation / scale)

    def _step(self, round_index: int) -> None:
        averaging = self.averaging
        at = averaging.topology.position(averaging.transport.rank)
        group = self.grouping.group(at.replica, round_index, at.stage)
        pieces = averaging.mean(self._combined, group, round_index, f"round {round_index}")
        for start, stop, mean in pieces:
            phi, delta = self.slow_weights[start:stop], self.momentum[start:stop]
            # Chunk by chunk while it is in cache: three passes over memory become one.
            delta.mul_(self.outer_momentum).add_(mean.to(delta.device))
            delta.sub_(phi, alpha=self.consensus_weight)
            phi.add_(delta)

    @contextmanager
    def master_weights_aside(self) -> Iterator[Tensor]:
        """The master weights may be overwritten inside; gives the slow weights, where they can be sent from.

        Needs no memory: between rounds the send buffer is free for the slow weights, and their place for the
        master weights.
        """
        self._combined.copy_(self.slow_weights)
        for part, master in self._parts(self.slow_weights):
            part.copy_(master)
        try:
            yield self._combined
        finally:
            for part, master in self._parts(self.slow_weights):
                master.copy_(part)
            self.slow_weights.copy_(self._combined)

    def state(self) -> dict[str, Tensor]:
        """What a resume needs of the outer optimizer; live tensors."""
        return {"slow_weights": self.slow_weights, "outer_momentum": self.momentum}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up what `state` returned."""
        self.slow_weights.copy_(state["slow_weights"])
        self.momentum.copy_(state["outer_momentum"])

    def _combine(self) -> None:
        beta, pull = self.outer_lr, self.consensus_weight - self.outer_lr
        for (combined, master), (phi, _) in zip(
            self._parts(self._combined), self._parts(self.slow_weights), strict=True
        ):
            if phi.device == master.device:
                combined.copy_(master * beta if pull == 0 else torch.add(master * beta, phi, alpha=pull))
            else:
                combined.copy_(master)
                combined.mul_(beta).add_(phi, alpha=pull)

    def _parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of a flat vector, each beside the master weights it stands for."""
        sizes = [master.numel() for master in self.master_weights]
        return zip(flat.split(sizes), self.master_weights, strict=True)
