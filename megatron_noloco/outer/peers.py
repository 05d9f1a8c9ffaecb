"""The other replicas of a training, as the loop of one rank meets them: in one job, or as separate jobs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from megatron_noloco.outer.finite_mean import ExchangeReport
from megatron_noloco.outer.optimizer import OuterOptimizer, Rounds
from megatron_noloco.outer.round import RoundReport


class Boundary(NamedTuple):
    """What happened at a boundary between two local steps.

    Attributes:
        step: the next local step, from 0: a later one where a state was taken over, or steps were left out.
        left_out: local steps that were left out; the weights stay this replica's own.
        rounds: that have ended.
        lines: for the log.
        numbers: for the log, by name.
    """

    step: int
    left_out: int = 0
    rounds: Sequence[RoundReport] = ()
    lines: tuple[str, ...] = ()
    numbers: Mapping[str, float] = {}


class Average(NamedTuple):
    """The mean of the replicas at the end.

    Attributes:
        reports: of its exchanges; empty where nothing was averaged.
        seconds: of all of it, with the wait for the last replicas.
        stopped: whether nothing was averaged because the job was asked to stop meanwhile.
        lines: for the log.
        replicas: separate jobs that have this model, as far as is known; empty where nothing was averaged.
    """

    reports: Sequence[ExchangeReport] = ()
    seconds: float = 0.0
    stopped: bool = False
    lines: tuple[str, ...] = ()
    replicas: Collection[int] = ()


class Peers(Protocol):
    """The other replicas. All ranks of a replica call the methods together, but `summary` and `close`.

    Attributes:
        outer: the outer optimizer, which exchanges with them.
    """

    @property
    def outer(self) -> Rounds: ...

    def begin(self, done: int, takes_over: bool) -> Boundary:
        """Begin to train after `done` local steps; if asked, from the state of a replica that is far ahead."""

    def catch_up(self, done: int) -> Boundary:
        """Return where the training goes on after `done` local steps. Call it before each local step."""

    def rounds(self, done: int) -> list[RoundReport]:
        """Run the rounds that are due after `done` local steps; see `OuterOptimizer.after_local_step`."""

    def average(self, done: int, trained: bool, before_waiting: Callable[[], object]) -> Average:
        """Make all replicas their mean, after the last local step. Call `OuterOptimizer.finish` before.

        Args:
            trained: whether this process has computed a local step; if not, the replicas of a job are averaged.
            before_waiting: called before what may take as long as the training of another replica.
        """

    def stay(self, done: int) -> None:
        """Give the final model to replicas that were lost before their end and may come back. Call it when it is
        saved.
        """

    def leave(self, done: int) -> Boundary:
        """Give the others what this replica has learned since its last round, as the job is asked to end."""

    def summary(self, met: int, rounds: int) -> str:
        """Return what the end of the log says of a run that had a partner in `met` of its rounds."""

    def close(self, at_once: bool) -> None:
        """Let no other replica wait for this one.

        Args:
            at_once: whether rounds are under way, which are not merged.
        """


class JobPeers:
    """The replicas of this job, which train in step: none is waited for, or taken over."""

    def __init__(self, outer: Rounds) -> None:
        self.outer = outer

    def begin(self, done: int, takes_over: bool) -> Boundary:
        return Boundary(done)

    def catch_up(self, done: int) -> Boundary:
        return Boundary(done)

    def rounds(self, done: int) -> list[RoundReport]:
        return self.outer.after_local_step(done)

    def average(self, done: int, trained: bool, before_waiting: Callable[[], object]) -> Average:
        if not trained or not isinstance(self.outer, OuterOptimizer):
            return Average()
        reports = self.outer.average_all(done)
        return Average(reports, sum(report.seconds for report in reports))

    def stay(self, done: int) -> None:
        """Do nothing: the replicas of a job end together."""

    def leave(self, done: int) -> Boundary:
        return Boundary(done)

    def summary(self, met: int, rounds: int) -> str:
        return ""

    def close(self, at_once: bool) -> None:
        if at_once:  # partners need what this rank sends
            self.outer.wait()
