"""A run whose replicas are separate jobs: how its job meets the others, and what it shows of them."""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path

from megatron_noloco.config import RunConfig
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.federation.federation_peers import FederationPeers
from megatron_noloco.federation.invitation import Invitations
from megatron_noloco.federation.keys import fingerprint_of
from megatron_noloco.federation.membership import Membership, join_federation
from megatron_noloco.federation.node_thread import NodeThread
from megatron_noloco.files import outside
from megatron_noloco.job.agreement import computed_by_rank_0
from megatron_noloco.job.stopping import Stopping
from megatron_noloco.monitor.monitor import Monitor
from megatron_noloco.monitor.numbers import Row
from megatron_noloco.monitor.writers import METRICS, OTHERS, without_nan
from megatron_noloco.outer import OuterOptimizer
from megatron_noloco.outer.health import Health
from megatron_noloco.plans.topology import Place
from megatron_noloco.preflight.newcomer import offered
from megatron_noloco.training.prepare import Prepared, first_weights, with_first_weights
from megatron_noloco.training.replica_state import ReplicaState


def meet(prepared: Prepared, config: RunConfig, stopping: Stopping) -> Membership:
    """Connect this job to the others, and let newcomers in. Raises as `join_federation` does."""
    digest = computed_by_rank_0(lambda: first_weights(config, prepared.architecture))
    membership = join_federation(
        config.federation,
        config.noloco,
        Place(prepared.topology.slot, None),
        with_first_weights(prepared.alike, digest),
        config.training.train_iters,
        stopping.is_requested,
    )
    if config.federation.encryption == "tls" and membership.leading is not None:
        _invite(membership.leading.thread, config, prepared.tokenizer)
    return membership


def _invite(thread: NodeThread, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Have the leader make invitations for processes with the key, and let newcomers in."""
    node, fingerprint = thread.node, fingerprint_of(Path(str(config.federation.key_file)))

    def begin() -> None:
        path = config.training.folder_of(node.slot) / "invitations.json"
        offer = partial(offered, config, tokenizer, fingerprint)
        invitations = Invitations(offer, node, path)
        node.invites, node.strangers = invitations.invite, invitations.welcome

    thread.do(begin)


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
    if membership.leading is not None:
        folder = config.training.folder_of(place.replica)
        monitor.metrics.writers.append(OtherJobs(membership.leading.thread, folder))
    return FederationPeers(membership, replica, outer, keeper, health)


class OtherJobs:
    """Tells the other jobs the rows of this one, and writes theirs below the folder of this replica.

    So `watch` and `report` show the federation anywhere. Only numbers of `metrics.jsonl` leave a job. What cannot
    be written is lost, as `ReplicaFiles` says for the same disk.
    """

    def __init__(self, thread: NodeThread, folder: Path) -> None:
        self._thread, self._folder = thread, folder / OTHERS

    def write(self, row: Row) -> None:
        self._thread.tell_row(json.dumps(row))
        self._keep()

    def close(self) -> None:
        self._keep()

    def _keep(self) -> None:
        for slot, text in self._thread.rows():
            with suppress(ValueError, RecursionError, OSError):
                line = json.dumps(without_nan(outside(json.loads(text))))
                folder = self._folder / f"replica_{slot:02d}"
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / METRICS).open("a") as file:
                    file.write(line + "\n")
