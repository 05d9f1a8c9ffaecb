"""A round whose exchange is under way while training goes on.

With d = `delay_steps` > 0, the round after local step t = (r + 1) k is taken apart:

    after step t        theta_s = theta,  Delta = theta_s - phi,  c as ever; its exchange begins
    after step t + d    delta <- alpha * delta + mean_G(c) - gamma * phi
                        phi   <- phi + delta
                        theta <- theta + (phi - theta_s)

In between, the local steps go on from theta_s. They are kept in full: after the merge theta is phi plus their
updates, as if they had been taken from phi. Which step merges is known beforehand and the same on all ranks,
whenever the messages arrive: a rank that is early waits. d = 0 is the round of `optimizer` itself, and d <= k, so
that one exchange is under way at a time.

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

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_noloco.outer.mean import ExchangeReport


@dataclass
class DelayedRound:
    """A round that has begun and is not merged yet.

    Attributes:
        due: local steps done when it is merged.
        exchange: what its exchange showed; complete once it has landed.
        landed: whether phi and delta are updated and the correction phi - theta_s is there to be merged.
    """

    round_index: int
    due: int
    exchange: ExchangeReport
    landed: bool = False

    def numbers(self) -> Tensor:
        """What a checkpoint keeps of a landed round. Its times are left out: they belong to this process."""
        exchange = self.exchange
        numbers = [
            self.round_index,
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

    @classmethod
    def of(cls, numbers: Tensor) -> "DelayedRound":
        """The landed round of which `numbers` tells."""
        round_index, due, sent, squared_deviation, compared, *more = numbers.tolist()
        poisoned, squared_error, resent, *group = more
        exchange = ExchangeReport(
            tuple(map(int, group)),
            bytes_sent=int(sent),
            squared_deviation=squared_deviation,
            compared_elements=int(compared),
            poisoned_elements=int(poisoned),
            squared_error=squared_error,
            resent_elements=int(resent),
        )
        return cls(int(round_index), int(due), exchange, landed=True)
