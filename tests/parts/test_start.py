"""Where a run starts, with its checkpoints as files and one rank."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_noloco.checkpoint import catalog, resume
from megatron_noloco.checkpoint.ensemble import find_ensemble
from megatron_noloco.checkpoint.resume import Start, check_found, find_start, settle_start
from megatron_noloco.config import RunConfig
from megatron_noloco.config.blocks import CheckpointConfig
from megatron_noloco.data.opening import Data, open_data
from megatron_noloco.data.sources import Needs, Split, TextSource
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.federation.compatibility import RunIdentity, differences
from megatron_noloco.plans.topology import Topology
from megatron_noloco.training import outputs
from megatron_noloco.training.identity import identity_of
from megatron_noloco.training.prepare import _check_load, check_start
from megatron_noloco.training.start import _first_weights, check_ranks, checkpoint_settings
from tests.kit.checkpoints import CONFIG, edit_configs, edit_manifest, flip_a_bit, write_checkpoint
from tests.kit.configs import config
from tests.kit.ranks import key_file

PARALLEL = {"replicas": 2, "pipeline_model_parallel_size": 2}
TOPOLOGY = Topology(replicas=2, pp=2)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1, barrier=lambda: None)
    monkeypatch.setattr(resume, "dist", one)


def start(output_dir: Path, load: str = "auto") -> Start:
    training = {"train_iters": 20, "output_dir": str(output_dir)}
    blocks = {"training": training, "checkpoint": {"load": load}, "parallel": PARALLEL}
    settings = checkpoint_settings(RunConfig(**CONFIG | blocks), TOPOLOGY)
    found = find_start(settings.folder, settings.load, TOPOLOGY)
    return settle_start(settings, TOPOLOGY, check_found(settings, found))


def folder_of(found: Start) -> Path | None:
    return found.saved and found.saved.folder


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another format": (lambda folder: edit_manifest(folder, {"format": 2}), "written by another version"),
    "no resume files": (
        lambda folder: [path.unlink() for path in folder.rglob("resume_*.safetensors")],
        "resume_stage_00_dp_00_tp_00.safetensors: No such file or directory",
    ),
    "a replica is gone": (lambda folder: shutil.rmtree(folder / "replica_01"), "No such file or directory"),
}


def test_a_run_that_was_killed_in_its_first_save_starts_over(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    shutil.rmtree(write_checkpoint(checkpoints, 5, TOPOLOGY) / "replica_01")
    (checkpoints / "latest").unlink()
    found = start(tmp_path)
    assert (found.saved, catalog.steps(checkpoints)) == (None, [])
    assert [note.partition(":")[0] for note in found.notes] == ["not used", "set aside"]


def test_a_run_says_that_latest_is_wrong(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    folder = write_checkpoint(checkpoints, 5, TOPOLOGY)
    (checkpoints / "latest").write_text("")
    found = start(tmp_path)
    assert folder_of(found) == folder
    assert found.notes[1] == f"{checkpoints}/latest: is empty; the newest complete step is step_00000005"


def save(output_dir: Path, step: int, load: str = "auto") -> Path:
    """Write what a run with this `checkpoint.load` saves."""
    folder = write_checkpoint(output_dir / "checkpoints", step, TOPOLOGY)
    edit_configs(folder, "checkpoint", load=load)
    return folder


@pytest.mark.parametrize("named", [False, True], ids=["auto", "a step of another run"])
@pytest.mark.parametrize("what", REFUSED)
def test_unusable_checkpoints_do_not_restart_the_run(what: str, named: bool, tmp_path: Path) -> None:
    damage, reason = REFUSED[what]
    checkpoints, load = tmp_path / "checkpoints", "auto"
    again = "move that folder away to start anew, in a federation with the state of another job"
    if named:
        load = str(save(tmp_path / "another", 5))
        again = f"delete its step folders to start from {load} again"
    for step in (7, 9):
        damage(save(tmp_path, step, load))
    catalog.step_folder(checkpoints, 15).mkdir()
    with pytest.raises(ValueError) as refusal:
        start(tmp_path, load)
    (line,) = str(refusal.value).splitlines()
    start_of_line = f"{checkpoints}: no checkpoint there can be continued ({checkpoints}/step_00000009"
    assert line.startswith(start_of_line)
    assert reason in line
    assert line.endswith(f"put it right, or {again}")
    assert len(catalog.steps(checkpoints)) == 3, "nothing is set aside"
    if not named:
        assert start(tmp_path, "none").saved is None
        shutil.move(checkpoints, tmp_path / "away")
        assert start(tmp_path, load).saved is None
        return
    shutil.rmtree(load)
    _check_load(load, [tmp_path])
    with pytest.raises(ValueError, match="no checkpoint there can be continued"):
        start(tmp_path, load)


@pytest.mark.parametrize("whose", ["own", "another"])
def test_a_run_starts_once_from_the_step_it_names(whose: str, tmp_path: Path) -> None:
    """Started again before it has saved, it does so again; then it goes on, also where the step is gone."""
    own, another = tmp_path / "own", tmp_path / "another"
    for folder in (own, another):
        for step in (5, 10):
            save(folder, step)
    load = str(catalog.step_folder((own if whose == "own" else another) / "checkpoints", 5))
    for _ in range(2):
        found = start(own, load)
        assert (folder_of(found), found.own) == (Path(load), whose == "own")
        assert [catalog.step_of(path) for path in catalog.steps(own / "checkpoints")] == [5][: whose == "own"]
    saved = [save(own, step, load) for step in (7, 9)]
    shutil.rmtree(load)
    found = start(own, load)
    assert (folder_of(found), found.own) == (saved[1], True)
    assert found.notes[1].endswith("without step_00000009, step_00000007 it would start from there again")
    flip_a_bit(saved[1] / "replica_00" / "stage_00_dp_00_tp_00.safetensors")
    assert folder_of(start(own, load)) == saved[0]


def test_run_killed_in_first_save_starts_from_named_step(tmp_path: Path) -> None:
    load = save(tmp_path / "another", 5)
    shutil.rmtree(save(tmp_path, 7, str(load)) / "replica_01")
    catalog.write_latest(tmp_path / "checkpoints")
    found = start(tmp_path, str(load))
    assert folder_of(found) == load
    notes = [note.partition(":")[0] for note in found.notes]
    assert notes == [f"continuing from {load}", "not used", "set aside"]


@pytest.mark.parametrize("whose", ["own", "another"])
def test_difference_from_named_step_names_its_remedy(whose: str, tmp_path: Path) -> None:
    step = save(tmp_path / whose, 5)
    edit_configs(step, "training", seed=7)
    with pytest.raises(ValueError) as refusal:
        start(tmp_path / "own", str(step))
    remedy = "a resume cannot change it: change it back, or start anew in another training.output_dir"
    if whose == "another":
        remedy = (
            "a run that continues this step cannot change it: take that of the checkpoint, or leave "
            "checkpoint.load out"
        )
    assert str(refusal.value) == f"training.seed: 7 in the checkpoint, 1234 now; {remedy}"


def test_run_can_go_back_twice(tmp_path: Path) -> None:
    first = save(tmp_path, 5)
    save(tmp_path, 7, str(first))
    save(tmp_path, 9)
    assert folder_of(start(tmp_path, str(first))) == first
    assert catalog.steps(tmp_path / "checkpoints") == [first]


def test_the_step_it_has_started_from_may_be_removed(tmp_path: Path) -> None:
    load = str(tmp_path / "gone" / "step_00000005")
    with pytest.raises(ValueError, match=r"^checkpoint\.load: .*/gone/step_00000005: No such file"):
        _check_load(load, [tmp_path])
    save(tmp_path, 7, load)
    _check_load(load, [tmp_path])


def test_folder_that_is_no_step_is_named(tmp_path: Path) -> None:
    step = save(tmp_path, 10)
    (tmp_path / "empty").mkdir()
    auto = 'or give "auto" for the newest in training.output_dir'
    nowhere = Path("OUTPUT_DIR/checkpoints/step_00001000")
    for folder, example in {tmp_path: step, step.parent: step, tmp_path / "empty": nowhere}.items():
        with pytest.raises(ValueError) as refusal:
            _check_load(str(folder), [tmp_path])
        line = f"not a step folder; name one, such as {example}, {auto}"
        assert str(refusal.value) == f"checkpoint.load: {folder}: {line}"


def test_set_aside_folder_is_named(tmp_path: Path) -> None:
    aside = catalog.set_aside(save(tmp_path, 5))
    anew = "and step_00000005 is there anew; move it into another folder as step_00000005, and"
    for line in ("was set aside; rename it to step_00000005, and name that", f"was set aside, {anew}"):
        for check in (lambda: _check_load(str(aside), [tmp_path]), lambda: find_ensemble([aside])):
            with pytest.raises(ValueError, match=f"{aside}: {line}"):
                check()
        save(tmp_path, 5)


@pytest.mark.parametrize(
    ("changed", "other"),
    [
        ("tokenizer", "b"),
        ("data", "b"),
        ("optimizer.params.lr", 2.0),
        ("optimizer.params.betas", [0.9, 0.95]),
        ("optimizer.type", "Adam"),
        ("noloco.routing", "off"),
        ("checkpoint.keep_last", 7),
    ],
)
def test_ranks_that_read_other_files_on_their_hosts_do_not_begin(
    changed: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places may differ, also in lists."""

    def rank(**read: Any) -> Any:
        files = {"tokenizer": "a", "data": "a"} | read
        edits = {name: value for name, value in read.items() if "." in name}
        places = {
            "training.output_dir": f"/{len(told)}",
            "data.data_path": [1, f"/{len(told)}"],
            "data.text": None,
        }
        return SimpleNamespace(
            config=config(**{name.replace(".", "__"): value for name, value in (places | edits).items()}),
            alike=RunIdentity({}, "", {"tokenizer": files["tokenizer"]}),
        ), SimpleNamespace(checksums={"training": files["data"]})

    told: list[dict[str, str]] = []
    monkeypatch.setattr(
        "megatron_noloco.training.start.gather_from_all_ranks", lambda own: told.append(own) or told
    )
    check_ranks(*rank())
    check_ranks(*rank())
    with pytest.raises(ValueError, match=rf"^rank 2 differs from rank 0 in {changed}: all ranks of a job"):
        check_ranks(*rank(**{changed: other}))


def test_a_resume_reads_no_first_weights(tmp_path: Path) -> None:
    """Its checkpoint says which they were, also where the config names none any more."""
    run = config(training__pretrained=str(tmp_path / "gone"), training__output_dir=str(tmp_path))
    prepared: Any = SimpleNamespace(config=run, architecture=run.architecture(257))
    saved: Any = SimpleNamespace(first_weights="as they were")
    assert _first_weights(prepared, saved) == "as they were"
    with pytest.raises(UserError, match="gone"):
        _first_weights(prepared, None)
    with pytest.raises(UserError, match="gone"):
        check_start(run)
    save(tmp_path, 5)
    check_start(run)
    with pytest.raises(UserError, match="gone"):
        check_start(run.replace(checkpoint=CheckpointConfig(load="none")))


def test_a_new_job_checks_its_weights_beside_older_jobs(tmp_path: Path) -> None:
    training = {"training__pretrained": str(tmp_path / "gone"), "training__output_dir": str(tmp_path)}
    alone = {"parallel__replicas": "auto", "noloco__routing": "off"}
    run = config(
        **training, **alone, federation={"rendezvous": "tcp://there:29600", "key_file": key_file(tmp_path)}
    )
    save(tmp_path / "replica_00", 5)
    check_start(run, 0)
    with pytest.raises(UserError, match="gone"):
        check_start(run, 1)
    check_start(run)  # `config --check` does not know which job it is


HOW_A_MACHINE_COMPUTES = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "transformer_impl": "local",
    "make_vocab_size_divisible_by": 5,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"training": {"train_iters": 7}}, "training.train_iters"),
        ({"training": {"train_iters": 5, "seed": 3}}, "seed"),
        ({"data": {"text": "other"}}, ""),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}, ""),
        ({"model": {"hidden_dropout": 0.1}}, "model.hidden_dropout"),
        ({"model": HOW_A_MACHINE_COMPUTES}, ""),
        ({"parallel": {"pipeline_model_parallel_size": 2}}, ""),
    ],
)
def test_jobs_of_a_federation_compare_where_the_training_ends(changes: dict[str, Any], named: str) -> None:
    """Not how they come there: rates, data and layouts may differ, and how a machine computes the model."""

    def alike(changes: dict[str, Any]) -> dict[str, str]:
        changes = changes | {"model": CONFIG["model"] | changes.get("model", {})}
        config = RunConfig(**CONFIG | {"training": {"train_iters": 5}} | changes)
        return identity_of(config, ByteTokenizer(), config.architecture(257)).digests

    assert differences(alike({}), alike(changes)) == named


def test_a_resume_says_that_text_may_have_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between training and validation, once a file is repaired."""
    monkeypatch.setattr(outputs, "describe", lambda _: [])
    (tmp_path / "text").mkdir()
    for number in range(19):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text {number} " * 9)
    source = TextSource(str(tmp_path / "text"), Split.parse("8,2"), str(tmp_path / "cache"))
    data = [open_data(source, ByteTokenizer(), Needs(257, 4))]
    (tmp_path / "text" / "5.txt").write_text("repaired " * 9)
    data.append(open_data(source, ByteTokenizer(), Needs(257, 4)))
    prepared: Any = SimpleNamespace(
        config=None, topology=None, architecture=None, world=SimpleNamespace(launcher="")
    )

    def lines(now: Data) -> list[str]:
        state: Any = SimpleNamespace(
            by_recipe=None,
            data=now,
            link=SimpleNamespace(name=""),
            settings=SimpleNamespace(training_data=now.checksums),
            start=SimpleNamespace(notes=[], counters=data[0].checksums),
        )
        return [line for line in outputs._first_lines(prepared, state) if line.startswith("changed")]

    assert lines(data[0]) == []
    others = replace(data[0], validation=data[0].training)
    assert [line[:30] for line in lines(others)] == ["changed: the validation data h"]
    (line,) = lines(data[1])
    assert line.endswith("or another order; what was read for training may now be read for validation")
