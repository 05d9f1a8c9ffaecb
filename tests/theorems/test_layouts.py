"""Vectors that ranks of one layout wrote, read by ranks of another: each weight keeps its number."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.checkpoint.resume import counters_at
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Topology
from tests.kit.architectures import SMALL
from tests.kit.layouts import STEP, VECTORS, Layout, reader_of, two_layouts, write


@settings(max_examples=25)
@given(two_layouts())
def test_each_weight_keeps_its_number(layouts: tuple[Layout, Layout]) -> None:
    before, after = layouts
    with tempfile.TemporaryDirectory() as folder:
        saved = write(Path(folder), before)
        for rank in range(after.topology.world_size):
            at = after.topology.position(rank)
            reader = reader_of(saved, after, at)
            groups = range(len(after.parts(at)))
            expected = {
                f"{vector}.{group}": after.vector(at, vector, group) for vector in VECTORS for group in groups
            }
            found = dict(reader.engine_state("inner."))
            assert all(found.pop(f"inner.step.{group}") == STEP for group in groups)
            assert found.keys() == {name for name in expected if name.startswith("inner.")}
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name]), name
            slow = torch.cat([expected[f"{catalog.WEIGHTS}.{group}"] for group in groups])
            assert torch.equal(reader.vector(catalog.WEIGHTS), slow)


@pytest.mark.parametrize("second", [{}, {"pp": 1, "tp": 2, "dp": 1}])
def test_mean_over_job_folders_equals_one_job(tmp_path: Path, second: dict[str, int]) -> None:
    """Also where the second job has another layout."""
    one = Layout(Topology(2, pp=2, dp=2), 32, 2, tied=False)
    layouts = one.topology, replace(one.topology, **second)
    jobs = [
        replace(one, topology=replace(topology, replicas=1, slot=slot, separate_jobs=True))
        for slot, topology in enumerate(layouts)
    ]
    readers = [CheckpointReader(write(tmp_path, one))]
    for slot, job in enumerate(jobs):
        write(tmp_path / str(slot), job)
    readers.append(
        CheckpointReader(Ensemble.read([catalog.step_folder(tmp_path / str(slot), STEP) for slot in (1, 0)]))
    )
    for row in table_of(one.architecture):
        expected, found = (reader.read(row.name, [0, 1]).clone() for reader in readers)
        assert torch.equal(found, expected), row.name


def test_samples_of_steps_that_a_job_left_out_are_not_consumed() -> None:
    jobs = [Topology(1, slot=slot, separate_jobs=True) for slot in (0, 1)]
    manifests = [
        Manifest(STEP, 10 * STEP, job, job.position(0), {}, {}, SMALL, [], counters=counters)
        for job, counters in zip(jobs, ({}, {"total/skipped_ahead": 5.0}), strict=True)
    ]
    assert Ensemble({0: Path(), 1: Path()}, manifests).consumed.samples == 10 * (STEP + STEP - 5)


def test_counters_of_another_layout_add_up() -> None:
    """Bytes of a replica stay what they were; what all ranks know, and seconds of the slowest, is not added."""
    before = Layout(Topology(2, pp=2, dp=2), 32, 1, tied=False)
    counters = [
        {"total/sent_bytes": 10.0 * rank, "total/pause_seconds": float(rank), "delay_steps": 3.0}
        for rank in range(before.topology.world_size)
    ]
    manifests = [
        Manifest(
            STEP, 0, before.topology, before.topology.position(rank), {}, {}, SMALL, [], {}, counters[rank]
        )
        for rank in range(before.topology.world_size)
    ]
    saved = Ensemble(dict.fromkeys(before.topology.numbers, Path()), manifests)
    after = Topology(3, tp=2)
    found = [counters_at(saved, after, after.position(rank)) for rank in range(after.world_size)]
    assert [sum(of["total/sent_bytes"] for of in found[r : r + 2]) for r in (0, 2, 4)] == [60.0, 220.0, 60.0]
    assert [of["total/pause_seconds"] for of in found] == [3.0, 3.0, 7.0, 7.0, 3.0, 3.0]
    assert {of["delay_steps"] for of in found} == {3.0}
    more = replace(before.topology, replicas=3)
    assert counters_at(saved, more, more.position(9)) == counters[1], "a clone of replica 0"
