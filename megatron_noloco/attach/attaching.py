"""`attach`: from what trains a model to the object that runs its rounds."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron_noloco.attach.attached import Attached, RoundRows, check_not_attached
from megatron_noloco.attach.checks import (
    StartReport,
    check_arguments,
    check_start,
    digests_of,
    start_report,
)
from megatron_noloco.attach.first_state import model_of
from megatron_noloco.attach.inner import Inner, Stateful
from megatron_noloco.attach.job_state import JobState
from megatron_noloco.attach.registered import Functions, check_functions
from megatron_noloco.attach.replica_groups import replica_of, this_rank, topology_of
from megatron_noloco.attach.shards import Engine, copies_in
from megatron_noloco.attach.torch_module import torch_engine
from megatron_noloco.errors import UserError
from megatron_noloco.job.agreement import gather_from_all_ranks, vote
from megatron_noloco.outer import OuterOptimizer
from megatron_noloco.outer.health import Health
from megatron_noloco.outer.peers import JobPeers
from megatron_noloco.plans.topology import Place, Topology
from megatron_noloco.settings import FederationSettings, NolocoSettings
from megatron_noloco.transport.torch_dist import TorchTransport

if TYPE_CHECKING:
    from megatron_noloco.federation.compatibility import RunIdentity

# What jobs compare where a rank exchanges with the rank at its place; the name stands in the line of a refusal.
_SAME_RANKS = "ranks and parallel sizes. This engine needs the same in all jobs"


def attach(
    engine: Any,
    settings: NolocoSettings | None = None,
    *,
    replicas: int | None = None,
    federation: FederationSettings | None = None,
    slot: int | None = None,
    seed: int = 0,
    state: dict[str, Tensor] | None = None,
    inner: Stateful | Sequence[Stateful] | None = None,
    registered: Functions | None = None,
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
        state: of this rank, saved with `Attached.state_dict` together with the present weights. Without it,
            training begins, and the weights of all replicas must be equal bit for bit; in a federation that has
            trained already, the weights and the outer state of the replica that is furthest are taken over.
        inner: the inner optimizer, with DeepSpeed `engine.optimizer`; or several objects with `state_dict` and
            `load_state_dict`, such as optimizer and schedule, the same in all jobs. Their state is given to jobs
            of the federation that begin later, and taken over with the weights; without `inner` the optimizer
            begins anew. So does an optimizer that keeps more than Adam and its relatives, Lion, Muon or SGD with
            momentum (Adafactor, 8-bit moments): a line names what it keeps. The ranks of the jobs may differ for
            an optimizer of torch or DeepSpeed; the state of any other object must be the same on all ranks.
        registered: states of the loop's own that go with the weights, by name: a function that returns the state,
            of numbers, text and tensors, and one that loads it. Rank 0's is given to jobs that begin later, and
            each rank's is in `Attached.state_dict`. A line names those that another job does not have.
        stopped: in a federation: returns whether this job was asked to stop, for example the `is_set` of a
            `threading.Event` that a handler of SIGTERM sets. Called often, also from other threads. Once it
            returns True, nothing waits for other jobs for more than two seconds: neither `attach` nor `average`,
            and `step` skips the round. To save and to end is left to the loop.

    Raises UserError for an argument that does not fit; where gradients are not reduced over the ranks of one
    replica; where ranks of this job have different settings, or its replicas different weights; for settings with
    which the replicas drift apart; for a state of other weights; and for an optimizer that has other weights to
    train than to evaluate (schedule-free).

    Jobs of a federation refuse each other where settings, seed, names and shapes of weights, first weights, frozen
    weights, first buffers or the configs of a transformers model differ. A line on the stderr of both says in
    what. In a shared folder such jobs may not see each other; a job that is alone for ten seconds says on stderr
    in what the newest job there differs.
    """
    settings = NolocoSettings() if settings is None else settings
    check_arguments(settings, replicas, federation, slot, seed, stopped)
    check_functions(registered)
    seed, slot = int(seed), int(slot or 0)  # JSON takes no numbers of numpy
    weights = _engine_of(engine)
    own_inner = None if inner is None else Inner(weights, inner)
    check_not_attached(weights)
    if replicas is not None:
        topology = topology_of(replicas)
    else:
        assert federation is not None
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        topology = Topology(dp=ranks, slot=slot, separate_jobs=True)
    rank = this_rank()
    starts = gather_from_all_ranks(start_report(weights, topology, rank, settings, seed, state))
    check_start(starts, rank, topology)
    digests = digests_of([starts[one] for one in replica_of(topology, rank)])
    first = {name: found[rank % len(found)] for name, found in digests.items()}
    kept = own_inner, registered or {}, first
    if federation is None:
        outer = OuterOptimizer(weights, TorchTransport(), topology.place(rank), settings, seed)
        job_state = JobState(weights, outer, *kept)
        done = 0 if state is None else job_state.restore(state)
        return Attached(weights, done, job_state, JobPeers(outer), None)

    from megatron_noloco.federation.federation_peers import FederationPeers
    from megatron_noloco.federation.membership import join_federation

    held, compared = starts[rank].held, _compared(weights, seed, digests, starts)
    stops = stopped or (lambda: False)
    membership = join_federation(federation, settings, Place(slot, None), compared, stopped=stops)
    try:
        copies = copies_in([one.held or [] for one in starts], rank)
        jobs = membership.replica(weights, seed, None if held is None else (held, copies))
        outer = OuterOptimizer(weights, None, membership.place, settings, seed, jobs)
        job_state = JobState(weights, outer, *kept)
        peers = FederationPeers(membership, jobs, outer, job_state, Health(weights, vote))
        membership.say = partial(warnings.warn, stacklevel=5)
        done = 0 if state is None else job_state.restore(state)
        if done:  # others that wait for this job must not find it behind
            peers.announce(done)
        if not membership.wait_for_start(done):
            warnings.warn("started, though fewer jobs than federation.start_with are there", stacklevel=2)
        done = peers.begin(done, takes_over=state is None).step
        members = membership.members
        rows = None if members is None else RoundRows(members)
        return Attached(weights, done, job_state, peers, rows)
    except BaseException:
        membership.leave()  # or others would wait for this process, whose port would stay taken
        raise


def _compared(
    weights: Engine, seed: int, digests: Mapping[str, list[str]], starts: Sequence[StartReport]
) -> "RunIdentity":
    """Return what jobs of a federation compare."""
    from megatron_noloco.federation.compatibility import RunIdentity

    shared = {
        "seed": seed,
        "names and shapes": digests["names and shapes"],
        "first weights": digests["weights"],
        "model": model_of(weights.modules),
    }
    own = {
        "frozen weights": digests["frozen weights"],
        "buffers": digests["buffers"],
        _SAME_RANKS: None if weights.placed else [one.lengths for one in starts],
    }
    return RunIdentity(shared, "attach", own)


def _engine_of(engine: Any) -> Engine:
    """Return the shards of an engine, a module or an optimizer. Raises UserError for anything else.

    Imports the code for one kind only: DeepSpeed and Megatron-core need not be installed.
    """
    packages = {cls.__module__.partition(".")[0] for cls in type(engine).__mro__}
    if "deepspeed" in packages and hasattr(engine, "global_steps"):
        from megatron_noloco.attach.deepspeed_engine import deepspeed_engine

        return deepspeed_engine(engine)
    if "megatron" in packages and hasattr(engine, "step"):
        from megatron_noloco.attach.megatron_optimizer import MegatronEngine

        return MegatronEngine(engine)
    if isinstance(engine, nn.Module) and not hasattr(engine, "ddp_config"):  # which Megatron-core's DDP has
        return torch_engine(engine)
    raise UserError(
        f"attach: a {type(engine).__name__} is none of DeepSpeed's engine, a torch module (in "
        "DistributedDataParallel where the job has several ranks), Megatron-core's distributed optimizer"
    )
