"""A run goes on with other stages, tensor-parallel and data-parallel sizes, as if nothing had been changed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.ensemble import Ensemble, inspect
from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.model.dropout import random_state
from megatron_noloco.plans.topology import Position
from tests.kit.checkpoints import flip_a_bit
from tests.kit.disturbed import Run
from tests.kit.ranks import run_ranks, slow
from tests.kit.saved_runs import (
    EXPERTS,
    LATE,
    SAVED,
    STEPS,
    Changes,
    launch,
    layout,
    padded,
    ranks,
    saved_run,
    starts,
)
from tests.kit.tiny import (
    BF16,
    MUON,
    MUON_ROUNDING,
    TIED,
    already_joined,
    build_run,
    metrics,
    write_config,
)

FP32_LOSS = 2e-6  # by which losses of about 5 may differ where sums have another order


# Losses


def losses(run: Run) -> Tensor:
    """Shape [replicas, steps]."""
    return torch.tensor([[row["train/loss"] for row in rows] for rows in metrics(run.folder)])


# name: (of both runs, saved with, continued with); all other pairs are in tests/theorems/test_layouts.py
CASES: dict[str, tuple[list[Changes], Changes, Changes]] = {
    "tp 1 to 2": ([], padded(3, layout()), padded(32, layout(tp=2))),
    "pp 2 to dp 2, tied, under way": ([TIED, LATE], layout(pp=2), layout(dp=2)),
    "dp 2 to pp 2 x vpp 2, Muon": ([MUON], layout(dp=2), layout(pp=2, vpp=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_without_the_change(name: str, tmp_path: Path) -> None:
    both, before, after = CASES[name]
    unchanged = saved_run(tmp_path / "unchanged", [*both, before], STEPS)
    moved = unchanged.copy(tmp_path / "moved")
    moved.change({**after, "checkpoint": {"load": str(moved.step_folder(SAVED))}})
    reported = launch(moved, ranks(after), STEPS)
    assert f"step {SAVED}, " in reported
    assert "changed: parallel." in reported
    found, expected = losses(moved), losses(unchanged)
    assert torch.equal(found[:, :SAVED], expected[:, :SAVED])
    allowed = FP32_LOSS * (MUON_ROUNDING if MUON in both else 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed)
    assert (expected[:, SAVED:] - expected[:, SAVED - 1 : -1]).abs().min() > 10 * allowed, "steps are larger"


# The state itself, bit for bit


def take_over(rank: int, world_size: int, config: str) -> None:
    """Begin as the config says, and save what was found before the first step."""
    already_joined()
    run = build_run(config)
    assert run.start_step == SAVED
    report = run.checkpointer.save(SAVED, run.monitor.metrics.counters)
    assert report.error is None
    assert run.checkpointer.close() is None


def taken_over(run: Run, changes: Changes, folder: Path) -> Run:
    """The checkpoint of `run`, written again by the ranks of another layout."""
    other = run.clean(folder)
    other.change({**changes, "checkpoint": {"load": str(run.step_folder(SAVED))}})
    run_ranks(ranks(changes), take_over, write_config(folder, other.raw))
    return other


def state(run: Run) -> dict[str, Any]:
    """All tensors and numbers, but for random states and the report of a round under way."""
    folder = run.step_folder(SAVED)
    content: dict[str, Any] = {}
    for manifest in catalog.read_manifests(folder):
        content[f"{manifest.position}"] = manifest.engine
        for file in manifest.files:
            tensors = load_file(catalog.replica_folder(folder, manifest.position.replica) / file)
            content |= {f"{manifest.position} {name}": tensor for name, tensor in tensors.items()}
    return {name: value for name, value in content.items() if " rng." not in name and " delayed_" not in name}


def parameters(run: Run) -> str:
    """As `inspect` says it."""
    (reported,) = (line for line in inspect([run.step_folder(SAVED)]) if line.startswith("parameters: "))
    return reported


@pytest.mark.parametrize(
    ("both", "before", "after"),
    [
        ([LATE], layout(pp=2, vpp=2), layout(tp=2, dp=2)),
        ([LATE], layout(tp=2), layout(pp=2, replicas=3)),
        (
            [EXPERTS, MUON],
            layout(dp=2, ep=2, sequence_parallel=False),
            layout(tp=2, ep=1, sequence_parallel=True),
        ),
        slow([MUON, BF16, TIED], layout(dp=2, pp=2), layout(tp=2)),
    ],
    ids=["AdamW", "more replicas", "expert parallelism", "Muon, bf16, tied"],
)
def test_state_round_trips_through_another_layout(
    both: list[Changes], before: Changes, after: Changes, tmp_path: Path
) -> None:
    """On the way to another layout, and to more replicas, no number is lost or rounded."""
    first = saved_run(tmp_path / "first", [*both, before])
    there = taken_over(first, after, tmp_path / "there")
    back = taken_over(there, before, tmp_path / "back")
    assert parameters(first) == parameters(there), "slices and copies are counted once"
    found, expected = state(back), state(first)
    assert any("inner." in name for name in expected)
    assert any("correction" in name for name in expected) == (LATE in both)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
        assert same, name


def of_model(run: Run, vector: str) -> dict[str, Tensor]:
    """One number for each weight of replica 0, by parameter."""
    folder = run.step_folder(SAVED)
    reader = CheckpointReader(Ensemble.read([folder]))
    return {row.name: reader.read(row.name, [0], vector).clone() for row in reader.table}


@pytest.mark.parametrize(
    ("layout_before", "layout_after"),
    [
        (layout(tp=2), layout(pp=2)),
        (
            layout(pp=3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1),
            layout(pp=3, num_layers_in_last_pipeline_stage=2),
        ),
    ],
    ids=["all ranks", "all but the first stage"],
)
def test_corrections_of_fragments_are_merged_at_once(
    layout_before: Changes, layout_after: Changes, tmp_path: Path
) -> None:
    """Fragments of another layout are other weights: their next rounds are not those of the checkpoint."""
    first = saved_run(tmp_path / "first", [LATE, {"noloco": {"fragments": 2}}, layout_before])
    there = taken_over(first, layout_after, tmp_path / "there")
    before, corrections, after = (
        of_model(run, name)
        for run, name in ((first, "fast_weights"), (first, "correction"), (there, "fast_weights"))
    )
    assert max(float(correction.abs().max()) for correction in corrections.values()) > 1e-4
    for name, weights in after.items():
        assert torch.equal(weights, before[name] + corrections[name]), name
    assert not any("correction" in name for name in state(there))


def test_every_file_that_is_read_is_verified(tmp_path: Path) -> None:
    saved = saved_run(tmp_path / "run", [layout(pp=2)])
    for file in ("stage_01_dp_00_tp_00", "resume_stage_00_dp_00_tp_00"):
        run = saved.copy(tmp_path / file)
        path = run.step_folder(SAVED) / "replica_01" / f"{file}.safetensors"
        flip_a_bit(path)
        run.change(layout(tp=2))
        reported = run_ranks(4, starts, run.arguments())[0].err
        assert f"({path}: checksum does not match its manifest)" in reported
    run.change(layout(replicas=1))  # replica 1 is dropped: no rank reads it
    assert "continuing from" in run_ranks(1, starts, run.arguments())[0].out


def test_dropout_at_a_new_place_has_numbers_of_its_own(tmp_path: Path) -> None:
    """Neither those that the place had at the beginning, nor those of the rank that wrote the checkpoint."""
    first = saved_run(tmp_path / "first", [{"model": {"hidden_dropout": 0.1}}, layout(pp=2)])
    there = taken_over(first, layout(dp=2), tmp_path / "there")
    fresh = there.clean(tmp_path / "fresh")
    fresh.change({"checkpoint": {"load": "none"}})
    begun = run_ranks(4, random_state_at_the_beginning, write_config(fresh.folder, fresh.raw))
    found = [random_state_of(there, at) for at in (Position(0, 0, 0, 0), Position(0, 0, 1, 0))]
    others = [*begun, *(random_state_of(first, Position(0, stage, 0, 0)) for stage in range(2))]
    assert not torch.equal(*found)
    assert not any(torch.equal(one, other) for one in found for other in others)


def random_state_of(run: Run, at: Position) -> Tensor:
    return load_file(catalog.file_of(run.step_folder(SAVED), at, "rng.cpu"))["rng.cpu"]


def random_state_at_the_beginning(rank: int, world_size: int, config: str) -> Tensor:
    already_joined()
    build_run(config)
    return random_state()["rng.cpu"]
