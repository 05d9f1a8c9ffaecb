"""Single tensors out of a checkpoint: full, of one replica or averaged over several, whatever wrote them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_noloco.checkpoint.catalog import WEIGHTS
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.vector import FlatVector
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Position


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
    """Where some elements lie in the vectors of a stage and tensor-parallel rank."""

    stage: int
    tp: int
    group: int  # of the inner optimizer: which FlatPart
    length: int  # of the FlatPart
    start: int  # in that part of all data-parallel ranks one after the other


class CheckpointReader:
    """Reads vectors by the names of parameters in the unsplit model; a few tensors in memory at a time.

    The numbers of a stage and tensor-parallel rank lie in the files of its data-parallel ranks (see `FlatPart`); a
    parameter may lie across several of them. `vector` says which numbers: by default the slow weights, but
    everything of which there is one number for each weight is read alike. Several replicas are averaged.
    """

    def __init__(self, saved: Ensemble) -> None:
        self.saved = saved
        self.topology = saved.topology
        self.table = table_of(saved.manifests[0].architecture)
        self._parts, self._other, self._merged = Scratch(), Scratch(), Scratch()
        self._places = self._find_parameters()

    def read(self, name: str, replicas: list[int], vector: str = WEIGHTS) -> Tensor:
        """The full tensor, fp32. The next call overwrites it."""
        parameter = self.table.find(name)
        places = self._places[parameter.source]
        shape = parameter.slice_shape(self.topology.tp)
        stacked = self._parts.take(len(places) * math.prod(shape))
        slices = stacked.view(len(places), *shape)
        for tp, place in enumerate(places):
            self.fill(slices[tp].view(-1), place, replicas, vector)
        if parameter.is_stacked:
            return stacked.view(parameter.shape)
        return parameter.merge(list(slices), self._merged.take)

    def read_slice(self, name: str, tp: int, replicas: list[int], vector: str = WEIGHTS) -> Tensor:
        """What tensor-parallel rank `tp` of the checkpoint has of it, likewise."""
        parameter = self.table.find(name)
        shape = parameter.slice_shape(self.topology.tp)
        flat = self._parts.take(math.prod(shape))
        self.fill(flat, self._places[parameter.source][tp], replicas, vector)
        return flat.view(shape)

    def place(self, name: str) -> Place:
        """Where the first tensor-parallel rank of the checkpoint has a parameter."""
        return self._places[self.table.find(name).source][0]

    def fill(self, flat: Tensor, place: Place, replicas: list[int], vector: str) -> None:
        """Fill `flat`, on any device, with the elements from `place` on."""
        self._read_flat(flat, place, replicas[0], vector)
        for replica in replicas[1:]:
            other = self._other.take(len(flat))
            self._read_flat(other, place, replica, vector)
            flat += other.to(flat.device)
        if len(replicas) > 1:
            flat /= len(replicas)

    def _find_parameters(self) -> dict[str, list[Place]]:
        """Name -> its place in the vectors of each tensor-parallel rank."""
        places: dict[str, list[Place]] = {}
        for stage in range(self.topology.pp):
            for tp in range(self.topology.tp):
                manifest = self.saved.manifest(Position(self.topology.slot, stage, 0, tp))
                for group, part in enumerate(manifest.layout):
                    start = 0
                    for name, shape in part.parameters:
                        if self.table.find(name).same_as is None:
                            places.setdefault(name, []).append(Place(stage, tp, group, part.length, start))
                        start += math.prod(shape)
        return places

    def _read_flat(self, flat: Tensor, place: Place, replica: int, vector: str) -> None:
        start, stop = place.start, place.start + len(flat)
        for dp in range(self.topology.dp):
            begin = dp * place.length
            first, last = max(start, begin), min(stop, begin + place.length)
            if first < last:
                at, name = Position(replica, place.stage, dp, place.tp), f"{vector}.{place.group}"
                numbers = FlatVector(self.saved.file(at, name), name)
                numbers.read_into(flat[first - start : last - start], first - begin)
