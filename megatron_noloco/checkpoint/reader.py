"""Single tensors out of a checkpoint: full, of one replica or averaged over several, whatever wrote them."""

import math
from pathlib import Path
from typing import NamedTuple

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


class Place(NamedTuple):
    """Where a parameter lies in the weights of a stage and tensor-parallel rank."""

    before: int  # elements of every data-parallel rank's vector before the FlatPart that it lies in
    length: int  # of the FlatPart
    start: int  # of the parameter, in that part of all data-parallel ranks one after the other


class CheckpointReader:
    """Reads slow weights by their name in the unsplit model; a few tensors in memory at a time.

    The weights of a stage and tensor-parallel rank lie in the files of its data-parallel ranks (see `FlatPart`); a
    parameter may lie across several of them.
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
        stage, places = self._places[parameter.source]
        shape = parameter.slice_shape(self.topology.tp)
        stacked = self._parts.take(len(places) * math.prod(shape))
        slices = stacked.view(len(places), *shape)
        for tp, place in enumerate(places):
            ranks = [Position(replica, stage, 0, tp) for replica in replicas]
            self._read_mean(slices[tp].view(-1), ranks, place)
        if parameter.is_stacked:
            return stacked.view(parameter.shape)
        return parameter.merge(list(slices), self._merged.take)

    def _find_parameters(self, manifests: list[Manifest]) -> dict[str, tuple[int, list[Place]]]:
        """Name -> its stage, and its place in the weights of each tensor-parallel rank."""
        places: dict[str, tuple[int, list[Place]]] = {}
        for stage in range(self.topology.pp):
            for tp in range(self.topology.tp):
                manifest = manifests[self.topology.rank(Position(0, stage, 0, tp))]
                before = 0
                for part in manifest.layout:
                    start = 0
                    for name, shape in part.parameters:
                        if self._table.find(name).same_as is None:
                            places.setdefault(name, (stage, []))[1].append(Place(before, part.length, start))
                        start += math.prod(shape)
                    before += part.length
        return places

    def _read_mean(self, flat: Tensor, ranks: list[Position], place: Place) -> None:
        """The slice of one tensor-parallel rank: the mean over the replicas, which differ in nothing else."""
        self._read_flat(flat, ranks[0], place)
        for at in ranks[1:]:
            other = self._other.take(len(flat))
            self._read_flat(other, at, place)
            flat += other
        if len(ranks) > 1:
            flat /= len(ranks)

    def _read_flat(self, flat: Tensor, at: Position, place: Place) -> None:
        start, stop = place.start, place.start + len(flat)
        for dp in range(self.topology.dp):
            begin = dp * place.length
            first, last = max(start, begin), min(stop, begin + place.length)
            if first < last:
                vector = self._vector(Position(at.replica, at.stage, dp, at.tp))
                vector.read_into(flat[first - start : last - start], place.before + first - begin)

    def _vector(self, at: Position) -> FlatVector:
        if at not in self._vectors:
            path = catalog.replica_folder(self.folder, at.replica) / f"{catalog.rank_name(at)}.safetensors"
            self._vectors[at] = FlatVector(path, "slow_weights")
        return self._vectors[at]
