"""Checkpoints as files, without an engine: whole or absent, damage told by name, what may change in between."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.torch import save_file

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import FileRecord, Manifest, verify
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.checkpoint.restore import FOLDED, RankReader, shift_of_mean
from megatron_noloco.checkpoint.resume import changed_replicas, source_replica
from megatron_noloco.cli.main import main
from megatron_noloco.config import RunConfig
from megatron_noloco.engine.layout import FlatPart
from megatron_noloco.files import write_whole
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.samples import BatchPlan, SampleOrder
from megatron_noloco.plans.topology import Position, Topology
from megatron_noloco.training.prepare import checkpoint_settings

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "noloco": {"local_steps": 5},
    "parallel": {"replicas": 3, "pipeline_model_parallel_size": 2},
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 16,
    },
    "data": {"text": "somewhere"},
    "training": {"train_iters": 20},
}
TOPOLOGY = Topology(replicas=3, pp=2)
SIZES = (40, 24)  # parameters of the two stages


def write_checkpoint(checkpoints: Path, step: int, topology: Topology = TOPOLOGY) -> Path:
    """What the ranks of a run leave at `step`, with random numbers for weights, and no inner optimizer."""
    folder = catalog.step_folder(checkpoints, step)
    for rank in range(topology.world_size):
        write_rank(folder, rank, topology)
        catalog.publish(checkpoints, folder, topology.world_size, keep_last=100)
    return folder


def write_rank(step_folder: Path, rank: int, topology: Topology = TOPOLOGY) -> None:
    step = catalog.step_of(step_folder)
    assert step is not None
    position = topology.position(rank)
    folder = catalog.replica_folder(step_folder, position.replica)
    folder.mkdir(parents=True, exist_ok=True)
    size = SIZES[position.stage]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    files = {}
    for name in FOLDED:
        path = catalog.file_of(step_folder, position, name)
        write_whole(path, partial(save_file, {f"{name}.0": torch.randn(size, generator=generator)}))
        files[path.name] = FileRecord.of(path)
    config = RunConfig.from_dict(CONFIG)
    layout = [FlatPart(size, [("decoder.final_layernorm.weight", [size])])]
    Manifest(
        step, 12 * step, topology, position, config.to_dict(), files, config.architecture(257), layout
    ).write(folder)


def flat(folder: Path, replica: int, stage: int, name: str) -> np.ndarray:
    file = catalog.file_of(folder, Position(replica, stage, 0, 0), name)
    return load_file(file)[f"{name}.0"].astype(np.float64)


def inspect(path: Path | list[Path], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], list[str]]:
    code = main(["inspect", *map(str, path if isinstance(path, list) else [path])])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


class TestWholeFiles:
    def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_text("old")

        def half(partial: Path) -> None:
            partial.write_text("ne")
            raise OSError("no space left")

        with pytest.raises(OSError, match="no space"):
            write_whole(path, half)
        assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]

    def test_the_record_describes_what_was_written(self, tmp_path: Path) -> None:
        write_whole(tmp_path / "file", lambda partial: partial.write_bytes(b"abc"))
        record = FileRecord.of(tmp_path / "file")
        verify(tmp_path, {"file": record})
        assert record.bytes == 3

    def test_two_writers_of_one_file_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        path = tmp_path / "latest"

        def first(partial: Path) -> None:
            write_whole(path, lambda other: other.write_text("second"))
            partial.write_text("first")

        write_whole(path, first)
        assert [file.read_text() for file in tmp_path.iterdir()] == ["first"]


STAGE_FILE = "replica_01/stage_01_dp_00_tp_00"


def truncate(folder: Path) -> None:
    path = folder / f"{STAGE_FILE}.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def flip(folder: Path) -> None:
    path = folder / f"{STAGE_FILE}.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x10
    path.write_bytes(content)


def edit_manifest(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / f"{STAGE_FILE}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


Damage = tuple[Callable[[Path], Any], str, str]  # what is done, the file or folder told, and the reason told

DAMAGES: dict[str, Damage] = {
    "truncated file": (truncate, f"{STAGE_FILE}.safetensors", "bytes instead of"),
    "flipped bit": (flip, f"{STAGE_FILE}.safetensors", "checksum does not match its manifest"),
    "missing file": (
        lambda folder: (folder / f"{STAGE_FILE}.safetensors").unlink(),
        f"{STAGE_FILE}.safetensors",
        "No such file",
    ),
    "missing replica folder": (
        lambda folder: shutil.rmtree(folder / "replica_01"),
        "replica_01/stage_00_dp_00_tp_00.json",
        "No such file",
    ),
    "missing manifest": (
        lambda folder: (folder / f"{STAGE_FILE}.json").unlink(),
        f"{STAGE_FILE}.json",
        "No such file",
    ),
    "half-written step": (
        lambda folder: [path.unlink() for path in folder.rglob("*.json")],
        "",
        "no manifest; it was never completed",
    ),
    "manifest cut short": (
        lambda folder: (folder / f"{STAGE_FILE}.json").write_text('{"format": 1, "ste'),
        f"{STAGE_FILE}.json",
        "not a manifest",
    ),
    "manifest that is no text": (
        lambda folder: (folder / f"{STAGE_FILE}.json").write_bytes(b"\xff\x00"),
        f"{STAGE_FILE}.json",
        "not a manifest",
    ),
    "manifest of another step": (lambda folder: edit_manifest(folder, {"step": 9}), "", "belong together"),
    "manifest of a later format": (
        lambda folder: edit_manifest(folder, {"format": 99}),
        f"{STAGE_FILE}.json",
        "another version",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told_in_one_line_that_names_the_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, place, reason = DAMAGES[name]
    folder = write_checkpoint(tmp_path, 10)
    damage(folder)
    code, out, err = inspect(folder, capsys)
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(str(folder / place))
    assert reason in err[0]


class TestInspect:
    def test_a_whole_checkpoint(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = write_checkpoint(tmp_path / "checkpoints", 10)
        code, out, err = inspect(folder, capsys)
        assert (code, err) == (0, [])
        told = dict(line.split(": ", 1) for line in out)
        size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        assert told["step"] == "10 of 20"
        assert told["consumed by all replicas"] == "120 samples, 1920 tokens"
        assert told["parallel"] == "3 replicas x pipeline 2 x data 1 x tensor 1 = 6 ranks"
        assert told["method"] == "noloco"
        parameters = table_of(RunConfig.from_dict(CONFIG).architecture(257)).parameter_count
        assert told["parameters"] == f"{parameters} per replica"
        assert told["size"] == f"{size / 1e6:.1f} MB, {size / (3 * parameters):.1f} bytes per parameter"
        assert told["integrity"] == "12 files, all checksums match"

    def test_a_run_without_rounds_has_no_method(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_checkpoint(tmp_path / "checkpoints", 10)
        for path in folder.rglob("*.json"):
            raw = json.loads(path.read_text())
            raw["config"]["noloco"]["enabled"] = False
            path.write_text(json.dumps(raw))
        assert "method: none" in inspect(folder, capsys)[1]

    def test_spread_is_numpys(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = write_checkpoint(tmp_path, 10)
        told = dict(line.split(": ", 1) for line in inspect(folder, capsys)[1])
        for stage in range(TOPOLOGY.pp):
            weights = np.stack([flat(folder, replica, stage, "slow_weights") for replica in range(3)])
            spread = np.sqrt(weights.var(axis=0, ddof=1).mean())
            assert told[f"stage {stage}"] == f"spread {spread:.3E}"

    def test_a_run_means_its_latest_checkpoint(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_checkpoint(tmp_path / "checkpoints", 10)
        newest = write_checkpoint(tmp_path / "checkpoints", 20)
        assert inspect(tmp_path, capsys)[1][0] == f"checkpoint: {newest}"
        assert inspect(tmp_path / "checkpoints", capsys)[1][0] == f"checkpoint: {newest}"

    @pytest.mark.parametrize(
        ("there", "what"),
        [
            ("", "no checkpoint here"),
            ("config.json", "a Hugging Face model, no checkpoint"),
            ("run.json", "this run has saved no checkpoint yet (checkpoint.save_interval, or Ctrl-C)"),
        ],
    )
    def test_a_place_without_checkpoint(
        self, there: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "a" / there).mkdir(parents=True)
        code, _, err = inspect(tmp_path / "a", capsys)
        asked = "give a step folder or a run's output_dir"
        assert (code, err) == (2, [f"{tmp_path / 'a'}: {what}; {asked}"])
        code, _, err = inspect(tmp_path / "b", capsys)
        assert (code, err) == (2, [f"{tmp_path / 'b'}: there is no such folder; {asked}"])
        code, _, err = inspect(tmp_path / "step_00000010", capsys)
        assert (code, err) == (2, [f"{tmp_path / 'step_00000010'}: no such folder"])


def job(slot: int) -> Topology:
    """One replica of a federation."""
    return Topology(slot=slot, slots=8)


def write_federation(output_dir: Path, steps: dict[int, tuple[int, ...]], pp: int = 2) -> list[Path]:
    """The folders of its replicas, each with checkpoints of these steps."""
    for slot, of_slot in steps.items():
        for step in of_slot:
            checkpoints = output_dir / f"replica_{slot:02d}" / "checkpoints"
            write_checkpoint(checkpoints, step, replace(job(slot), pp=pp))
    return [output_dir / f"replica_{slot:02d}" for slot in steps]


class TestInspectFederation:
    def test_its_folder_means_the_newest_step_that_all_replicas_have(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        replicas = write_federation(tmp_path, {0: (10, 12, 14), 2: (10, 12), 5: (8, 12)})
        code, out, err = inspect(tmp_path, capsys)
        assert (code, err) == (0, [])
        folders = [replica / "checkpoints" / "step_00000012" for replica in replicas]
        assert out[:3] == [f"checkpoint: {folder}" for folder in folders]
        told = dict(line.split(": ", 1) for line in out)
        assert told["step"] == "12 of 20"
        assert told["parallel"] == "3 replicas x pipeline 2 x data 1 x tensor 1 = 6 ranks"
        assert told["integrity"] == "12 files, all checksums match"
        for stage in range(2):
            weights = np.stack(
                [
                    flat(folder, slot, stage, "slow_weights")
                    for slot, folder in zip((0, 2, 5), folders, strict=True)
                ]
            )
            spread = np.sqrt(weights.var(axis=0, ddof=1).mean())
            assert told[f"stage {stage}"] == f"spread {spread:.3E}"

    def test_some_of_its_replicas(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        first, _, third = write_federation(tmp_path, {0: (10, 12), 2: (4,), 5: (10, 12)})
        assert inspect([first, third], capsys)[1][:3] == [
            f"checkpoint: {first / 'checkpoints' / 'step_00000012'}",
            f"checkpoint: {third / 'checkpoints' / 'step_00000012'}",
            "step: 12 of 20",
        ]
        assert inspect([first, third / "checkpoints" / "step_00000010"], capsys)[1][2] == "step: 10 of 20"
        assert inspect(third, capsys)[1][1] == "step: 12 of 20"

    def test_a_step_that_is_not_complete_everywhere_is_not_meant(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, second = write_federation(tmp_path, {0: (10, 12), 1: (10, 12)})
        (second / "checkpoints" / "step_00000012" / "replica_01" / "stage_01_dp_00_tp_00.json").unlink()
        assert inspect(tmp_path, capsys)[1][2] == "step: 10 of 20"

    def test_without_a_common_step_they_must_be_chosen(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, second = write_federation(tmp_path, {0: (10, 12), 1: (4,)})
        code, out, err = inspect(tmp_path, capsys)
        assert (code, out) == (2, [])
        assert err == [
            f"no step that all have: {first / 'checkpoints'} has 10, 12; {second / 'checkpoints'} has 4; "
            "leave some out, or give a step folder of each"
        ]
        chosen = [first / "checkpoints" / "step_00000012", second / "checkpoints" / "step_00000004"]
        code, out, _ = inspect(chosen, capsys)
        assert (code, out[2]) == (0, "step: 12 (replica 0), 4 (replica 1) of 20")

    def test_what_does_not_belong_together_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (first,) = write_federation(tmp_path / "one", {0: (10,)})
        (again,) = write_federation(tmp_path / "two", {0: (10,)})
        (other,) = write_federation(tmp_path / "three", {1: (10,)}, pp=1)
        steps = [folder / "checkpoints" / "step_00000010" for folder in (first, again, other)]
        assert inspect([first, again], capsys)[::2] == (2, [f"replica 0 is in {steps[0]} and in {steps[1]}"])
        assert inspect([first, other], capsys)[::2] == (
            2,
            [f"{steps[0]} and {steps[2]} are of different models or layouts"],
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
        assert catalog.name_latest(tmp_path) == [older]
        assert (tmp_path / "latest").read_text() == "step_00000010\n"
        catalog.set_aside(older)
        assert catalog.name_latest(tmp_path) == []
        assert not (tmp_path / "latest").exists()

    def test_nothing_else_is_taken_for_a_step(self, tmp_path: Path) -> None:
        for name in ("latest", "step_10", "step_00000010.set_aside", "xstep_00000010", ".step_00000010"):
            (tmp_path / name).mkdir()
        assert catalog.steps(tmp_path) == []
        assert catalog.steps(tmp_path / "nowhere") == []


def of(replicas: int) -> Topology:
    return Topology(replicas)


class TestOtherNumberOfReplicas:
    def test_a_job_of_a_federation_continues_its_own_replica_or_another(self) -> None:
        assert source_replica(5, job(5)) == 5
        assert source_replica(5, job(2)) == 2
        assert source_replica(5, of(4)) == 1
        assert changed_replicas(job(5), job(5), fold=False) == []
        assert changed_replicas(of(4), job(1), fold=False) == []
        assert changed_replicas(job(2), job(5), fold=False) == [
            "replica 5 is new: a clone of replica 2, with data of its own from here on"
        ]

    def test_more_replicas_continue_the_old_ones_in_turn(self) -> None:
        assert [source_replica(replica, of(4)) for replica in range(6)] == [0, 1, 2, 3, 0, 1]
        assert changed_replicas(of(4), of(6), fold=False) == [
            "replica 4 is new: a clone of replica 0, with data of its own from here on",
            "replica 5 is new: a clone of replica 1, with data of its own from here on",
        ]

    def test_fewer_replicas(self) -> None:
        assert changed_replicas(of(4), of(2), fold=False) == [
            "replica 2 is dropped",
            "replica 3 is dropped",
        ]
        assert changed_replicas(of(4), of(3), fold=True) == [
            "replica 3 is folded into the mean of those kept"
        ]
        assert changed_replicas(of(4), of(4), fold=True) == []

    @pytest.mark.parametrize("kept", [1, 2])
    def test_folding_keeps_the_mean_over_all(self, kept: int, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, 10)
        for stage in range(TOPOLOGY.pp):
            manifests = catalog.read_manifests(folder)
            at = Position(0, stage, 0, 0)
            layout, table = manifests[stage].layout, table_of(manifests[0].architecture)
            reader = RankReader(CheckpointReader(Ensemble.of(folder, manifests)), table, TOPOLOGY, at, layout)
            for name in FOLDED:
                shift = shift_of_mean(reader, name, TOPOLOGY.replicas, kept)
                saved = np.stack([flat(folder, replica, stage, name) for replica in range(3)])
                folded = saved[:kept] + shift.numpy()
                np.testing.assert_allclose(folded.mean(axis=0), saved.mean(axis=0), atol=1e-6)
                np.testing.assert_allclose(folded - folded[0], saved[:kept] - saved[0], atol=1e-6)


few = settings(max_examples=60)
small = st.integers(1, 4)


@few
@given(
    before=st.tuples(small, small, small, small),
    after=st.tuples(small, small, small, small),
    step=st.integers(0, 6),
)
def test_samples_continue_where_they_stopped(
    before: tuple[int, int, int, int], after: tuple[int, int, int, int], step: int
) -> None:
    """With other replicas (or batches) after a resume, no sample is repeated or left out within an epoch."""
    first = BatchPlan(*before)
    then = BatchPlan(*after, start_step=step, start_sample=first.consumed(step))
    places = [
        plan.first(at, replica, dp, microbatch) + sample
        for plan, span in ((first, range(step)), (then, range(step, step + 3)))
        for at in span
        for replica in range(plan.replicas)
        for dp in range(plan.dp)
        for microbatch in range(plan.microbatches)
        for sample in range(plan.micro_batch_size)
    ]
    assert places == list(range(then.consumed(step + 3)))
    order = SampleOrder(max(1, len(places)), seed=0)
    assert len(set(order.ids(0, len(places)).tolist())) == len(places)


class TestChangesOfTheConfig:
    @staticmethod
    def changes(edits: dict[str, dict[str, Any]]) -> list[str]:
        saved = RunConfig.from_dict(CONFIG).to_dict()
        now = {block: {**CONFIG.get(block, {}), **values} for block, values in edits.items()}
        run = RunConfig.from_dict({**CONFIG, **now})
        return checkpoint_settings(run, Topology()).changes(saved)

    def test_nothing_changed(self) -> None:
        assert self.changes({}) == []

    def test_a_new_model_is_refused_with_both_values(self) -> None:
        with pytest.raises(ValueError) as refusal:
            self.changes({"model": {"hidden_size": 64, "num_layers": 4}})
        first, second = str(refusal.value).splitlines()
        assert first.startswith("model.hidden_size: 32 in the checkpoint, 64 now; a resume cannot change it")
        assert second.startswith("model.num_layers: 2 in the checkpoint, 4 now; a resume cannot change it")

    @pytest.mark.parametrize(
        ("block", "name", "value"),
        [
            ("training", "seed", 1),
            ("data", "text", "elsewhere"),
            ("bf16", "enabled", True),
        ],
    )
    def test_what_would_load_other_weights_or_mix_up_the_data_is_refused(
        self, block: str, name: str, value: Any
    ) -> None:
        with pytest.raises(
            ValueError, match=f"{block}\\.{name}: .* in the checkpoint, {json.dumps(value)} now"
        ):
            self.changes({block: {name: value}})

    def test_where_the_weights_lie_may_change_and_is_told(self) -> None:
        edits = {
            "parallel": {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2},
            "model": {"make_vocab_size_divisible_by": 64},
        }
        assert self.changes(edits) == [
            "model.make_vocab_size_divisible_by: 128 in the checkpoint, 64 now",
            "parallel.pipeline_model_parallel_size: 2 in the checkpoint, 1 now",
            "parallel.tensor_model_parallel_size: 1 in the checkpoint, 2 now",
        ]

    def test_what_is_recomputed_may_change_and_is_told(self) -> None:
        found = self.changes({"model": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}})
        assert found == [
            'model.recompute_granularity: null in the checkpoint, "selective" now',
            'model.recompute_modules: null in the checkpoint, ["mlp"] now',
        ]

    def test_how_it_is_trained_may_change_and_is_told(self) -> None:
        edits = {
            "optimizer": {"params": {"lr": 0.002, "weight_decay": 0.1}},
            "noloco": {"local_steps": 7, "outer_lr": 0.5},
        }
        assert self.changes(edits) == [
            "noloco.local_steps: 5 in the checkpoint, 7 now",
            "noloco.outer_lr: 0.7 in the checkpoint, 0.5 now",
            "optimizer.params.lr: 0.01 in the checkpoint, 0.002 now",
        ]

    def test_a_block_switched_off_is_as_good_as_absent(self) -> None:
        assert self.changes({"bf16": {"enabled": False}, "fp16": {"enabled": False}}) == []

    def test_fields_that_are_newer_than_the_checkpoint_had_their_defaults(self) -> None:
        run = RunConfig.from_dict(CONFIG)
        now, saved = checkpoint_settings(run, Topology()), run.to_dict()
        del saved["model"]["z_loss_coeff"], saved["data"]["eod_mask_loss"]
        assert now.changes(saved) == []
        saved["model"]["gone"] = 1
        with pytest.raises(ValueError, match=r"model\.gone: 1 in the checkpoint, null now"):
            now.changes(saved)

    def test_where_and_how_long_it_runs_is_not_worth_a_line(self) -> None:
        assert (
            self.changes(
                {
                    "training": {"train_iters": 40},
                    "checkpoint": {"save_interval": 3},
                    "evaluation": {"full": True},
                    "tensorboard": {"enabled": False},
                    "parallel": {"replicas": 6, "pipeline_model_parallel_size": 2},
                }
            )
            == []
        )


@pytest.fixture(autouse=True)
def _nothing_half_written(tmp_path: Path) -> Any:
    yield
    assert not list(tmp_path.rglob("*.partial"))
