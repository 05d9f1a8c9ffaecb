"""A job that comes back when the run has ended says so, unless it is asked to train."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_noloco.checkpoint.resume import Start
from megatron_noloco.federation.members import Members, Phase
from megatron_noloco.federation.membership import Membership
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import FederationSettings, NolocoSettings
from megatron_noloco.training import finished
from megatron_noloco.training.finished import Finished
from tests.unit.memory_mesh import World
from tests.unit.worlds import members_of, pause, run_all

STEPS = 8


def why_ended(output_dir: Path, step: int = 4, load: str = "auto", steps: int = STEPS) -> str:
    """What a job of replica 1 says that begins after `step` local steps."""
    settings: Any = SimpleNamespace(folder=output_dir / "replica_01" / "checkpoints", load=load)
    saved: Any = SimpleNamespace(
        folder=settings.folder / f"step_{step}", manifests=[SimpleNamespace(step=step)]
    )
    return finished.why_ended(settings, Start(saved if step else None, []), steps)


def of_replica(output_dir: Path, slot: int) -> Path:
    folder = output_dir / f"replica_{slot:02d}"
    folder.mkdir(exist_ok=True)
    return folder


def test_the_line_names_the_model_and_how_to_train_on(tmp_path: Path) -> None:
    finished.write(of_replica(tmp_path, 0), STEPS, {2, 0})
    finished.write(of_replica(tmp_path, 2), STEPS, {3, 2, 0})
    assert why_ended(tmp_path) == (
        f"the run has ended: replicas 0, 2, 3 finished with one model ({tmp_path}/replica_02); this replica would "
        "train alone from step 4, to another model; to do so all the same, set checkpoint.load to "
        f"{tmp_path}/replica_01/checkpoints/step_4"
    )
    assert why_ended(tmp_path, step=0).endswith(", give another training.output_dir")


def test_a_job_that_finished_or_is_told_to_train_goes_on(tmp_path: Path) -> None:
    finished.write(of_replica(tmp_path, 0), STEPS, [0, 2])
    assert why_ended(tmp_path, step=STEPS) == ""
    assert why_ended(tmp_path, steps=2 * STEPS) == "", "the run goes on"
    assert why_ended(tmp_path, load="none") == why_ended(tmp_path, load=str(tmp_path)) == ""
    assert why_ended(tmp_path)
    finished.write(of_replica(tmp_path, 1), STEPS, [0, 1])
    assert why_ended(tmp_path) == "", "it has finished before"
    finished.remove(of_replica(tmp_path, 1))
    finished.remove(of_replica(tmp_path, 0))
    finished.remove(of_replica(tmp_path, 0))
    assert why_ended(tmp_path) == ""


MALFORMED = {
    "nothing": "",
    "no object": "[8, [0, 2]]",
    "no replicas": '{"step": 8}',
    "a replica alone": '{"step": 8, "replicas": [0]}',
    "a replica twice": '{"step": 8, "replicas": [2, 2]}',
    "no slot": '{"step": 8, "replicas": [0, 4096]}',
    "no number": '{"step": 8, "replicas": [0, true]}',
    "lists": '{"step": 8, "replicas": [[0], [2]]}',
    "no step": '{"step": 8.0, "replicas": [0, 2]}',
    "a key twice": '{"step": 8, "step": 8, "replicas": [0, 2]}',
    "too long": '{"step": 8, "replicas": [0, 2]' + " " * 2**16 + "}",
    "too deep": "[" * 60_000,
    "a long number": '{"step": ' + "8" * 60_000 + ', "replicas": [0, 2]}',
    "no text": "\udcff",
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_says_nothing(tmp_path: Path, content: str) -> None:
    (of_replica(tmp_path, 0) / "finished.json").write_text(content, errors="surrogateescape")
    assert finished.read(of_replica(tmp_path, 0)) is None
    assert why_ended(tmp_path) == ""


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(of_replica(tmp_path, 0) / "finished.json")
    (of_replica(tmp_path, 2) / "finished.json").mkdir()
    (of_replica(tmp_path, 3) / "finished.json").symlink_to("/dev/zero")
    (tmp_path / "replica_04").write_text("")
    assert why_ended(tmp_path) == ""


def test_a_name_of_another_user_is_harmless(tmp_path: Path) -> None:
    folder = tmp_path / "replica_\x1b[2J"
    folder.mkdir()
    finished.write(folder, STEPS, [0, 2])
    assert finished.read(folder) == Finished(STEPS, [0, 2])
    assert why_ended(tmp_path).isprintable()


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
