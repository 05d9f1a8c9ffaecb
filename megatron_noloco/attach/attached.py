"""Rounds in a training loop that exists: the object that `attach` returns."""

import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING
from weakref import WeakSet, finalize

from torch import Tensor, nn

from megatron_noloco.attach.job_state import JobState
from megatron_noloco.attach.loop_watch import Ending, LoopWatch
from megatron_noloco.attach.replica_groups import this_rank
from megatron_noloco.attach.shards import Engine
from megatron_noloco.errors import UserError
from megatron_noloco.job.activity import now
from megatron_noloco.job.watchdog import Watchdog
from megatron_noloco.outer import ExchangeReport, RoundReport, Weights
from megatron_noloco.outer.peers import Peers
from megatron_noloco.plans.fragments import fragment_after

if TYPE_CHECKING:
    from megatron_noloco.federation.members import Members

_ATTACHED: WeakSet["Attached"] = WeakSet()  # and not closed


def check_not_attached(weights: Weights) -> None:
    """Raise UserError where any of these weights are attached already."""
    own = _addresses(weights)
    if any(own & _addresses(other.outer.weights) for other in _ATTACHED):
        raise UserError("attach: this model is attached already; close() what attach returned before")


def _addresses(weights: Weights) -> set[int]:
    return {part.data_ptr() for part in weights.parts() if part.numel()}


class Attached:
    """Runs the rounds of one rank. All ranks of all replicas call its methods at the same places of their loops.

    Attributes:
        done: local steps of the training so far. Use it for the learning rate, and for the end of the loop. In a
            federation it jumps ahead, without steps of this loop, when the job has fallen
            `FederationSettings.rounds_behind` rounds behind and has taken over the state of another one, and
            often when the job is slow (`FederationSettings.skip_local_steps`).
        outer: the outer optimizer of this rank.
        when_loaded: called before weights are loaded into the model; by default it refuses them with UserError.
    """

    def __init__(
        self,
        engine: Engine,
        done: int,
        job_state: JobState,
        peers: Peers,
        rows: "RoundRows | None",
    ) -> None:
        self.outer, self.done = job_state.outer, done
        self.when_loaded = _refuse_load
        self._engine, self._job_state, self._peers, self._rows = engine, job_state, peers, rows
        self._rounds = self._rounds_met = 0
        self._steps = None if engine.steps is None else engine.steps()
        self._until_closed = ExitStack()
        place = self.outer.place
        self._loop, self._ending = LoopWatch(engine), Ending(place.replica, place.replicas, done)
        self._until_closed.callback(self._loop.close)
        self._until_closed.callback(finalize(self, self._ending.without_close).detach)
        for part in chain.from_iterable(module.modules() for module in engine.modules):
            hook = part.register_load_state_dict_pre_hook(_Notice(self, part))
            self._until_closed.callback(hook.remove)
        _ATTACHED.add(self)

    @property
    def taken(self) -> int:
        """The local steps of the state of `inner` that was taken over last, after `attach`; -1: none was.

        A schedule in it is advanced up to there.
        """
        return self._job_state.inner_from

    def step(self) -> list[RoundReport]:
        """Count a local step, and run the round that is due, if any. Call it after each step of the optimizer.

        With DeepSpeed, call it after each `engine.step()`; it does nothing while gradients are accumulated.

        Returns the reports of the rounds that ended with it: none after most steps. In a federation a lost partner
        costs a skipped round, and the report says why (`report.exchange.missed`).

        Raises UserError after `close`. Raises PartnerLostError in one job, when a partner is gone, or its
        subclass PartnerTimeoutError, when a partner does not answer in time: go back to a checkpoint. In a
        federation raises NotFiniteError where a round is due and a weight of this replica is not finite, and
        UntrainedError where this job began without a state, and the others have trained long before or wait at
        their end.
        """
        self._check_not_closed()
        if self._engine.steps is not None:
            before, self._steps = self._steps, self._engine.steps()
            if self._steps == before:
                return []
        self.done += 1
        settings = self.outer.settings
        if fragment_after(self.done, settings.local_steps, settings.fragments) is not None:
            self._engine.check_unchanged()
        reports = []
        if self.outer.place.replicas != 1:
            with now.doing(f"in the round after local step {self.done}"):
                reports = self._peers.rounds(self.done)
        self._compare(reports)
        self._loop.after_step(bool(reports))
        if self._rows is not None:
            self._rows.after_step(self.done, reports)
        self._ending.done = self.done = self._peers.catch_up(self.done).step
        now.part(f"local step {self.done + 1}")
        return reports

    def _check_not_closed(self) -> None:
        """Raise UserError after `close`: this replica would be alone from then on, and nobody would notice."""
        if self not in _ATTACHED:
            raise UserError(
                "attach: no rounds and no average after close(); call close() last, or attach again"
            )

    def _compare(self, reports: list[RoundReport]) -> None:
        """Count rounds, and warn where the first round with a partner finds equal weights."""
        spreads = [report.spread for report in reports if len(report.exchange.group) > 1]
        if spreads and not self._rounds_met and spreads[0] == 0:
            warnings.warn(
                "the replicas had equal weights before their first round: do they all read the same data, or "
                "are their gradients reduced over all of them?",
                stacklevel=3,
            )
        self._rounds += len(reports)
        self._rounds_met += len(spreads)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what this rank saves beside its model and optimizer; `attach(..., state=...)` continues from it.

        Each rank has a state of its own, which belongs to the present weights: it has their SHA-256, which takes
        some 2.5 s for 10^9 weights of a rank. The tensors are live: save or copy them before the next step.

        Raises UserError for a state that is registered and made of more than numbers, text and tensors.
        """
        self._ending.kept = self.done
        return self._job_state.state_dict(self.done)

    def average(self) -> list[ExchangeReport]:
        """Make all replicas one model, the mean of their weights. Call it after the last step.

        In one job all replicas then have the mean to rounding, in a federation the same bits. With overlap, rounds
        under way are merged before. Buffers, such as the running means of batch norm, stay each replica's own.

        A job of a federation waits for the others that are there, as long as they train. A job that does not begin
        a round for `NolocoSettings.deadline_seconds` is left out. A job that ended more than
        `FederationSettings.rounds_behind` rounds before the others takes the final model of one of them. A warning
        names the jobs that are left out. Where this job is asked to stop meanwhile (`stopped` of `attach`), its
        weights stay its own.

        Returns reports with the replicas averaged, and how far apart they were; none where it was asked to stop,
        or took the model of another.

        Raises UserError after `close`, and PartnerLostError in one job, as `step` does.
        """
        self._check_not_closed()
        self._engine.check_unchanged()
        self.outer.finish()
        average = self._peers.average(self.done, trained=True, before_waiting=lambda: None)
        for report in average.reports:
            if report.missed:
                warnings.warn(f"the final average is {report.missed}", stacklevel=2)
        if not average.stopped:
            self._peers.stay(self.done)
        self._ending.kept = self.done
        return list(average.reports)

    def leave(self) -> list[RoundReport]:
        """Exchange once more before the next round is due, where this job of a federation is told to end.

        So a partner keeps half of what this replica has learned since its last round. Waits for a partner
        `FederationSettings.leave_seconds` at most, also where `stopped` says that this job is to stop. Save what
        `state_dict` returns afterwards, and call `close`.

        Returns the reports of the rounds that ended. Does nothing in one job. Raises as `step` does.
        """
        self._check_not_closed()
        self._engine.check_unchanged()
        boundary = self._peers.leave(self.done)
        self.done, reports = boundary.step, list(boundary.rounds)
        self._compare(reports)
        return reports

    def close(self, at_once: bool = False) -> None:
        """Send what partners still need, and detach. Call it at the end, or before the process leaves otherwise.

        With overlap, the rounds under way are merged, except `at_once` or while an exception is handled. A job of
        a federation does not wait for them then. A second call does nothing.
        """
        if self not in _ATTACHED:
            return
        _ATTACHED.discard(self)
        raising = at_once or sys.exception() is not None
        if not raising and self._ending.kept < self.done and (line := self._ending.words):
            warnings.warn(line, stacklevel=2)
        with self._until_closed:
            self._until_closed.callback(self._peers.close, raising)
            summary = self._peers.summary(self._rounds_met, self._rounds)
            if summary and not self._rounds_met:
                warnings.warn(f"{summary}; lines on stderr say why", stacklevel=2)
            if not raising:
                self.outer.finish()

    def watch(self, seconds: float) -> None:
        """Until `close`, report on stderr when this rank has stood still for `seconds`.

        The line says what the rank was doing, and which rank it waits for. The report is repeated each time that
        the wait has doubled, and whenever the process receives SIGUSR2; with `seconds` 0 only then. Nothing is
        ended by it. Call it from the main thread.
        """
        now.who = f"replica {self.outer.place.replica}, rank {this_rank()}"
        self._until_closed.enter_context(now.doing("training"))
        self._until_closed.enter_context(Watchdog(seconds))


class _Notice:
    """Calls `when_loaded` before weights are loaded into an attached module.

    Copies of the module have the hook as well, and may load. In a copy that was pickled, such as the model of a
    spawned process or a file of torch.save, a method of text takes its place, which any program has.
    """

    def __init__(self, attached: Attached, module: nn.Module) -> None:
        self._attached, self._own = attached, id(module)

    def __call__(self, module: nn.Module, *_: object) -> None:
        if id(module) == self._own:
            self._attached.when_loaded()

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, ("", "format")  # takes any arguments, and does nothing


def _refuse_load() -> None:
    raise UserError(
        "load_state_dict of a model that is attached: the next round would undo it; load first, attach last"
    )


class RoundRows:
    """Sends a row to all jobs after each round, for `watch` where another job of the federation is the trainer's.

    The names are those of the trainer's metrics.
    """

    def __init__(self, members: "Members") -> None:
        self._members = members
        self._since, self._steps = time.monotonic(), 0
        self._sent_bytes = self._missed = 0

    def after_step(self, done: int, reports: Sequence[RoundReport]) -> None:
        """Count a local step, the `done`-th of the training, and send a row where a round has ended with it."""
        self._steps += 1  # not of `done`, in which steps that are left out count
        for report in reports:
            self._sent_bytes += report.exchange.bytes_sent
            self._missed += bool(report.exchange.missed)
        if not reports:
            return
        slot, last, at = self._members.slot, reports[-1], time.monotonic()
        row = {
            "kind": "step",
            "step": done,
            "replica": slot,
            "unix_seconds": time.time(),
            "speed/seconds_per_step": (at - self._since) / self._steps,
            "total/sent_bytes": self._sent_bytes,
            "total/missed_rounds": self._missed,
            **{name: value for name, value, _ in last.numbers(slot)},
        }
        self._since, self._steps = at, 0
        self._members.publish_row(row)
