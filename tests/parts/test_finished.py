"""A job that comes back when the run has ended says so, unless it is asked to train."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_noloco.checkpoint.catalog import MEAN_OF_REPLICAS
from megatron_noloco.checkpoint.resume import Start
from megatron_noloco.federation.federation_peers import _averaged
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.membership import Membership
from megatron_noloco.federation.statuses import Phase
from megatron_noloco.outer.finite_mean import ExchangeReport
from megatron_noloco.plans.topology import Place, Topology
from megatron_noloco.settings import FederationSettings, NolocoSettings
from megatron_noloco.training.separate_jobs import why_ended
from tests.kit.checkpoints import edit, write_checkpoint
from tests.kit.memory_mesh import World
from tests.kit.worlds import members_of, pause, run_all

STEPS = 8


def why(output_dir: Path, step: int = 4, load: str = "auto", steps: int = STEPS) -> str:
    """What a job of replica 1 says that begins after `step` local steps."""
    settings: Any = SimpleNamespace(folder=output_dir / "replica_01" / "checkpoints", load=load)
    saved: Any = SimpleNamespace(
        folder=settings.folder / f"step_{step}", manifests=[SimpleNamespace(step=step)]
    )
    return why_ended(settings, Start(saved if step else None, []), steps)


def save(output_dir: Path, slot: int, mean_of: int) -> Path:
    """Write what a job saves at its end."""
    topology = Topology(replicas=1, slot=slot, separate_jobs=True)
    folder = write_checkpoint(output_dir / f"replica_{slot:02d}" / "checkpoints", STEPS, topology)
    (manifest,) = folder.rglob("stage_*.json")
    edit(
        manifest,
        lambda text: json.dumps(json.loads(text) | {"counters": {MEAN_OF_REPLICAS: mean_of}}).encode(),
    )
    return folder


def test_the_line_names_the_model_and_how_to_train_on(tmp_path: Path) -> None:
    save(tmp_path, 0, 2)
    folder = save(tmp_path, 2, 3)
    assert why(tmp_path) == (
        f"the run has ended: {folder} is the model of 3 replicas; this replica would train alone from step 4, to "
        f"another model; to do so all the same, set checkpoint.load to {tmp_path}/replica_01/checkpoints/step_4"
    )
    assert why(tmp_path, step=0).endswith(", give another training.output_dir")


def test_the_line_on_the_final_average_says_who_was_there() -> None:
    """A finished job that is started again finds nobody, and keeps the mean of several that it has."""
    assert _averaged(ExchangeReport((0, 3))) == " final average of replicas 0, 3 |"
    without = "without replica 3, which is not there"
    assert _averaged(ExchangeReport((0,), missed=without)) == (
        f" final average skipped: no other replica is there | {without} |"
    )
    assert _averaged(ExchangeReport((0,))) == "", "this job has met no other"


def test_a_job_that_finished_or_is_told_to_train_goes_on(tmp_path: Path) -> None:
    folder = save(tmp_path, 0, 2)
    assert why(tmp_path, step=STEPS) == ""
    assert why(tmp_path, steps=2 * STEPS) == "", "the run goes on"
    assert why(tmp_path, load="none") == why(tmp_path, load=str(tmp_path)) == ""
    assert why(tmp_path)
    save(tmp_path, 0, 1)
    assert why(tmp_path) == "", "that job trained alone"
    shutil.rmtree(folder)
    assert why(tmp_path) == ""


def test_a_checkpoint_that_is_damaged_says_nothing(tmp_path: Path) -> None:
    (manifest,) = save(tmp_path, 0, 2).rglob("stage_*.json")
    for content in (b"", b"[" * 60_000, b"\xff", b"{}"):
        manifest.write_bytes(content)
        assert why(tmp_path) == ""
    manifest.unlink()
    (tmp_path / "replica_02").write_text("")
    assert why(tmp_path) == ""


def test_a_name_of_another_user_is_harmless(tmp_path: Path) -> None:
    save(tmp_path, 0, 2)
    (tmp_path / "replica_00").rename(tmp_path / "replica_\x1b[2J")
    assert why(tmp_path).isprintable()


@pytest.mark.parametrize(
    ("begun", "phase", "is_met"),
    [(3, "ended", True), (3, "training", True), (-1, "training", False), (3, "left", False)],
)
def test_only_a_replica_that_has_trained_is_met(begun: int, phase: Phase, is_met: bool) -> None:
    """Not a job that is back as late: two of them would train to another model."""
    world = World()
    late, other = members_of(world, 1), members_of(world, 0)
    link = Membership(late, Place(1, None), NolocoSettings(), FederationSettings())

    def stay(members: Members) -> None:
        members.go_on(begun, phase)
        pause(members.mesh, 60.0)

    assert run_all(world, [(late, link.finds_trained), (other, lambda: stay(other))])[0] is is_met
