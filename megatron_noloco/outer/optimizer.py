"""The outer optimizer of one rank: when rounds begin and are merged, and what a checkpoint keeps of them."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_noloco.outer.channels import Channel, Contacts
from megatron_noloco.outer.exchange import AnyExchange, Exchange, group_mean
from megatron_noloco.outer.finite_mean import ExchangeReport
from megatron_noloco.outer.round import Fragment, Round, RoundReport, cut
from megatron_noloco.outer.vectors import HOST, OuterVectors
from megatron_noloco.outer.weights import Weights
from megatron_noloco.plans.fragments import fragment_after, next_after
from megatron_noloco.plans.grouping import Group, averaging_cycle
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import NolocoSettings, grouping_of
from megatron_noloco.transport.interface import Transport

# In `OuterOptimizer.state`: vectors as long as the weights, and small tensors beside a correction.
VECTORS = ("slow_weights", "outer_momentum", "rounding", "correction")
ROUNDS = {"delayed_rounds": torch.float64, "delayed_with": torch.int64}


def rounds_to_lists(state: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the small tensors of `OuterOptimizer.state`, for JSON."""
    return {name: state[name].tolist() for name in ROUNDS if name in state}


def rounds_from_lists(lists: Mapping[str, list[Any]]) -> dict[str, Tensor]:
    """Return the tensors that `rounds_to_lists` was given."""
    return {
        name: torch.tensor(lists[name], dtype=dtype, device=HOST)
        for name, dtype in ROUNDS.items()
        if name in lists
    }


class SeparateJobs(Protocol):
    """Replicas that are separate jobs (`federation.rounds.Replica`)."""

    def fragments(self) -> Sequence[Fragment]:
        """Return the fragments of this rank's weights, alike in all jobs."""

    def exchange(self) -> AnyExchange:
        """Return what exchanges a fragment."""


class OuterOptimizer:
    """Holds one rank's slow weights and outer momentum buffer, and runs rounds; `outer.step` has the equations.

    All replicas must start from equal weights, and call `after_local_step` after each of their local steps.

    Args:
        weights: the fast weights, read and overwritten in each round. Their present values become the first slow
            weights.
        transport: carries the exchanges; None where replicas are separate jobs.
        place: of this rank.
        settings: the same on all ranks.
        seed: of the groups; the same on all ranks.
        separate_jobs: makes the exchanges between separate jobs; None: all replicas are in this job.

    Attributes:
        grouping: the groups of each round; None in a federation, where `separate_jobs` chooses partners.
        slow_weights: phi, fp32, shape [weights.length].
        momentum: delta, likewise; None with alpha = 0, where nothing of it is kept.
        rounding: r, likewise, what codes of the last rounds left out (`payload`); None where nothing is kept.
        local_steps, overlap_steps: k and d, of the settings; may be changed between two local steps, on all ranks
            at the same one. Rounds are numbered as if k had always been so.

    Besides these vectors it holds, for each round that is under way at a time, the combined vector, and with a
    delay the correction, each as long as the longest fragment; and messages of some buckets.
    """

    def __init__(
        self,
        weights: Weights,
        transport: Transport | None,
        place: Place,
        settings: NolocoSettings,
        seed: int = 0,
        separate_jobs: SeparateJobs | None = None,
    ) -> None:
        self.weights = weights
        self.transport = transport
        self.place = place
        self._seed = seed
        self.grouping = None if place.replicas is None else grouping_of(settings, place.replicas, seed)
        self.settings = settings
        self._separate_jobs = separate_jobs
        self.local_steps = settings.local_steps
        self.overlap_steps = settings.first_overlap_steps
        self._fragments = (
            cut(weights.length, weights.copied(), settings.fragments)
            if separate_jobs is None
            else separate_jobs.fragments()
        )
        self._longest = max(fragment.length for fragment in self._fragments)
        self._vectors = OuterVectors(weights, settings, settings.among(place.replicas).keeps_rounding)
        self.slow_weights, self.momentum = self._vectors.slow_weights, self._vectors.momentum
        self.rounding = self._vectors.rounding
        self._idle = [self._new_round()]
        self._under_way: list[Round] = []  # as they began, on all ranks; each is waited for before the next
        self._pause_seconds = 0.0
        self._contacts = Contacts(transport, place)
        self._next_round = (-1, -1)  # and its fragment: the connections to this group are being opened

    def after_local_step(self, done: int) -> list[RoundReport]:
        """Run the round that is due, if any; with overlap, begin it, and merge the one begun d local steps before.

        Args:
            done: local steps done since the beginning of the training, this one included.

        Returns the reports of the rounds that have ended with this step: none after most steps, and more than one
        only where `overlap_steps` was changed. Raises as `run_round` does, and ValueError for a step below 1.
        """
        if done < 1:
            raise ValueError(f"done counts from 1: it is 1 after the first local step, not {done}")
        self.progress()
        reports = [self._merge(running) for running in list(self._under_way) if running.due <= done]
        schedule = self.local_steps, self.settings.fragments
        begins = fragment_after(done, *schedule)
        if begins is None:
            self._open_connections(*next_after(done, *schedule))
        elif not self.overlap_steps:
            reports.append(self.run_round(*begins))
        else:
            with self._paused():
                self._under_way.append(self._begin(*begins, due=done + self.overlap_steps))
        return reports

    def run_round(self, round_index: int, fragment: int = 0) -> RoundReport:
        """Exchange with the fragment's group of this round, and move the slow and the fast weights.

        Raises PartnerLostError (PartnerTimeoutError is a subclass): the group's round is then incomplete, and
        training has to go back to its last checkpoint.
        """
        self.wait()
        with self._paused():
            running = self._begin(round_index, fragment, due=0)
            running.finish()
        return self._ended(running)

    def progress(self, seconds: float = math.inf) -> bool:
        """Move the exchanges under way, if any, and use what has arrived, without waiting.

        Returns whether something of them is left to be done.

        Args:
            seconds: after which nothing more is computed.

        Call it often between local steps, such as at every microbatch: many MPI libraries move messages, and open
        connections, only when called.
        """
        self._contacts.progress()
        if self._under_way:
            with self._paused():
                until = time.monotonic() + seconds
                for running in self._under_way:
                    running.progress(until)
        return not all(running.arrived for running in self._under_way)

    def wait(self) -> None:
        """Wait for the exchanges under way, if any. Their rounds are merged when they are due, not now.

        Slow weights and outer momentum buffer are then those after the rounds. Raises as `run_round` does.
        """
        if self._under_way:
            with self._paused():
                for running in self._under_way:
                    running.wait()

    def finish(self) -> list[RoundReport]:
        """Wait for the exchanges under way, if any, and merge their rounds now. Call it after the last step.

        A collective of the replica if `Weights.refresh` is one. Raises as `run_round` does.
        """
        return [self._merge(running) for running in list(self._under_way)]

    def settle(self, exchange: AnyExchange, groups: Sequence[Group], number: int) -> list[ExchangeReport]:
        """Average the fast weights over one group after the other (alpha = 0, beta = gamma = 1).

        With groups that reach all replicas, the fast and slow weights of all are then the mean of all fast weights
        and kept rounding errors. The outer momentum buffer stays. Call `finish` before.

        Args:
            exchange: on a channel of its own (`Channel.FINAL`), in fp32.
            groups: of this replica.
            number: the same on all ranks, different from that of an earlier call by at least len(groups).

        Raises as `run_round` does.
        """
        assert not self._under_way
        mean, other = self.slow_weights, self._spare
        self.weights.read_into(mean)
        if self.rounding is not None:
            mean.add_(self.rounding)
            self.rounding.zero_()
        reports = []
        for place, group in enumerate(groups):
            mean, other = other, mean  # what is being sent is not written
            group_mean(exchange, other, group, number + place, f"final exchange {place}", out=mean)
            reports.append(exchange.report)
        if mean is not self.slow_weights:
            self.slow_weights.copy_(mean)
        with self.weights.writing() as write:
            write(0, self.slow_weights)
        return reports

    def add_late(self, change: Tensor) -> None:
        """Have weights and momentum as if the mean of the last round had been larger by a vector of the host.

        A collective of the replica if `Weights.refresh` is one.
        """
        if self.momentum is not None:
            self.momentum.add_(change.to(self.momentum.device))
        step = change * (1 + self.settings.outer_momentum * self.settings.outer_nesterov)
        self.slow_weights.add_(step.to(self.slow_weights.device))
        self.weights.add(step)

    def average_all(self, done: int) -> list[ExchangeReport]:
        """Make the weights of all replicas of a job their mean to rounding, after `done` steps; see `settle`.

        Returns the report of each exchange. Raises as `run_round` does.
        """
        place = self.place
        assert self.transport is not None
        assert place.replicas is not None
        groups = averaging_cycle(place.replica, place.replicas, self._seed)
        exchange = Exchange(self.transport, place, Channel.FINAL, self.settings.deadline_seconds)
        return self.settle(exchange, groups, done * len(groups))

    @contextmanager
    def evaluating(self) -> Iterator[Tensor]:
        """Give the slow weights, not to be written; inside, the fast weights may be overwritten.

        The fast weights are put back on leaving; meanwhile they are kept in the memory of a round (with several
        fragments, in host memory of their own). No round may run inside; exchanges under way are waited for first.
        """
        self.wait()
        with self.weights.kept_in(self._spare):
            yield self.slow_weights

    def state(self, wait: bool = True) -> dict[str, Tensor]:
        """Return what a resume needs of the outer optimizer, after waiting for the exchanges under way.

        Without `wait`, which is for separate jobs only, rounds whose exchange is under way are left out, as if
        they were skipped.

        Live tensors "slow_weights", unless alpha = 0 "outer_momentum", and "rounding" if that is kept. While
        rounds are not merged, also "correction" (phi - theta_s where it is to be merged, else zero),
        "delayed_rounds" (a row of `Round.numbers` for each) and "delayed_with" (local steps to a round, and
        fragments).
        """
        if wait:
            self.wait()
        state = {"slow_weights": self.slow_weights}
        if self.momentum is not None:
            state["outer_momentum"] = self.momentum
        if self.rounding is not None:
            state["rounding"] = self.rounding
        complete = [running for running in self._under_way if running.complete]
        if complete:
            correction = torch.zeros_like(self.slow_weights)
            for running in complete:
                running.fragment.scatter(running.correction, correction)
            rows = [running.numbers() for running in complete]
            state |= {
                "correction": correction,
                "delayed_rounds": pad_sequence(rows, batch_first=True, padding_value=-1),
                "delayed_with": self._schedule,
            }
        return state

    def restore(self, state: dict[str, Tensor], moved: bool = False) -> None:
        """Continue from what `state` returned. The fast weights are not in it: restore them before.

        Exchanges under way are waited for first, and not used; it raises as `run_round` does.

        A correction is merged at its step, also with another number of replicas; with another number of local
        steps or fragments it is merged now. A state without "outer_momentum" (written with alpha = 0, or without
        rounds) starts the momentum at zero, one without "rounding" the rounding.

        Args:
            moved: whether the vectors were put together from those of ranks with other weights. Fragments are then
                cut elsewhere, so a correction of one of several is merged now.
        """
        self.wait()
        self._idle += self._under_way
        self._under_way = []
        self.slow_weights.copy_(state["slow_weights"])
        for name, kept in (("outer_momentum", self.momentum), ("rounding", self.rounding)):
            if kept is not None:
                kept.copy_(state[name]) if name in state else kept.zero_()
        if "correction" not in state:
            return
        cut_elsewhere = moved and len(self._fragments) > 1
        if cut_elsewhere or not torch.equal(state["delayed_with"].cpu(), self._schedule):
            self.weights.add(state["correction"])
            return
        for numbers in state["delayed_rounds"]:
            self._under_way.append(self._free_round())
            self._under_way[-1].resume(numbers, self._fragments, state["correction"])

    @property
    def _spare(self) -> Tensor:
        """A vector as long as all weights, free while no exchange is under way."""
        rounds = [*self._idle, *self._under_way]
        whole = self._longest == self.weights.length and rounds
        if whole:
            return rounds[0].combined
        return torch.empty(self.weights.length, dtype=torch.float32, device=HOST)

    @property
    def _schedule(self) -> Tensor:
        return torch.tensor([self.local_steps, self.settings.fragments], dtype=torch.int64, device=HOST)

    def _begin(self, round_index: int, fragment: int, due: int) -> Round:
        group, number = self._group_of(round_index, fragment)
        running = self._free_round()
        running.begin(round_index, self._fragments[fragment], group, number, due)
        return running

    def _open_connections(self, round_index: int, fragment: int) -> None:
        """Open connections to the group of the next round, once, in the first local step before it."""
        if (round_index, fragment) != self._next_round:
            self._next_round = round_index, fragment
            self._contacts.open(*self._group_of(round_index, fragment))

    def _group_of(self, round_index: int, fragment: int) -> tuple[Group, int]:
        """Return the group of a fragment's round, and the number of its exchange."""
        replica, grouping = self.place.replica, self.grouping
        group = (replica,) if grouping is None else grouping.group(replica, round_index, fragment)
        return group, round_index * self.settings.fragments + fragment

    def _merge(self, running: Round) -> RoundReport:
        with self._paused():
            for earlier in self._under_way[: self._under_way.index(running) + 1]:
                earlier.wait()
            running.merge()
        self._under_way.remove(running)
        return self._ended(running)

    def _ended(self, ended: Round) -> RoundReport:
        self._idle.append(ended)
        # For gamma = beta, c / gamma is theta itself; otherwise the point phi + (beta / gamma) * Delta near it.
        spread = ended.report.standard_deviation / (self.settings.gamma or self.settings.outer_lr)
        pause_seconds, self._pause_seconds = self._pause_seconds, 0.0
        return RoundReport(ended.index, ended.report, spread, pause_seconds, ended.fragment.index)

    def _free_round(self) -> Round:
        return self._idle.pop() if self._idle else self._new_round()

    def _new_round(self) -> Round:
        exchange = self._exchange() if self._separate_jobs is None else self._separate_jobs.exchange()
        coded = self.settings.codes_on_device(self.place.replicas is None)
        return Round(self._vectors, exchange, self._longest, self._vectors.home if coded else HOST)

    def _exchange(self) -> Exchange:
        settings = self.settings
        assert self.transport is not None
        numbers = settings.deadline_seconds, settings.payload_bits
        return Exchange(self.transport, self.place, Channel.ROUNDS, *numbers)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._pause_seconds += time.perf_counter() - started


class NoRounds:
    """Has the interface of `OuterOptimizer` for a replica that trains alone, with fast weights only."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def after_local_step(self, done: int) -> list[RoundReport]:
        """Return no reports: no round is ever due."""
        return []

    def progress(self, seconds: float = math.inf) -> bool:
        """Return False: no exchange is ever under way."""
        return False

    def wait(self) -> None:
        """Return at once: nothing is ever under way."""

    def finish(self) -> list[RoundReport]:
        """Return no reports: nothing is ever under way."""
        return []

    @contextmanager
    def evaluating(self) -> Iterator[Tensor]:
        """Give the fast weights, copied to host memory, and put them back on leaving; see `OuterOptimizer`."""
        fast = torch.empty(self.weights.length, dtype=torch.float32, device=HOST)
        with self.weights.kept_in(fast):
            yield fast

    def state(self, wait: bool = True) -> dict[str, Tensor]:
        """Return the fast weights as "slow_weights", so that readers of checkpoints need not know the method."""
        return {"slow_weights": self.weights.read()}

    def restore(self, state: dict[str, Tensor], moved: bool = False) -> None:
        """Merge the rounds of the state that were not merged yet. Restore the fast weights before."""
        if "correction" in state:
            self.weights.add(state["correction"])


Rounds = OuterOptimizer | NoRounds
"""What a training loop calls after each local step."""


@contextmanager
def mean_model(outer: Rounds, exchange: Exchange, number: int) -> Iterator[ExchangeReport]:
    """Put the mean of all replicas' slow weights in the place of the weights; on leaving, put these back.

    This is the mean model, to be evaluated or saved. All ranks of all replicas call it together. Gives the report
    of the exchange: the replicas in the mean, and their spread. Raises PartnerLostError when a replica does not
    answer; the weights are then put back.

    Args:
        outer: of this rank.
        exchange: on a channel of its own (`Channel.MEAN_MODEL`). Its buffers are all the memory that this takes.
        number: of this evaluation, the same on all ranks: the local steps done.
    """
    assert exchange.place.replicas is not None
    with outer.evaluating() as slow_weights:
        exchange.begin(slow_weights, tuple(range(exchange.place.replicas)), number, "an evaluation")
        with outer.weights.writing() as write:
            for start, _, mean in exchange.finish():
                write(start, mean)
        yield exchange.report
