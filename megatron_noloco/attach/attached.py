"""Rounds for somebody else's loop."""

import sys
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from numbers import Integral
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from megatron_noloco.attach.checks import check_statements, digest_of, statement_of, tensor_of
from megatron_noloco.attach.engines import trained_by
from megatron_noloco.attach.groups import cut_into
from megatron_noloco.attach.trained import Trained, here
from megatron_noloco.federation.pairing import Others
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import of_all_ranks
from megatron_noloco.job.watchdog import Watchdog
from megatron_noloco.outer import (
    Channel,
    Exchange,
    ExchangeReport,
    OuterOptimizer,
    RoundReport,
    Weights,
)
from megatron_noloco.plans.fragments import fragment_after, next_after
from megatron_noloco.plans.grouping import Grouping, averaging_cycle
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import (
    FederationSettings,
    NolocoSettings,
    federation_problems,
    groups_problem,
)
from megatron_noloco.transport.protocol import Transport
from megatron_noloco.transport.torch_dist import TorchTransport

if TYPE_CHECKING:
    from megatron_noloco.federation.keeping_up import KeepingUp

_ATTACHED: WeakSet["Attached"] = WeakSet()  # and not closed
_FINAL_PAIRS = 10  # of random pairs, where no cycle of pairs gives all replicas the mean


class Attached:
    """What `attach` returns. All ranks of all replicas call its methods at the same places of their loops.

    Attributes:
        done: local steps of the training so far. Of a job of a federation: it goes on where the others are when
            it has fallen `FederationSettings.rounds_behind` rounds behind, or is slow and leaves out local steps
            (`FederationSettings.local_steps`), so that `done` is then more than the steps that this loop has
            taken. Use it for the learning rate, and for the end of the loop.
        outer: the outer optimizer of this rank.
    """

    def __init__(
        self,
        trained: Trained,
        outer: OuterOptimizer,
        first_weights: bytes,
        state: dict[str, Tensor] | None,
        keeping_up: "KeepingUp | None" = None,
    ) -> None:
        self.outer = outer
        self.done = 0
        self._trained = trained
        self._first_weights = first_weights
        self._keeping_up = keeping_up
        self._has_met = False
        self._until_closed = ExitStack()
        self._until_closed.enter_context(trained.while_attached())
        _ATTACHED.add(self)
        self._steps = 0 if trained.steps is None else trained.steps()
        if state is not None:
            self.done = int(state["local_steps_done"])
            outer.restore(state)
        if keeping_up is not None:
            keeping_up.start(self.done)

    def step(self) -> list[RoundReport]:
        """Call it after each step of the optimizer. Most calls do nothing: a round follows every k steps.

        With DeepSpeed, call it after each `engine.step()`; it does nothing while gradients are accumulated.

        Returns the reports of the rounds that ended with it. In one job it raises PartnerLostError when a partner
        is gone, or does not answer in time (PartnerTimeoutError, a kind of it): go back to a checkpoint. In a
        federation a partner that is lost costs a bye, which the report tells (`report.exchange.missed`), and it
        raises UntrainedError only: where this job began anew and the others have trained long before.
        """
        if self._trained.steps is not None:
            steps = self._trained.steps()
            if steps == self._steps:
                return []
            self._steps = steps
        self.done += 1
        settings = self.outer.settings
        if fragment_after(self.done, settings.local_steps, settings.fragments) is not None:
            self._trained.check_all()
        with now.doing(f"in the round after local step {self.done}"):
            alone = self.outer.place.replicas == 1  # a loop that is being tried out: no rounds
            reports = [] if alone else self.outer.after_local_step(self.done)
        self._compare(reports)
        if self._keeping_up is not None:
            self.done = self._keeping_up.next_step(self.done)
        now.part(f"local step {self.done + 1}")
        return reports

    def _compare(self, reports: list[RoundReport]) -> None:
        """Warn where the first round with a partner finds equal weights."""
        met = [report for report in reports if len(report.exchange.group) > 1]
        if met and not self._has_met:
            self._has_met = True
            if met[0].spread == 0:
                warnings.warn(
                    "the replicas had equal weights before their first round: do they all read the same data, or "
                    "are their gradients reduced over all of them?",
                    stacklevel=3,
                )

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank saves beside its model and its optimizer; `attach(..., state=...)` continues from it.

        Each rank has a state of its own, which belongs to the weights as they are now. The tensors are live: save
        them, or copy them, before the next step.
        """
        return self.outer.state() | {
            "local_steps_done": torch.tensor(self.done),
            "first_weights": tensor_of(self._first_weights),
            "weights": tensor_of(digest_of(self.outer.weights)),
        }

    def average(self) -> list[ExchangeReport]:
        """After the last step: plain averages of the weights in pairs, after which the replicas are one model.

        In one job, and in a federation whose slots are a power of two, all there and at the same step, all
        replicas then have the mean of their weights, to rounding. With another number of slots there are 10
        averages in random pairs, each of which halves the squared spread. The jobs that are there are waited for,
        `NolocoSettings.deadline_seconds` at most; the others are left out. The reports say whom this one met, and
        how far apart they were.
        """
        self._trained.check_all()
        transport, place, grouping = self.outer.transport, self.outer.place, self.outer.grouping
        settings = self.outer.settings
        exchange = Exchange(transport, place, Channel.FINAL, settings.deadline_seconds)
        groups = averaging_cycle(place.replica, place.replicas, grouping.seed)
        if self._keeping_up is None:
            return self.outer.settle(exchange, groups, self.done * len(groups))
        self._keeping_up.wait_at_end(self.done)
        if any(len(group) != 2 for group in groups):  # jobs meet in pairs
            pairs = Grouping(place.replicas, 2, grouping.seed)
            groups = [pairs.group(place.replica, index) for index in range(_FINAL_PAIRS)]
        round_index, fragment = next_after(self.done, settings.local_steps, settings.fragments)
        number = round_index * settings.fragments + fragment  # after those of all rounds

        def planned(at: int, others: Others) -> int | None:
            return next((other for other in groups[at - number] if other in others.free), None)

        from megatron_noloco.federation.commit import CommittedExchange, Guard

        committed = CommittedExchange(exchange, self._keeping_up.partners, planned, Guard())
        return self.outer.settle(committed, groups, number)

    def close(self) -> None:
        """At the end, or before the process leaves for another reason: what a partner still needs is sent.

        With `delay_steps` the rounds that are under way are merged, but not while an exception is handled.
        """
        _ATTACHED.discard(self)
        with self._until_closed:
            if sys.exception() is None:
                self.outer.finish()
            else:
                self.outer.wait()
            if self._keeping_up is not None:
                self._keeping_up.leave()

    def watch(self, seconds: float) -> None:
        """Until `close`, say on stderr when this rank has stood still for so many seconds.

        One line tells what it was doing, and whom it waits for; again each time that the wait has doubled, and
        whenever the process receives SIGUSR2; with `seconds` 0 only then. Nothing is ended by it. To be called by
        the main thread.
        """
        now.who = f"replica {self.outer.place.replica}, rank {self.outer.place.rank}"
        self._until_closed.enter_context(now.doing("training"))
        self._until_closed.enter_context(Watchdog(seconds, path=None))


def attach(
    engine: Any,
    settings: NolocoSettings | None = None,
    *,
    replicas: int | None = None,
    federation: FederationSettings | None = None,
    slot: int | None = None,
    seed: int = 0,
    transport: Transport | None = None,
    state: dict[str, Tensor] | None = None,
) -> Attached:
    """Add rounds between replicas to a loop. Call it last before the loop, after a checkpoint is loaded.

    Args:
        engine: what is trained: DeepSpeed's engine, with any ZeRO stage; a torch module, in
            DistributedDataParallel where the job has several ranks; or Megatron-core's distributed optimizer.
        settings: of the method; the same on all ranks of all replicas, as is seed.
        replicas: number of replicas, where this job holds all of them: its ranks are divided into so many
            blocks of consecutive ranks. The gradients have to be reduced inside a block: `ReplicaGroups` makes
            the process groups. With 1 there are no rounds.
        federation: where this job is one replica, and the others are other jobs. Nothing else changes in the
            job: its gradients are reduced over all of its ranks, as before, and these are the replica.
        slot: the number of this job's replica in the federation, from 0.
        seed: of the groups.
        transport: for the exchanges inside one job; by default torch.distributed's messages between two ranks.
        state: of this rank, saved with `Attached.state_dict` beside the weights that are loaded now. Without,
            training begins, and the weights of all replicas have to be equal bit for bit.

    Raises ValueError where gradients are not reduced over the ranks of one replica, where ranks of this job have
    different settings, or its replicas different weights, for settings with which the replicas drift apart, for a
    state of other weights, for a rendezvous or a key file that is none, and where the weights cannot be had. Jobs
    of a federation whose first weights, settings or sizes differ refuse each other: with a line on stderr where
    they have a list of addresses; in a shared folder they do not see each other.
    """
    settings = NolocoSettings() if settings is None else settings
    _check_arguments(settings, replicas, federation, slot, transport)
    trained = trained_by(engine)
    if any(_memory(trained.weights) & _memory(other.outer.weights) for other in _ATTACHED):
        raise ValueError("attach: this model is attached already; close() what attach returned before")
    rank, ranks = here()
    if federation is not None:
        topology = Topology(dp=ranks, slot=slot or 0, slots=federation.slots or 0)
    else:
        assert replicas is not None
        topology = cut_into(replicas)
    place = topology.place(rank)
    problem = groups_problem(settings, place.replicas)
    alike = asdict(settings) | {"seed": seed, "slot": topology.slot, "slots": topology.slots}
    statements = of_all_ranks(statement_of(trained, topology, rank, alike, state, problem))
    check_statements(statements, rank, topology)
    first_weights = statements[rank].first_weights
    if federation is None:
        transport = TorchTransport() if transport is None else transport
        outer = OuterOptimizer(trained.weights, transport, place, settings, seed)
        return Attached(trained, outer, first_weights, state)

    from megatron_noloco.federation.join import join_federation

    of_ranks = [[one.lengths, one.first_weights.hex()] for one in statements]
    membership = join_federation(federation, settings, place, {"seed": seed, "ranks": of_ranks})
    commit = membership.commit(seed)
    outer = OuterOptimizer(trained.weights, membership.transport, place, settings, seed, commit)
    attached = Attached(trained, outer, first_weights, state, membership.keeping_up)
    if not membership.wait_for_start():
        warnings.warn("fewer jobs than federation.start_with are there; starting without", stacklevel=2)
    return attached


def _check_arguments(
    settings: NolocoSettings,
    replicas: int | None,
    federation: FederationSettings | None,
    slot: int | None,
    transport: Transport | None,
) -> None:
    for name, value, kind in (
        ("settings", settings, NolocoSettings),
        ("federation", federation, FederationSettings),
    ):
        if not isinstance(value, kind | None):
            raise ValueError(f"attach: {name} must be {kind.__name__}(...), not {value!r}")
    if (replicas is None) == (federation is None):
        raise ValueError(
            "attach: give replicas, where this job holds all of them, or federation, where it is one of them"
        )
    if settings.chooses_delay:
        raise ValueError('attach: overlap.delay_steps "auto" is the trainer\'s; give a number of local steps')
    if federation is None:
        if slot is not None:
            raise ValueError(
                "attach: slot is the number of a job of a federation; leave it out with replicas"
            )
        return
    if problem := next(federation_problems(federation, settings), ""):
        raise ValueError(f"attach: {problem}")
    slots = federation.slots or 0
    if not isinstance(slot, Integral) or not 0 <= slot < slots:
        raise ValueError(f"attach: slot must be from 0 to slots - 1 = {slots - 1}, not {slot!r}")
    if transport is not None:
        raise ValueError("attach: a federation has a transport of its own; leave transport out")


def _memory(weights: Weights) -> set[int]:
    """Return where the tensors lie."""
    return {part.data_ptr() for part in weights.parts() if part.numel()}
