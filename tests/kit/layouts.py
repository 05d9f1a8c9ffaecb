"""Ranks of any layout with the vectors that they would hold: numbers of the whole model, cut and padded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.checkpoint.restore import RankReader
from megatron_noloco.engine.layout import FlatPart, held_of
from megatron_noloco.federation.movement import Movement
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import FAMILIES, Parameter, table_of
from megatron_noloco.plans.canonical import Holding
from megatron_noloco.plans.topology import Position, Topology
from tests.kit.architectures import SMALL
from tests.kit.loopback import loopback_world

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


MOST_RANKS = 12  # of a replica


def holdings_of(layout: Layout) -> list[Holding]:
    architecture, topology = replace(layout.architecture, vocab_size=VOCABULARY), layout.topology
    return [
        Holding(*held_of(layout.parts(at), architecture, topology, at))
        for at in map(topology.position, range(topology.replica_size))
    ]


def movements(holdings: Sequence[Holding], intervals: list[range], bucket: int) -> list[Movement]:
    """Return those of the ranks of a replica."""
    if len(holdings) == 1:
        return [Movement(holdings, intervals, bucket=bucket)]
    world = loopback_world(len(holdings))
    return [Movement(holdings, intervals, transport, bucket=bucket) for transport in world]


def part_of(canonical: Tensor, holding: Holding, interval: range) -> Tensor:
    """What a rank has of an interval of a vector, in ascending order."""
    parts = [
        canonical[block.first :].as_strided((block.rows, block.width), (block.matrix.columns, 1))
        for block in holding.between(interval.start, interval.stop)
    ]
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)


def size_of(holding: Holding) -> int:
    """Elements of a vector with the places of a rank, up to the last one."""
    return max((block.own + block.size for block in holding.between(0, holding.stop)), default=0)


def scattered(canonical: Tensor, holding: Holding, interval: range) -> Tensor:
    """What a rank has of a vector, at its places; zeros elsewhere."""
    found, parts = torch.zeros(size_of(holding)), part_of(canonical, holding, interval)
    blocks = holding.between(interval.start, interval.stop)
    for block, part in zip(blocks, parts.split([block.size for block in blocks]), strict=True):
        found[block.own : block.own + block.size] = part
    return found
