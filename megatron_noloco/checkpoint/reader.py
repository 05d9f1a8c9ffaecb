"""Single tensors out of a checkpoint: full, of one replica or averaged over several, whatever wrote them."""

import math
from pathlib import Path

import torch
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.vector import FlatVector
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Position
from megatron_noloco.spec.architecture import Architecture


class Scratch:
    """Memory that is used again and again: fresh pages cost more time than filling them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, length: int) -> Tensor:
        """A flat tensor; it shares its memory with those taken before."""
        if len(self._memory) < length:
            self._memory = torch.empty(length)
        return self._memory[:length]


class CheckpointReader:
    """Reads slow weights by their name in the unsplit model; a few tensors in memory at a time.

    The flat vector of a stage and tensor-parallel rank lies in equal parts in the files of its data-parallel
    ranks; a parameter may lie across two of them.
    """

    def __init__(self, folder: Path, manifests: list[Manifest], architecture: Architecture) -> None:
        self.folder = folder
        self.topology = manifests[0].topology
        self._table = table_of(architecture)
        self._vectors: dict[Position, FlatVector] = {}
        self._parts, self._other, self._merged = Scratch(), Scratch(), Scratch()
        self._places = self._find_parameters(manifests)

    def read(self, name: str, replicas: list[int]) -> Tensor:
        """The full tensor, fp32, averaged over `replicas` where there are several. The next call overwrites it."""
        parameter = self._table.find(name)
        stage, offsets = self._places[parameter.source]
        shape = parameter.slice_shape(self.topology.tp)
        stacked = self._parts.take(len(offsets) * math.prod(shape))
        slices = stacked.view(len(offsets), *shape)
        for tp, offset in enumerate(offsets):
            places = [Position(replica, stage, 0, tp) for replica in replicas]
            self._read_mean(slices[tp].view(-1), places, offset)
        if parameter.is_stacked:
            return stacked.view(parameter.shape)
        return parameter.merge(list(slices), self._merged.take)

    def _find_parameters(self, manifests: list[Manifest]) -> dict[str, tuple[int, list[int]]]:
        """Name -> its stage, and its offset in the flat vector of each tensor-parallel rank."""
        places: dict[str, tuple[int, list[int]]] = {}
        for stage in range(self.topology.pp):
            for tp in range(self.topology.tp):
                manifest = manifests[self.topology.rank(Position(0, stage, 0, tp))]
                offset = 0
                for name, shape in manifest.layout:
                    if self._table.find(name).same_as is None:
                        places.setdefault(name, (stage, []))[1].append(offset)
                    offset += math.prod(shape)
        return places

    def _read_mean(self, flat: Tensor, places: list[Position], offset: int) -> None:
        """The part of one tensor-parallel rank: the mean over the replicas, which differ in nothing else."""
        self._read_flat(flat, places[0], offset)
        for at in places[1:]:
            other = self._other.take(len(flat))
            self._read_flat(other, at, offset)
            flat += other
        if len(places) > 1:
            flat /= len(places)

    def _read_flat(self, flat: Tensor, at: Position, start: int) -> None:
        stop = start + len(flat)
        for dp in range(self.topology.dp):
            vector = self._vector(Position(at.replica, at.stage, dp, at.tp))
            begin = dp * vector.length  # all data-parallel ranks hold equally many
            first, last = max(start, begin), min(stop, begin + vector.length)
            if first < last:
                vector.read_into(flat[first - start : last - start], first - begin)

    def _vector(self, at: Position) -> FlatVector:
        if at not in self._vectors:
            path = catalog.replica_folder(self.folder, at.replica) / f"{catalog.rank_name(at)}.safetensors"
            self._vectors[at] = FlatVector(path, "slow_weights")
        return self._vectors[at]
