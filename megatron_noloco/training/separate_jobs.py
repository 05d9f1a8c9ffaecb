"""A run whose replicas are separate jobs: how its job meets the others, and what it shows of them."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megatron_noloco.config import RunConfig
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.federation.federation_peers import FederationPeers
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.membership import Membership, join_federation
from megatron_noloco.federation.mesh import Member, Status
from megatron_noloco.job.agreement import computed_by_rank_0
from megatron_noloco.job.stopping import Stopping
from megatron_noloco.monitor.monitor import Monitor
from megatron_noloco.monitor.numbers import Row
from megatron_noloco.monitor.writers import OTHERS
from megatron_noloco.outer import OuterOptimizer
from megatron_noloco.outer.health import Health
from megatron_noloco.plans.topology import Place
from megatron_noloco.preflight.newcomer import TOKENIZER, tokenizer_piece
from megatron_noloco.training.following import keep_addresses, keep_rows
from megatron_noloco.training.prepare import Prepared, first_weights, with_first_weights
from megatron_noloco.training.replica_state import ReplicaState


def meet(prepared: Prepared, config: RunConfig, stopping: Stopping) -> Membership:
    """Connect this job to the others. Raises as `join_federation` does."""
    digest = computed_by_rank_0(lambda: first_weights(config, prepared.architecture))
    membership = join_federation(
        config.federation,
        config.noloco,
        Place(prepared.topology.slot, None),
        with_first_weights(prepared.alike, digest),
        config.training.train_iters,
        stopping.is_requested,
    )
    if membership.members is not None:
        membership.members.mesh.offer(TOKENIZER, tokenizer_piece(prepared.tokenizer))
    return membership


def build_peers(
    config: RunConfig, membership: Membership, engine: ReplicaEngine, health: Health, monitor: Monitor
) -> FederationPeers:
    """Return the other jobs as the loop meets them."""
    weights, seed, place = engine.weights, config.training.seed, membership.place
    replica = membership.replica(weights, seed, engine.held())
    outer = OuterOptimizer(weights, None, place, config.noloco, seed, replica)
    optimizer = config.optimizer.type
    keeper = ReplicaState(engine, outer, optimizer, seed, monitor.say)
    membership.say = monitor.say
    if membership.members is not None:
        folder = config.training.folder_of(place.replica)
        monitor.metrics.writers.append(OtherJobs(membership.members, folder))
    return FederationPeers(membership, replica, outer, keeper, health)


class OtherJobs:
    """Tells the other jobs the rows of this one, and writes theirs below the folder of this replica.

    So `watch` and `report` show the federation anywhere. Only numbers of `metrics.jsonl` leave a job. What cannot
    be written is lost, as `ReplicaFiles` says for the same disk.
    """

    def __init__(self, members: Members, folder: Path) -> None:
        self._members, self._folder = members, folder / OTHERS
        self._known: Mapping[Member, Status] = {}

    def write(self, row: Row) -> None:
        self._members.publish_row(row)
        self._keep()

    def close(self) -> None:
        self._keep()

    def _keep(self) -> None:
        known = self._members.mesh.known()
        with suppress(OSError):
            keep_rows(self._folder, self._members.rows())
            if known.keys() != self._known.keys():
                keep_addresses(self._folder, self._members.run, known)
                self._known = known
