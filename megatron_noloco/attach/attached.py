"""Rounds in a training loop that exists: `attach`, and the object that it returns."""

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_noloco.attach.adapter import EngineAdapter, Stateful, copies_in
from megatron_noloco.attach.checks import (
    check_arguments,
    check_start,
    digest_of,
    digests_of,
    start_report,
    tensor_of,
)
from megatron_noloco.attach.inner import InnerState, check_no_weights, inner_state
from megatron_noloco.attach.other_state import model_of
from megatron_noloco.attach.replica_groups import this_rank, topology_of
from megatron_noloco.attach.torch_module import torch_adapter
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import of_all_ranks
from megatron_noloco.job.watchdog import Watchdog
from megatron_noloco.outer import ExchangeReport, OuterOptimizer, RoundReport, Weights
from megatron_noloco.plans.fragments import fragment_after
from megatron_noloco.plans.topology import Place, Topology
from megatron_noloco.settings import FederationSettings, NolocoSettings, groups_problem
from megatron_noloco.transport.interface import Transport
from megatron_noloco.transport.torch_dist import TorchTransport

if TYPE_CHECKING:
    from megatron_noloco.attach.job_state import JobState
    from megatron_noloco.attach.round_rows import RoundRows
    from megatron_noloco.federation.membership import Membership

# What jobs compare where a rank exchanges with the rank at its place; the name stands in the line of a refusal.
_SAME_RANKS = "ranks and parallel sizes. This engine needs the same in all jobs"
_ATTACHED: WeakSet["Attached"] = WeakSet()  # and not closed


class Attached:
    """Runs the rounds of one rank. All ranks of all replicas call its methods at the same places of their loops.

    Attributes:
        done: local steps of the training so far. Use it for the learning rate, and for the end of the loop. In a
            federation it jumps ahead, without steps of this loop, when the job has fallen
            `FederationSettings.rounds_behind` rounds behind and has taken over the state of another one, and
            often when the job is slow (`FederationSettings.skip_local_steps`).
        outer: the outer optimizer of this rank.
        when_loaded: called before weights are loaded into the model; by default it refuses them with ValueError.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        outer: OuterOptimizer,
        first: dict[str, str],
        state: dict[str, Tensor] | None,
        inner: InnerState | None,
        membership: "Membership | None" = None,
        job_state: "JobState | None" = None,
    ) -> None:
        self.outer = outer
        self.when_loaded = _refuse_load
        self.done = 0
        self._rounds = self._rounds_met = 0
        self._adapter = adapter
        self._first = first
        self._unchecked = [] if inner is None else list(inner.optimizers)
        self._membership, self._job_state = membership, job_state
        self._health = None if membership is None else membership.health(outer.weights)
        self._until_closed = ExitStack()
        self._until_closed.enter_context(adapter.while_attached(lambda: self.when_loaded()))
        _ATTACHED.add(self)
        self._steps = 0 if adapter.steps is None else adapter.steps()
        if state is not None:
            self.done = int(state["local_steps_done"])
            outer.restore(state)
        if membership is not None:
            self.done = membership.begin(self.done, takes=state is None).step
        self._rows = None if membership is None else _rows_for(membership, self.done)

    @property
    def taken(self) -> int:
        """The local steps of the state of `inner` that was taken over last, after `attach`; -1: none was.

        A schedule in it is advanced up to there.
        """
        return -1 if self._job_state is None else self._job_state.inner_from

    def step(self) -> list[RoundReport]:
        """Count a local step, and run the round that is due, if any. Call it after each step of the optimizer.

        With DeepSpeed, call it after each `engine.step()`; it does nothing while gradients are accumulated.

        Returns the reports of the rounds that ended with it: none after most steps. In a federation a lost partner
        costs a skipped round, and the report says why (`report.exchange.missed`).

        Raises PartnerLostError in one job, when a partner is gone, or its subclass PartnerTimeoutError, when a
        partner does not answer in time: go back to a checkpoint. In a federation raises NotFiniteError where a
        round is due and a weight of this replica is not finite, and UntrainedError where this job began without a
        state, and the others have trained long before or wait at their end.
        """
        if self._adapter.steps is not None:
            steps = self._adapter.steps()
            if steps == self._steps:
                return []
            self._steps = steps
        self.done += 1
        settings = self.outer.settings
        if fragment_after(self.done, settings.local_steps, settings.fragments) is not None:
            self._adapter.check_all()
            while self._unchecked:  # before the first round
                check_no_weights(self._unchecked.pop(0))
        if self._health is not None:
            self._health.after_step(self.done, ())
        reports = []
        if self.outer.place.replicas > 1:
            with now.doing(f"in the round after local step {self.done}"):
                reports = self.outer.after_local_step(self.done)
        self._compare(reports)
        if self._rows is not None:
            self._rows.tell(self.done, reports)
        if self._membership is not None:
            self.done = self._membership.between_steps(self.done).step
        now.part(f"local step {self.done + 1}")
        return reports

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
        """
        return self.outer.state() | {
            "local_steps_done": torch.tensor(self.done),
            "first_weights": tensor_of(self._first["weights"]),
            "first_buffers": tensor_of(self._first["buffers"]),
            "weights": tensor_of(digest_of(self.outer.weights)),
        }

    def average(self) -> list[ExchangeReport]:
        """Make all replicas one model, the mean of their weights. Call it after the last step.

        In one job all replicas then have the mean to rounding, in a federation the same bits. With overlap, rounds
        under way are merged before. Buffers, such as the running means of batch norm, stay each replica's own.

        A job of a federation waits for the others that are there, as long as they train. A job that does not begin
        a round for `NolocoSettings.deadline_seconds` is left out. A job that ended more than
        `FederationSettings.rounds_behind` rounds before the furthest gets the mean of the others, without its own
        weights in it. A warning names the jobs that are left out. Where this job is asked to stop meanwhile
        (`stopped` of `attach`), its weights stay its own.

        Returns reports with the replicas averaged, and how far apart they were; none where it was asked to stop.
        Raises PartnerLostError in one job, as `step` does.
        """
        self._adapter.check_all()
        self.outer.finish()
        if self._membership is not None:
            reports = self._membership.average(self.outer, self.done)
            for report in reports:
                if report.missed:
                    warnings.warn(f"the final average is {report.missed}", stacklevel=2)
            return reports
        return self.outer.average_all(self.done)

    def leave(self) -> list[RoundReport]:
        """Exchange once more before the next round is due, where this job of a federation is told to end.

        So a partner keeps half of what this replica has learned since its last round. Waits for a partner
        `FederationSettings.leave_seconds` at most, also where `stopped` says that this job is to stop. Save what
        `state_dict` returns afterwards, and call `close`.

        Returns the reports of the rounds that ended. Does nothing in one job. Raises as `step` does.
        """
        reports = list[RoundReport]()
        if self._membership is not None and self._health is not None:
            self._adapter.check_all()
            self._health.check()
            reports, self.done = self._membership.exchange_once_more(self.outer, self.done)
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
        with self._until_closed:
            if self._membership is not None:
                self._until_closed.callback(self._membership.leave)
            if self._membership is not None and self._rounds and not self._rounds_met:
                warnings.warn(
                    f"none of this job's {self._rounds} rounds had a partner: it trained alone; lines on stderr "
                    "say why",
                    stacklevel=2,
                )
            if not raising:
                self.outer.finish()
            elif self._membership is None:  # else all ranks of the replica would have to come here
                self.outer.wait()

    def watch(self, seconds: float) -> None:
        """Until `close`, report on stderr when this rank has stood still for `seconds`.

        The line says what the rank was doing, and which rank it waits for. The report is repeated each time that
        the wait has doubled, and whenever the process receives SIGUSR2; with `seconds` 0 only then. Nothing is
        ended by it. Call it from the main thread.
        """
        now.who = f"replica {self.outer.place.replica}, rank {this_rank()}"
        self._until_closed.enter_context(now.doing("training"))
        self._until_closed.enter_context(Watchdog(seconds))


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
    inner: Stateful | Sequence[Stateful] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> Attached:
    """Add rounds between replicas to a loop. Call it last before the loop, after a checkpoint is loaded.

    Args:
        engine: what is trained: DeepSpeed's engine, with any ZeRO stage; a torch module, in
            DistributedDataParallel where the job has several ranks; or Megatron-core's distributed optimizer.
        settings: of the method; the same on all ranks of all replicas, as is seed.
        replicas: number of replicas, where this job holds all of them. Its ranks are divided into blocks of
            consecutive ranks, and gradients must be reduced inside a block: `ReplicaGroups` makes the process
            groups. With 1 there are no rounds.
        federation: where this job is one replica, and the others are other jobs. Nothing else changes in the
            job: its gradients are reduced over all of its ranks, as before, and these are the replica.
        slot: the number of this job's replica in the federation, from 0.
        seed: of the groups, from 0.
        transport: for the exchanges inside one job; by default torch.distributed's messages between two ranks.
        state: of this rank, saved with `Attached.state_dict` together with the present weights. Without it,
            training begins, and the weights of all replicas must be equal bit for bit; in a federation that has
            trained already, the weights and the outer state of the replica that is furthest are taken over.
        inner: the inner optimizer, with DeepSpeed `engine.optimizer`; or several objects with `state_dict` and
            `load_state_dict`, such as optimizer and schedule, the same in all jobs. Their state is given to jobs
            of the federation that begin later, and taken over with the weights; without `inner` the optimizer
            begins anew. So does an optimizer that keeps anything but numbers and tensors of a weight's shape
            (Adafactor, 8-bit moments), and a line says so. The ranks of the jobs may differ for an optimizer of
            torch or DeepSpeed; the state of any other object must be the same on all ranks.
        stopped: in a federation: returns whether this job was asked to stop, for example the `is_set` of a
            `threading.Event` that a handler of SIGTERM sets. Called often, also from other threads. Once it
            returns True, nothing waits for other jobs for more than two seconds: neither `attach` nor `average`,
            and `step` skips the round. To save and to end is left to the loop.

    Raises ValueError for an argument that does not fit; where gradients are not reduced over the ranks of one
    replica; where ranks of this job have different settings, or its replicas different weights; for settings with
    which the replicas drift apart; for a state of other weights; and for an optimizer in `inner` that keeps
    weights of its own, which some show only in `step`, before the first round.

    Jobs of a federation refuse each other where settings, seed, names and shapes of weights, first weights, frozen
    weights, first buffers or the configs of a transformers model differ. A line on the stderr of both says in
    what. In a shared folder such jobs may not see each other; a job that is alone for ten seconds says on stderr
    in what the newest job there differs.
    """
    settings = NolocoSettings() if settings is None else settings
    check_arguments(settings, replicas, federation, slot, seed, transport)
    if replicas is not None and stopped is not None:
        raise ValueError("attach: stopped is for a federation; leave it out with replicas")
    seed, slot = int(seed), int(slot or 0)  # JSON takes no numbers of numpy
    adapter = _adapter_of(engine)
    own_inner = None if inner is None else inner_state(inner)
    if any(_addresses(adapter.weights) & _addresses(other.outer.weights) for other in _ATTACHED):
        raise ValueError("attach: this model is attached already; close() what attach returned before")
    if replicas is not None:
        topology = topology_of(replicas)
    else:
        assert federation is not None
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        topology = Topology(dp=ranks, slot=slot, slots=federation.slots or 0)
    rank = this_rank()
    place = topology.place(rank)
    alike = asdict(settings) | {"seed": seed, "slot": topology.slot, "slots": topology.slots}
    problem = groups_problem(settings, place.replicas)
    starts = of_all_ranks(start_report(adapter, topology, rank, alike, state, problem))
    check_start(starts, rank, topology)
    replica = starts[rank - rank % topology.replica_size :][: topology.replica_size]
    digests = digests_of(replica)
    first = {name: found[rank % len(found)] for name, found in digests.items()}
    if federation is None:
        transport = TorchTransport() if transport is None else transport
        outer = OuterOptimizer(adapter.weights, transport, place, settings, seed)
        return Attached(adapter, outer, first, state, own_inner)

    from megatron_noloco.attach.job_state import JobState
    from megatron_noloco.federation.likeness import Alike
    from megatron_noloco.federation.membership import join_federation

    held = starts[rank].held
    shared = {
        "seed": seed,
        "names and shapes": digests["names and shapes"],
        "first weights": digests["weights"],
        "model": model_of(adapter.modules),
    }
    own = {
        "frozen weights": digests["frozen weights"],
        "buffers": digests["buffers"],
        _SAME_RANKS: None if held is not None else [one.lengths for one in starts],
    }
    stops, compared = stopped or (lambda: False), Alike(shared, "attach", own)
    membership = join_federation(federation, settings, Place(slot, place.replicas), compared, stopped=stops)
    try:
        copies = copies_in([one.held or [] for one in starts], rank)
        apart = membership.replica(adapter.weights, seed, None if held is None else (held, copies))
        outer = OuterOptimizer(adapter.weights, membership.transport, membership.place, settings, seed, apart)
        job_state = JobState(outer, apart.movement, own_inner, adapter)
        membership.keeper = job_state
        membership.say = partial(warnings.warn, stacklevel=5)
        done = 0 if state is None else int(state["local_steps_done"])
        if done:  # others that wait for this job must not find it behind
            membership.announce(done)
        if not membership.wait_for_start(done):
            warnings.warn("started, though fewer jobs than federation.start_with are there", stacklevel=2)
        return Attached(adapter, outer, first, state, own_inner, membership, job_state)
    except BaseException:
        membership.leave()  # or others would wait for this process, whose port would stay taken
        raise


def _adapter_of(engine: Any) -> EngineAdapter:
    """Return the adapter of an engine, a module or an optimizer. Raises ValueError for anything else.

    Imports the code for one kind only: DeepSpeed and Megatron-core need not be installed.
    """
    packages = {cls.__module__.partition(".")[0] for cls in type(engine).__mro__}
    if "deepspeed" in packages and hasattr(engine, "global_steps"):
        from megatron_noloco.attach.deepspeed_engine import deepspeed_adapter

        return deepspeed_adapter(engine)
    if "megatron" in packages and hasattr(engine, "step"):
        from megatron_noloco.attach.megatron_optimizer import megatron_adapter

        return megatron_adapter(engine)
    if isinstance(engine, nn.Module) and not hasattr(engine, "ddp_config"):  # which Megatron-core's DDP has
        return torch_adapter(engine)
    raise ValueError(
        f"attach: a {type(engine).__name__} is none of DeepSpeed's engine, a torch module (in "
        "DistributedDataParallel where the job has several ranks), Megatron-core's distributed optimizer"
    )


def _rows_for(membership: "Membership", done: int) -> "RoundRows | None":
    from megatron_noloco.attach.round_rows import RoundRows

    return None if membership.transport is None else RoundRows(membership.transport, done)


def _refuse_load() -> None:
    raise ValueError(
        "load_state_dict of a model that is attached: the next round would undo it; load first, attach last"
    )


def _addresses(weights: Weights) -> set[int]:
    return {part.data_ptr() for part in weights.parts() if part.numel()}
