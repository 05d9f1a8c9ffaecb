"""Vectors that ranks of one layout wrote, read by ranks of another: each weight keeps its number."""

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.checkpoint.restore import RankReader
from megatron_noloco.checkpoint.resume import counters_at
from megatron_noloco.engine.layout import FlatPart
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import FAMILIES, Parameter, table_of
from megatron_noloco.plans.topology import Position, Topology
from tests.unit.test_families import SMALL

VECTORS = ("slow_weights", "inner.momentum")
LAYERS, VOCABULARY, EXPERTS = 4, 30, 6
STEP = 7


@dataclass(frozen=True)
class Layout:
    """Sizes, the padded vocabulary, and how the parameters of a rank are put into groups."""

    topology: Topology
    padded: int
    groups: int  # 3: linear maps, the other matrices and norms, as with Muon; 2: matrices and norms; 1: all
    tied: bool
    family: str = "llama"

    @property
    def experts(self) -> int:
        """Of each layer; 0: a dense model."""
        return EXPERTS if "num_moe_experts" in FAMILIES[self.family].own_fields else 0

    @property
    def architecture(self) -> Architecture:
        sizes = {"num_layers": LAYERS, "padded_vocab_size": self.padded, "tied_embeddings": self.tied}
        dense = replace(SMALL, family=self.family, **sizes)
        return replace(dense, num_moe_experts=EXPERTS, moe_router_topk=2) if self.experts else dense

    def parts(self, at: Position) -> list[FlatPart]:
        """What ZeRO would make of a stage: parameters one after the other, padded, cut into equal parts."""
        here = self.topology.experts(at.dp, self.experts)
        rows = [
            row
            for row in table_of(self.architecture)
            if self._is_here(row, at.stage) and (row.expert is None or row.expert in here)
        ]
        kinds: list[Any] = [lambda row: (row.decays, row.linear), lambda row: row.decays, lambda row: True]

        def kind(row: Parameter) -> tuple[Any, bool]:
            return kinds[3 - self.groups](row), self.topology.ep > 1 and row.expert is not None

        parts = []
        for wanted in sorted({kind(row) for row in rows}, reverse=True):
            group = [row for row in rows if kind(row) == wanted]
            shapes = [(row.name, list(row.slice_shape(self.topology.tp))) for row in group]
            elements = sum(math.prod(shape) for _, shape in shapes)
            owners = len(self.topology.owners(at.dp, wanted[1]))
            parts.append(FlatPart(-(-elements // (2 * owners)) * 2, shapes))
        return parts

    def _is_here(self, row: Parameter, stage: int) -> bool:
        pp, chunks = self.topology.pp, self.topology.pp * self.topology.vpp
        if row.layer is not None:
            return row.layer * chunks // LAYERS % pp == stage
        if row.same_as is not None and pp == 1:
            return False
        return stage == (0 if row.name.startswith("embedding.") else pp - 1)

    def vector(self, at: Position, vector: str, group: int) -> Tensor:
        """What a rank has, from the numbers of the whole model."""
        part, table = self.parts(at)[group], table_of(self.architecture)
        slices = [
            table.find(name).slice(numbers(table.find(name), vector, at.replica), at.tp, self.topology.tp)
            for name, _ in part.parameters
        ]
        flat = torch.cat([piece.reshape(-1) for piece in slices])
        owners = self.topology.owners(at.dp, table.find(part.parameters[0][0]).expert is not None)
        flat = torch.cat([flat, flat.new_zeros(part.length * len(owners) - len(flat))])
        return flat.view(len(owners), part.length)[owners.index(at.dp)]


def numbers(row: Parameter, vector: str, replica: int) -> Tensor:
    """One for each weight of the unsplit model; no two are equal. Padding of the vocabulary is zero."""
    rows = min(row.shape[0], VOCABULARY) if "embed" in row.source or "output" in row.source else row.shape[0]
    seed = sum(map(ord, row.source + vector)) + 1000 * replica
    full = torch.zeros(row.shape)
    full[:rows] = torch.randn((rows, *row.shape[1:]), generator=torch.Generator().manual_seed(seed))
    return full


def write(folder: Path, layout: Layout) -> Ensemble:
    step_folder = catalog.step_folder(folder, STEP)
    for rank in range(layout.topology.world_size):
        at = layout.topology.position(rank)
        parts = layout.parts(at)
        catalog.replica_folder(step_folder, at.replica).mkdir(parents=True, exist_ok=True)
        for vector in VECTORS:
            tensors = {f"{vector}.{group}": layout.vector(at, vector, group) for group in range(len(parts))}
            if vector != catalog.WEIGHTS:
                tensors |= {f"inner.step.{group}": torch.tensor(float(STEP)) for group in range(len(parts))}
            save_file(tensors, catalog.file_of(step_folder, at, vector))
        manifest = Manifest(STEP, 0, layout.topology, at, {}, {}, layout.architecture, parts)
        manifest.write(catalog.replica_folder(step_folder, at.replica))
    return Ensemble.read([step_folder])


def reader_of(saved: Ensemble, layout: Layout, at: Position) -> RankReader:
    return RankReader(
        CheckpointReader(saved), table_of(layout.architecture), layout.topology, at, layout.parts(at)
    )


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[Layout, Layout]:
    tied, replicas, family = draw(st.booleans()), draw(st.integers(1, 2)), draw(st.sampled_from([*FAMILIES]))
    experts = "num_moe_experts" in FAMILIES[family].own_fields

    def layout() -> Layout:
        pp, tp = draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, 2))
        vpp = draw(st.sampled_from((1, 2))) if pp == 2 else 1
        padded = draw(st.sampled_from((30, 32, 40)))
        groups = draw(st.integers(1, 3))
        ep = draw(st.integers(1, 3)) if experts else 1
        dp = ep * draw(st.integers(1, 2 if ep > 1 else 3))
        return Layout(Topology(replicas, pp, dp, tp, vpp, ep=ep), padded, groups, tied, family)

    return layout(), layout()


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
