"""Checkpoints as files, without an engine: whole or absent, damage named, what may change in between."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.checkpointer import Checkpointer
from megatron_noloco.checkpoint.ensemble import find_ensemble
from megatron_noloco.checkpoint.resume import describe_replicas, source_replica
from megatron_noloco.config import RunConfig, saved_config
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import write_tensors, write_whole
from megatron_noloco.huggingface.evaluate import open_weights
from megatron_noloco.model.families import FAMILIES, table_of
from megatron_noloco.plans.topology import Topology
from megatron_noloco.training.start import checkpoint_settings
from tests.kit.checkpoints import (
    CONFIG,
    DAMAGES,
    MANIFEST,
    TOPOLOGY,
    changes,
    edit,
    edit_configs,
    write_checkpoint,
    write_rank,
)
from tests.kit.golden import check
from tests.kit.ranks import call_here


def inspect(*paths: Path) -> tuple[int, list[str], list[str]]:
    """Return the exit code of `inspect`, and its lines on stdout and stderr."""
    code, out, err = call_here("inspect", *paths)
    return code, out.splitlines(), err.splitlines()


def facts(lines: list[str]) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("rank", [2, 5])
def test_equal_weights_are_evaluated_once(rank: int, tmp_path: Path) -> None:
    folder, text = write_checkpoint(tmp_path / "checkpoints", 4), tmp_path / "text.txt"
    text.write_text("a text of more than a sample " * 9)
    for path in folder.glob("replica_0[12]/*"):
        first = folder / "replica_00" / path.name
        if path.suffix == ".json":
            files = {"files": json.loads(first.read_text())["files"]}
            path.write_text(json.dumps(json.loads(path.read_text()) | files))
        else:
            shutil.copy(first, path)
    assert list(open_weights([folder], str(text), None)[3]) == ["each of 3 replicas (equal weights)"]
    assert inspect(folder)[1][5].endswith("per replica, the same in all, bit for bit")
    write_rank(folder, rank)
    assert inspect(folder)[1][5].endswith("per replica")
    sets = ["replica 0", "replica 1", "replica 2", "mean model"]
    assert list(open_weights([folder], str(text), None)[3]) == sets


def test_tokens_of_a_mean_are_those_of_all_or_not_known(tmp_path: Path) -> None:
    """The replicas of a federation end with one model, and their folders may be on other machines."""
    jobs = [
        write_checkpoint(tmp_path / f"replica_0{slot}" / "checkpoints", 10, job(slot)) for slot in range(3)
    ]
    for path in tmp_path.rglob("stage_*.json"):
        counters = {"mean_of_replicas": 3, "tokens_per_sample": 10 + 3 * ("replica_01" in str(path))}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"counters": counters}))
    (line,) = (line for line in inspect(jobs[0])[1] if line.startswith("consumed"))
    assert line == "consumed by all replicas: 360 samples, 3960 tokens"
    assert inspect(*jobs)[1].count(line) == 1
    shutil.rmtree(tmp_path / "replica_02")
    counted = [facts(inspect(*found)[1]) for found in (jobs[1:2], jobs[:2])]
    unknown = "not known here: those of {} whose mean the weights are"
    assert counted[0]["consumed by this replica"] == "120 samples, 1560 tokens; " + unknown.format(
        "2 other replicas"
    )
    assert counted[1]["consumed by these 2 replicas"] == "240 samples, 2760 tokens; " + unknown.format(
        "1 other replica"
    )


# Whole files


def test_failed_writer_leaves_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half(partial: Path) -> None:
        partial.write_text("ne")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_whole(path, half)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "latest"

    def first(partial: Path) -> None:
        write_whole(path, lambda other: other.write_text("second"))
        partial.write_text("first")

    write_whole(path, first)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["first"]


# Damage


def test_damage_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    """In tests/golden/damage_lines.txt."""

    def cases() -> Iterator[tuple[str, str]]:
        for name, damage in DAMAGES.items():
            folder = write_checkpoint(tmp_path / name, 10)
            damage(folder)
            code, out, (line,) = inspect(folder)
            assert (code, out) == (2, [])
            yield (
                name,
                re.sub(
                    r"\d+ bytes instead of \d+", "N bytes instead of M", line.replace(str(folder), "STEP")
                ),
            )

    check("damage_lines", cases())


# Inspecting


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    """A run's folder means its latest checkpoint."""
    write_checkpoint(tmp_path / "checkpoints", 5)
    folder = write_checkpoint(tmp_path / "checkpoints", 10)
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    parameters = table_of(RunConfig(**CONFIG).architecture(257)).parameter_count
    for path in (folder, tmp_path, tmp_path / "checkpoints"):
        code, out, err = inspect(path)
        assert (code, err) == (0, [])
        assert facts(out) == {
            "checkpoint": str(folder),
            "step": "10 of 20",
            "consumed by all replicas": "120 samples, 1920 tokens",
            "parallel": "3 replicas x pipeline 2 x data 1 x tensor 1 = 6 ranks",
            "method": "noloco",
            "parameters": f"{parameters} per replica",
            "size": f"{size / 1e6:.1f} MB, {size / (3 * parameters):.1f} bytes per parameter",
            "integrity": "12 files, all checksums match",
        }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is missing"),
        ("", "is empty"),
        ("step_00000077\n", 'names "step_00000077", which is not there'),
        ("step_00000015\n", 'names "step_00000015", which is not complete'),
        ("\x1b[2J\n", 'names "\\x1b[2J", which is not there'),
        ("step_00000005", 'names "step_00000005"'),
    ],
)
def test_the_newest_complete_step_is_found_without_latest(
    content: str | None, says: str, tmp_path: Path
) -> None:
    """Also after a crash between the last manifest and the file `latest`; a save under way is passed over."""
    checkpoints = tmp_path / "checkpoints"
    steps = [write_checkpoint(checkpoints, step) for step in (5, 10, 15)]
    (steps[-1] / "replica_02" / "stage_01_dp_00_tp_00.json").unlink()
    latest = checkpoints / "latest"
    latest.unlink() if content is None else latest.write_text(content)
    note = f"{latest}: {says}; the newest complete step is step_00000010"
    for path in (tmp_path, checkpoints):
        code, out, err = inspect(path)
        assert (code, err, facts(out)["checkpoint"]) == (0, [note], str(steps[1]))
    assert catalog.latest(checkpoints) == ("step_00000010", note)


def test_a_named_step_that_no_other_can_replace_is_named(tmp_path: Path) -> None:
    """Its manifests may be missing, or its whole folder; or it is damaged, which is no reason to take another."""
    checkpoints = tmp_path / "checkpoints"
    write_checkpoint(checkpoints, 5)
    newest = write_checkpoint(checkpoints, 10)
    edit(newest / MANIFEST, lambda content: content[:20])
    assert inspect(tmp_path)[::2] == (2, [f"{newest / MANIFEST}: not a manifest"])
    shutil.rmtree(checkpoints / "step_00000005")
    (newest / MANIFEST).unlink()
    assert inspect(tmp_path)[::2] == (2, [f"{newest / MANIFEST}: No such file or directory"])
    shutil.rmtree(newest)
    (tmp_path / "run.json").touch()
    code, _, (line,) = inspect(tmp_path)
    assert code == 2
    assert line.startswith(f'{tmp_path}: checkpoints/latest: names "step_00000010", which is not there; give')


def test_each_replica_of_a_federation_is_found_without_latest(tmp_path: Path) -> None:
    folders = write_federation(tmp_path, {0: (5, 10), 1: (5, 10)})
    (folders[0] / "latest").unlink()
    assert inspect(tmp_path)[0] == 0
    assert facts(inspect(tmp_path)[1])["step"] == "10 of 20"


@pytest.mark.parametrize("name", [".tmpAb12Cd", ".resume_stage_00_dp_00_tp_00.safetensors.0f.partial"])
def test_leftovers_of_killed_save_go_with_its_step(name: str, tmp_path: Path) -> None:
    """safetensors writes to a file of its own, such as .tmpAb12Cd, before it puts it in place."""
    folder = write_checkpoint(tmp_path, 5)
    expected = inspect(folder)
    (folder / "replica_00" / name).write_bytes(b"half")
    assert inspect(folder) == inspect(tmp_path) == expected
    newest = write_checkpoint(tmp_path, 10)
    catalog.publish(tmp_path, newest, TOPOLOGY.world_size, keep_last=1)
    assert catalog.steps(tmp_path) == [newest]
    assert not folder.exists()


def test_a_run_without_rounds_has_no_method(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints", 10)
    edit_configs(folder, "noloco", enabled=False)
    assert "method: none" in inspect(folder)[1]


def test_a_place_without_checkpoint(tmp_path: Path) -> None:
    for name, file in (("a", ""), ("b", "config.json"), ("c", "run.json")):
        (tmp_path / name / file).mkdir(parents=True)
    remedy = "; give a step folder or a run's output_dir"
    for name, line in {
        "a": "no checkpoint here" + remedy,
        "b": "a Hugging Face model, no checkpoint" + remedy,
        "c": "this run has saved no checkpoint yet (checkpoint.save_interval, or Ctrl-C)" + remedy,
        "d": "there is no such folder" + remedy,
        "step_00000010": "No such file or directory",
    }.items():
        assert inspect(tmp_path / name)[::2] == (2, [f"{tmp_path / name}: {line}"])


def job(slot: int) -> Topology:
    """One replica of a federation."""
    return Topology(slot=slot, separate_jobs=True)


def write_federation(output_dir: Path, steps: dict[int, tuple[int, ...]], pp: int = 2) -> list[Path]:
    """Write checkpoints of these steps for each replica of a federation; returns their folders."""
    for slot, of_slot in steps.items():
        for step in of_slot:
            checkpoints = output_dir / f"replica_{slot:02d}" / "checkpoints"
            write_checkpoint(checkpoints, step, replace(job(slot), pp=pp))
    return [output_dir / f"replica_{slot:02d}" / "checkpoints" for slot in steps]


class TestInspectFederation:
    def test_its_folder_means_the_newest_step_that_all_replicas_have(self, tmp_path: Path) -> None:
        replicas = write_federation(tmp_path, {0: (10, 12, 14), 2: (10, 12), 5: (8, 12)})
        code, out, err = inspect(tmp_path)
        assert (code, err) == (0, [])
        folders = [replica / "step_00000012" for replica in replicas]
        assert out[:4] == [*(f"checkpoint: {folder}" for folder in folders), "step: 12 of 20"]
        found = facts(out)
        assert found["parallel"] == "3 replicas x pipeline 2 x data 1 x tensor 1 = 6 ranks"
        assert found["integrity"] == "12 files, all checksums match"

    def test_some_of_its_replicas(self, tmp_path: Path) -> None:
        first, _, third = write_federation(tmp_path, {0: (10, 12), 2: (4,), 5: (10, 12)})
        assert inspect(first.parent, third)[1][:3] == [
            f"checkpoint: {first / 'step_00000012'}",
            f"checkpoint: {third / 'step_00000012'}",
            "step: 12 of 20",
        ]
        assert inspect(first, third / "step_00000010")[1][2] == "step: 10 of 20"
        assert inspect(third)[1][1] == "step: 12 of 20"

    def test_a_step_that_is_not_complete_everywhere_is_not_meant(self, tmp_path: Path) -> None:
        _, second = write_federation(tmp_path, {0: (10, 12), 1: (10, 12)})
        (second / "step_00000012" / "replica_01" / "stage_01_dp_00_tp_00.json").unlink()
        assert inspect(tmp_path)[1][2] == "step: 10 of 20"

    def test_without_a_common_step_they_must_be_chosen(self, tmp_path: Path) -> None:
        first, second = write_federation(tmp_path, {0: (10, 12), 1: (4,)})
        line = (
            f"no step that all have: {first} has 10, 12; {second} has 4; "
            "leave some out, or give a step folder of each"
        )
        assert inspect(tmp_path) == (2, [], [line])
        chosen = [first / "step_00000012", second / "step_00000004"]
        code, out, _ = inspect(*chosen)
        assert (code, out[2]) == (0, "step: 12 (replica 0), 4 (replica 1) of 20")
        assert str(find_ensemble(chosen)) == "replica 0 at step 12, replica 1 at step 4"

    def test_what_does_not_belong_together_is_refused(self, tmp_path: Path) -> None:
        one, two, three = (
            write_federation(tmp_path / name, {slot: (10,)}, 2)[0] / "step_00000010"
            for name, slot in (("one", 0), ("two", 0), ("three", 1))
        )
        for path in three.glob("*/*.json"):
            path.write_text(re.sub(r'("ffn_hidden_size": )(\d+)', r"\g<1>9\2", path.read_text()))
        for other, line in (
            (two, f"replica 0 is in {one} and in {two}"),
            (three, f"{one} and {three} are of different models"),
        ):
            assert inspect(one, other)[::2] == (2, [line])

    def test_jobs_of_different_layouts_are_read_together(self, tmp_path: Path) -> None:
        for slot, stages in enumerate((2, 1)):
            write_federation(tmp_path, {slot: (10,)}, stages)
        code, out, _ = inspect(tmp_path)
        assert code == 0
        assert (
            "parallel: replica 0: pipeline 2 x data 1 x tensor 1, replica 1: pipeline 1 x data 1 x tensor 1"
            in out
        )


class TestCatalog:
    def test_a_step_is_complete_with_its_last_manifest(self, tmp_path: Path) -> None:
        folder = catalog.step_folder(tmp_path, 10)
        for rank in range(TOPOLOGY.world_size):
            assert not catalog.is_complete(folder)
            assert not (tmp_path / "latest").exists()
            write_rank(folder, rank)
            catalog.publish(tmp_path, folder, TOPOLOGY.world_size, keep_last=1)
        assert catalog.is_complete(folder)
        assert checkpointer(tmp_path).newest_step() == 10
        assert (tmp_path / "latest").read_text() == "step_00000010\n"

    def test_keep_last_counts_complete_steps(self, tmp_path: Path) -> None:
        for step in (10, 20, 30):
            write_checkpoint(tmp_path, step)
        half = catalog.step_folder(tmp_path, 35)
        write_rank(half, rank=0)
        newest = write_checkpoint(tmp_path, 40)
        catalog.publish(tmp_path, newest, TOPOLOGY.world_size, keep_last=2)
        assert [catalog.step_of(folder) for folder in catalog.steps(tmp_path)] == [40, 35, 30]

    def test_a_step_completed_late_does_not_become_the_latest(self, tmp_path: Path) -> None:
        """Replicas are not in step: with asynchronous saves the one before may be completed second."""
        late = catalog.step_folder(tmp_path, 10)
        for rank in range(TOPOLOGY.world_size - 1):
            write_rank(late, rank)
        write_checkpoint(tmp_path, 20)
        write_rank(late, TOPOLOGY.world_size - 1)
        catalog.publish(tmp_path, late, TOPOLOGY.world_size, keep_last=2)
        assert (tmp_path / "latest").read_text() == "step_00000020\n"
        assert catalog.is_complete(late)

    def test_setting_aside_never_overwrites(self, tmp_path: Path) -> None:
        names = [catalog.set_aside(write_checkpoint(tmp_path, 10)).name for _ in range(3)]
        assert names == [f"step_00000010.set_aside{number}" for number in ("", "_1", "_2")]
        assert catalog.steps(tmp_path) == []

    def test_latest_never_names_what_was_set_aside(self, tmp_path: Path) -> None:
        older, newer = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
        catalog.set_aside(newer)
        assert catalog.write_latest(tmp_path) == [older]
        assert (tmp_path / "latest").read_text() == "step_00000010\n"
        catalog.set_aside(older)
        assert catalog.write_latest(tmp_path) == []
        assert not (tmp_path / "latest").exists()

    def test_nothing_else_is_taken_for_a_step(self, tmp_path: Path) -> None:
        for name in ("latest", "step_10", "step_00000010.set_aside", "xstep_00000010", ".step_00000010"):
            (tmp_path / name).mkdir()
        assert catalog.steps(tmp_path) == []
        assert catalog.steps(tmp_path / "nowhere") == []


class TestOtherNumberOfReplicas:
    def test_every_replica_continues_a_saved_one(self) -> None:
        """Its own; or if it is new, the saved ones in turn."""
        assert [source_replica(replica, Topology(4)) for replica in range(6)] == [0, 1, 2, 3, 0, 1]
        assert [source_replica(5, saved) for saved in (job(5), job(2), Topology(4))] == [5, 2, 1]

    @pytest.mark.parametrize(
        ("saved", "now", "lines"),
        [
            (Topology(4), Topology(4), []),
            (
                Topology(4),
                Topology(6),
                ["replica 4 begins as a clone of replica 0, ", "replica 5 begins as "],
            ),
            (Topology(4), Topology(2), ["replica 2 is dropped", "replica 3 is dropped"]),
            (job(5), job(5), []),
            (Topology(4), job(1), []),
            (job(2), job(5), ["replica 5 begins as a clone of replica 2, "]),
        ],
    )
    def test_what_changes_is_reported(self, saved: Topology, now: Topology, lines: list[str]) -> None:
        for line, start in zip(describe_replicas(saved, now), lines, strict=True):
            assert line.startswith(start)


@pytest.mark.parametrize(
    ("edits", "counters", "moved"),
    [
        ({"text": "elsewhere"}, {"training_data_2": 8.0, "training_data": 0.0}, True),
        ({"text": "elsewhere"}, {"training_data_2": 0.0, "training_data": 7.0}, False),
        ({"text": "elsewhere"}, {"training_data": 7.0}, True),
        ({"text": "elsewhere"}, {"training_data": 8.0}, False),
        ({"text": "elsewhere"}, {}, False),
        ({"text": None, "data_path": "a"}, {"training_data": 7.0}, False),
        ({"text": "elsewhere", "split": "1,1"}, {"training_data": 7.0}, False),
    ],
)
def test_data_elsewhere_are_accepted_if_they_are_the_same(
    edits: dict[str, Any], counters: dict[str, float], moved: bool
) -> None:
    run = RunConfig(**{**CONFIG, "data": {**CONFIG["data"], **edits}})
    settings = checkpoint_settings(run, Topology(), {"training_data_2": 8, "training_data": 7})
    saved = RunConfig(**CONFIG).to_dict()
    if moved:
        line = 'data.text: "somewhere" in the checkpoint, "elsewhere" now'
        assert settings.changes(saved, counters) == [line]
    else:
        with pytest.raises(ValueError, match="a resume cannot change it"):
            settings.changes(saved, counters)


# Edits of a config whose run is resumed
EDITS: list[dict[str, Any]] = [
    {},
    # weights and data
    {"model": {"hidden_size": 64, "num_layers": 4}},
    {"training": {"seed": 1}},
    {"data": {"text": "elsewhere"}},
    {"bf16": {"enabled": True}},
    # where weights lie
    {
        "parallel": {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2},
        "model": {"make_vocab_size_divisible_by": 64},
    },
    # what is recomputed, and how it is trained
    {"model": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}},
    {
        "optimizer": {"params": {"lr": 0.002, "weight_decay": 0.1}},
        "noloco": {"local_steps": 7, "outer_lr": 0.5},
    },
    # a block that is switched off is as good as absent; where and how long it runs
    {"bf16": {"enabled": False}, "fp16": {"enabled": False}},
    {
        "training": {"train_iters": 40},
        "checkpoint": {"save_interval": 3},
        "evaluation": {"full": True},
        "tensorboard": {"enabled": False},
        "parallel": {"replicas": 6, "pipeline_model_parallel_size": 2},
    },
]


def test_what_a_resume_refuses_and_reports_of_changes() -> None:
    """In tests/golden/change_lines.txt."""

    def said_of(edits: dict[str, Any]) -> str:
        try:
            return "\n".join(["accepted", *changes(edits)])
        except UserError as error:
            return str(error)

    check("change_lines", ((edits, said_of(edits)) for edits in EDITS))


@pytest.mark.parametrize("family", FAMILIES)
def test_null_and_what_it_stands_for_are_the_same(family: str) -> None:
    """Of sizes, the vocabulary, and what only this family has."""
    as_written = RunConfig(**{**CONFIG, "model": {**CONFIG["model"], "family": family}})
    tokenizer = ByteTokenizer()
    model = as_written.model.meant(tokenizer.vocab_size)
    spelt_out = RunConfig(**{**CONFIG, "model": model})
    assert spelt_out.model != as_written.model
    for now, saved in ((as_written, spelt_out), (spelt_out, as_written)):
        settings = checkpoint_settings(now, Topology(), tokenizer=tokenizer)
        assert settings.changes(saved.to_dict()) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_null_and_its_type_of_gradients_are_the_same(precision: str) -> None:
    block: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    kind = "fp16" if precision == "fp16" else "fp32"
    spelt_out = {"data_types": {"grad_accum_dtype": kind}, "communication_data_type": kind}
    for now, saved in ((block, block | spelt_out), (block | spelt_out, block)):
        settings = checkpoint_settings(RunConfig(**CONFIG | now), Topology())
        assert settings.changes(RunConfig(**CONFIG | saved).to_dict()) == []


def test_fields_of_other_versions_make_no_difference() -> None:
    """New fields have their defaults, fields that are gone are left out, and a new rule counts for new runs."""
    run = RunConfig(**CONFIG)
    now, saved = checkpoint_settings(run, Topology()), run.to_dict()
    del saved["model"]["z_loss_coeff"], saved["data"]["eod_mask_loss"], saved["wandb"]
    saved["model"]["gone"] = saved["data"]["gone"] = saved["optimizer"]["params"]["gone"] = 1
    saved["gone"] = {"enabled": True}
    assert now.changes(saved) == []
    assert saved_config(saved) == RunConfig(**run.to_dict())
    saved["checkpoint"]["keep_last"], saved["evaluation"] = 3, {"iters": 0, "full": True}
    with pytest.raises(ValueError, match="full true has no effect"):
        RunConfig(**run.to_dict() | {"evaluation": saved["evaluation"]})
    assert now.changes(saved) == []


def test_a_value_of_another_version_is_named() -> None:
    saved = RunConfig(**CONFIG).to_dict()
    saved["noloco"]["payload"] = "int16"
    line = "the checkpoint's config, of another version: noloco.payload: must be one of .* got 'int16'"
    with pytest.raises(UserError, match=line):
        checkpoint_settings(RunConfig(**CONFIG), Topology()).changes(saved)


@pytest.fixture(autouse=True)
def _nothing_half_written(tmp_path: Path) -> Any:
    yield
    assert not list(tmp_path.rglob("*.partial"))


# After which failure of a save the training goes on


def checkpointer(folder: Path) -> Checkpointer:
    return Checkpointer(Mock(folder=folder), Mock(), Mock(), Mock(start_step=0))


def waited(error: BaseException) -> str | None:
    failed = checkpointer(Path("run", "checkpoints"))
    failed._writing = Future()
    failed._writing.set_exception(error)
    found = failed.close()
    assert failed.last_save_failed
    return found


def test_the_training_goes_on_after_a_failure_of_the_disk() -> None:
    assert waited(OSError(28, "No space left\non device")) == "[Errno 28] No space left on device"


def test_files_of_tensors_have_the_mode_of_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", partial(write_tensors, tensors={"a": torch.zeros(9)}))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert torch.equal(load_file(tmp_path / "file")["a"], torch.zeros(9))


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error"), SafetensorError("invalid shape"), MemoryError()]
)
def test_any_other_failure_of_a_save_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        waited(error)
