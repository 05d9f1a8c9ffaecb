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

A round need not stop the training while its messages are under way: see `delayed`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from megatron_noloco.outer.coded_exchange import CodedExchange, Coding
from megatron_noloco.outer.contacts import Contacts
from megatron_noloco.outer.delayed import DelayedRound
from megatron_noloco.outer.exchange import STRETCH, Exchange
from megatron_noloco.outer.mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.settings import OuterSettings
from megatron_noloco.outer.tags import Channel
from megatron_noloco.outer.vectors import OuterVectors
from megatron_noloco.outer.weights import Weights
from megatron_noloco.plans.grouping import Group, Grouping
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.protocol import Transport


@dataclass(frozen=True)
class RoundReport:
    """One round as this rank saw it."""

    round_index: int
    exchange: ExchangeReport
    spread: float  # standard deviation over the group of the fast weights before the round; nan for a bye
    pause_seconds: float  # for which local steps stood still because of it


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
        delay_steps: d, that of the settings; may be changed between two local steps, on all ranks at the same one.

    Three vectors of memory in all, and what an exchange needs: the third holds the combined vector during a round,
    and the fast weights while others are `evaluating` in their place. A delay needs a fourth.
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
        self.delay_steps = settings.delay_steps
        bits = settings.payload_bits
        self._vectors = OuterVectors(weights, settings, transport.device_buffers and bits is None)
        self.slow_weights, self.momentum = self._vectors.slow_weights, self._vectors.momentum
        self._delayed: DelayedRound | None = None
        self._pause_seconds = 0.0
        self._contacts = Contacts(transport, place)
        # A pair has its whole vectors under way at once; in a larger group that would cost two more of them.
        stretch = max(1, weights.length) if grouping.group_size <= 2 else STRETCH
        deadline_seconds = settings.deadline_seconds
        self._exchange = (
            Exchange(transport, place, Channel.ROUNDS, deadline_seconds, stretch)
            if bits is None
            else CodedExchange(
                transport, place, Channel.ROUNDS, deadline_seconds, Coding(bits, stretch, weights.copied())
            )
        )

    def after_local_step(self, done: int) -> RoundReport | None:
        """Run a round when one is due; with a delay, begin one when it is due and merge the one begun before.

        Args:
            done: local steps done since the beginning of the training, this one included.

        Returns the report of the round that has ended with this step, None where none has. Raises as `run_round`
        does.
        """
        self.progress()
        report = self._merge() if self._delayed is not None and done >= self._delayed.due else None
        rounds, local_steps = divmod(done, self.settings.local_steps)
        if local_steps:
            self._contacts.open(self._group(rounds), rounds)
            return report
        round_index = rounds - 1
        if not self.delay_steps:
            return self.run_round(round_index)
        if self._delayed is not None:  # a resume with fewer local steps to a round
            report = self._merge()
        with self._paused():
            self._vectors.allow_delay()
            self._begin(round_index, delayed=True)
            self._delayed = DelayedRound(round_index, done + self.delay_steps, self._exchange.report)
        return report

    def run_round(self, round_index: int) -> RoundReport:
        """Exchange with this round's group and move the slow and the fast weights.

        Raises PartnerTimeoutError: the group's round is then incomplete, and training has to go back to its
        last checkpoint.
        """
        if self._delayed is not None:  # a resume without a delay
            self._merge()
        with self._paused():
            self._begin(round_index, delayed=False)
            with self.weights.writing() as write:
                for piece in self._exchange.finish():
                    write(piece.start, self._vectors.step(piece, delayed=False))
        return self._report(round_index, self._exchange.report)

    def progress(self) -> None:
        """Move the exchange that is under way, if any, and use what has landed of it, without waiting.

        Worth a call wherever local steps can be interrupted: many an MPI library moves messages, and opens
        connections, only when called.
        """
        self._contacts.progress()
        if self._delayed is not None and not self._delayed.landed:
            with self._paused():
                self._use(self._exchange.progress())

    def land(self) -> None:
        """Wait for the exchange that is under way, if any; its round is merged when it is due, not now.

        The slow weights and the outer momentum buffer are then those after the round. Raises as `run_round` does.
        """
        if self._delayed is not None and not self._delayed.landed:
            with self._paused():
                self._use(self._exchange.finish())
                self._delayed.landed = True

    @contextmanager
    def evaluating(self) -> Iterator[Tensor]:
        """Inside, other weights may stand in the place of the fast ones; on leaving these are back.

        Gives the slow weights, not to be written. Makes no copy of the model. No round may run inside. An exchange
        that is under way lands first.
        """
        self.land()
        with self.weights.kept_in(self._vectors.spare):
            yield self.slow_weights

    def state(self) -> dict[str, Tensor]:
        """What a resume needs of the outer optimizer; live tensors.

        "slow_weights" and "outer_momentum". An exchange that is under way lands first. While a round is not
        merged, there are also "correction" (phi - theta_s) and "delayed_round" (see `DelayedRound`).
        """
        self.land()
        state = {"slow_weights": self.slow_weights, "outer_momentum": self.momentum}
        if self._delayed is not None:
            state |= {"correction": self._vectors.correction, "delayed_round": self._delayed.numbers()}
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state` returned. The fast weights are not in it: restore them before.

        A correction concerns this replica alone. It is merged at its step with any other number of replicas, and
        before the next round begins with any other settings.
        """
        self.slow_weights.copy_(state["slow_weights"])
        self.momentum.copy_(state["outer_momentum"])
        self._delayed = None
        if "correction" in state:
            self._vectors.allow_delay()
            self._vectors.correction.copy_(state["correction"])
            self._delayed = DelayedRound.of(state["delayed_round"])

    def _begin(self, round_index: int, delayed: bool) -> None:
        combined = self._vectors.combine(delayed)
        self._exchange.begin(combined, self._group(round_index), round_index, f"round {round_index}")

    def _group(self, round_index: int) -> Group:
        return self.grouping.group(self.place.replica, round_index, self.place.stage)

    def _use(self, pieces: Iterator[MeanPiece]) -> None:
        for piece in pieces:
            self._vectors.step(piece, delayed=True)

    def _merge(self) -> RoundReport:
        assert self._delayed is not None
        self.land()
        with self._paused():
            self._vectors.merge()
        delayed, self._delayed = self._delayed, None
        return self._report(delayed.round_index, delayed.exchange)

    def _report(self, round_index: int, exchange: ExchangeReport) -> RoundReport:
        # For gamma = beta, c / gamma is theta itself; otherwise the point phi + (beta / gamma) * Delta near it.
        scale = self.settings.gamma or self.settings.outer_lr
        pause_seconds, self._pause_seconds = self._pause_seconds, 0.0
        return RoundReport(round_index, exchange, exchange.standard_deviation / scale, pause_seconds)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._pause_seconds += time.perf_counter() - started
