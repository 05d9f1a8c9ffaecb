"""Read the full tensor of a parameter from a checkpoint of any layout, of one replica or averaged over several."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_noloco.checkpoint.catalog import WEIGHTS
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Position

_PIECE = 1 << 24  # elements that are read before a file is opened again


def read_into(flat: Tensor, path: Path, name: str, start: int) -> None:
    """Fill `flat` with the elements from `start` on of the fp32 vector `name` in a safetensors file.

    The file is opened again for every piece, because the library maps it into memory, and the pages that were read
    count as memory of the process until the map is closed: 1.6 GB instead of 64 MB for a vector of 1.6 GB. Opening
    takes 7 ms.
    """
    for piece in flat.split(_PIECE):
        with safe_open(path, framework="pt") as file:
            piece.copy_(file.get_slice(name)[start : start + len(piece)])
        start += len(piece)


class Scratch:
    """Memory that is used again for each tensor: allocating fresh pages takes longer than filling them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, length: int) -> Tensor:
        """Return a flat tensor; it shares its memory with those that were taken before."""
        if len(self._memory) < length:
            self._memory = torch.empty(length)
        return self._memory[:length]


class Place(NamedTuple):
    """Where elements lie in the vectors of the data-parallel ranks of one stage and tensor-parallel rank."""

    stage: int
    tp: int
    group: int  # of the inner optimizer: which FlatPart
    length: int  # of the FlatPart
    start: int  # offset of the parameter in the concatenation of the owners' parts
    owners: range  # the data-parallel ranks that divide the vector


class CheckpointReader:
    """Reads a checkpoint by the names of parameters in the unsplit model, a few tensors at a time.

    The vectors of a stage and tensor-parallel rank are divided over the files of data-parallel ranks (see
    `FlatPart`), and a parameter may lie in several of them. In all methods, `vector` names what is read, the slow
    weights or another vector with one number for each weight, and several `replicas` are averaged.
    """

    def __init__(self, saved: Ensemble) -> None:
        self.saved = saved
        self.topology = saved.topology
        self.table = table_of(saved.manifests[0].architecture)
        self._parts, self._other, self._merged = Scratch(), Scratch(), Scratch()
        self._places = self._find_parameters()

    def read(self, name: str, replicas: list[int], vector: str = WEIGHTS) -> Tensor:
        """Return the full tensor of a parameter, fp32. The next call overwrites it."""
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
        """Return the slice of a parameter on saved tensor-parallel rank `tp`. The next call overwrites it."""
        parameter = self.table.find(name)
        shape = parameter.slice_shape(self.topology.tp)
        flat = self._parts.take(math.prod(shape))
        self.fill(flat, self._places[parameter.source][tp], replicas, vector)
        return flat.view(shape)

    def place(self, name: str) -> Place:
        """Return where a parameter lies in the vectors of the first saved tensor-parallel rank."""
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
        """Map each parameter's name to its place in the vectors of each tensor-parallel rank."""
        places: dict[str, list[Place]] = {}
        for stage in range(self.topology.pp):
            for tp in range(self.topology.tp):
                for dp in range(self.topology.ep):  # these have all experts
                    for name, place in self._places_of(Position(self.topology.slot, stage, dp, tp)):
                        if place.owners[0] == dp:
                            places.setdefault(name, []).append(place)
        return places

    def _places_of(self, at: Position) -> Iterator[tuple[str, Place]]:
        """Yield the name and place of each parameter that the rank `at` has a part of, without copies."""
        for group, part in enumerate(self.saved.manifest(at).layout):
            start = 0
            for name, shape in part.parameters:
                row = self.table.find(name)
                if row.same_as is None:
                    owners = self.topology.owners(at.dp, row.expert is not None)
                    yield name, Place(at.stage, at.tp, group, part.length, start, owners)
                start += math.prod(shape)

    def _read_flat(self, flat: Tensor, place: Place, replica: int, vector: str) -> None:
        start, stop = place.start, place.start + len(flat)
        name = f"{vector}.{place.group}"
        for index, dp in enumerate(place.owners):
            begin = index * place.length
            first, last = max(start, begin), min(stop, begin + place.length)
            if first < last:
                path = self.saved.file(Position(replica, place.stage, dp, place.tp), name)
                read_into(flat[first - start : last - start], path, name, first - begin)
