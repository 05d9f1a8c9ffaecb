"""A run whose replicas are separate jobs: how its job meets the others, and what it shows of them."""

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from megatron_noloco.checkpoint.catalog import is_complete, step_folder
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.resume import Start
from megatron_noloco.checkpoint.run_settings import CheckpointSettings
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.membership import Membership, join_federation
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.statuses import PeerStatus
from megatron_noloco.files import outside
from megatron_noloco.job.agreement import computed_by_rank_0, gather_from_all_ranks
from megatron_noloco.job.stopping import Stopping
from megatron_noloco.monitor.numbers import Row
from megatron_noloco.monitor.writers import OTHERS
from megatron_noloco.plans.topology import Place
from megatron_noloco.training.following import keep_addresses, keep_rows
from megatron_noloco.training.identity import with_first_weights
from megatron_noloco.training.prepare import Prepared


class StoppedAtStartError(Exception):
    """The job ends before its first local step, which is no failure. The message says why."""


def meet(
    prepared: Prepared, settings: CheckpointSettings, start: Start, stopping: Stopping
) -> tuple[Membership, list[str]]:
    """Connect this job to the others, and wait for those with which it starts; also return notes for the user.

    Args:
        start: where this job would start alone.

    Raises StoppedAtStartError, on all ranks, where the job is not to train; else as `join_federation` does.
    """
    config = prepared.config
    membership = join_federation(
        config.federation,
        config.noloco,
        Place(prepared.topology.slot, None),
        with_first_weights(prepared.alike, settings.first_weights),
        config.training.train_iters,
        stopping.is_requested,
    )
    came, steps = True, config.training.train_iters
    why = computed_by_rank_0(partial(why_ended, settings, start, steps))
    if not why or membership.finds_trained():
        came, why = membership.wait_for_start(start.step), ""
        if any(gather_from_all_ranks(stopping.is_requested())):
            why = f"stopped before the first local step ({stopping.request})"
    if why:
        membership.leave()
        stopping.close(start.step)
        raise StoppedAtStartError(why)
    notes = ["started, though fewer replicas than federation.start_with are there"] * (not came)
    return membership, notes


def why_ended(settings: CheckpointSettings, start: Start, steps: int) -> str:
    """Return why a job that meets nobody is not to train; "" where it is.

    Where another job of the run folder has the final model of several replicas, this job would train alone, to
    another model.

    Args:
        steps: local steps of the whole training.
    """
    if start.step >= steps or settings.load != "auto":  # a step folder or "none" asks to train
        return ""
    checkpoints = settings.folder.parent.parent.glob(f"replica_*/{settings.folder.name}")
    last_steps = sorted(step_folder(folder, steps) for folder in checkpoints)
    ended = {folder: Ensemble.read([folder]).mean_of for folder in last_steps if is_complete(folder)}
    folder = max(ended, key=lambda folder: ended[folder], default=settings.folder)
    if ended.get(folder, 0) < 2:
        return ""
    remedy = "give another training.output_dir"
    if start.saved is not None:
        remedy = f"set checkpoint.load to {start.saved.folder}"
    return (
        f"the run has ended: {outside(str(folder))} is the model of {ended[folder]} replicas; this replica would "
        f"train alone from step {start.step}, to another model; to do so all the same, {remedy}"
    )


class OtherJobs:
    """Tells the other jobs the rows of this one, and writes theirs below the folder of this replica.

    So `watch` and `report` show the federation anywhere. Only numbers of `metrics.jsonl` leave a job. What cannot
    be written is lost, as `ReplicaFiles` says for the same disk.

    Args:
        start_step: local steps done before this process; a row of kind "start" says so, unless it is 0.
        key_file: of the federation.
    """

    def __init__(self, members: Members, folder: Path, start_step: int, key_file: Path) -> None:
        self._members, self._folder, self._key_file = members, folder / OTHERS, key_file
        self._known: Mapping[Member, PeerStatus] = {}
        if start_step:
            self._publish({"kind": "start", "step": start_step})

    def write(self, row: Row) -> None:
        self._publish(row)
        self._keep()

    def _publish(self, row: Row) -> None:
        self._members.publish_row({**row, "unix_seconds": time.time()})

    def close(self) -> None:
        self._keep()

    def _keep(self) -> None:
        known = self._members.mesh.known()
        with suppress(OSError):
            keep_rows(self._folder, self._members.rows())
            if known.keys() != self._known.keys():
                keep_addresses(self._folder, self._members.mesh.statuses.run, known, self._key_file)
                self._known = known
