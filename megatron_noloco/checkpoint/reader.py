"""Read the full tensor of a parameter from a checkpoint of any layout, of one replica or averaged over several."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_noloco.checkpoint.catalog import WEIGHTS
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.model.families import table_of
from megatron_noloco.outer.vectors import Buffers
from megatron_noloco.plans.canonical import Block, Rectangle
from megatron_noloco.plans.topology import Position, Topology

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


class Share(NamedTuple):
    """A rectangle of a parameter in the file of a saved rank."""

    at: Position  # that rank in the replica that was looked at; others of its job have the same layout
    group: int  # of the inner optimizer: which FlatPart
    block: Block  # `own` is its place in the FlatPart


class CheckpointReader:
    """Reads a checkpoint by the names of parameters in the unsplit model, a few tensors at a time.

    A parameter may lie in the files of several ranks. In all methods, `vector` names what is read: the slow
    weights, or another vector with one number for each weight. Several `replicas` are averaged.
    """

    def __init__(self, saved: Ensemble) -> None:
        self.saved = saved
        architectures = [manifest.architecture for manifest in saved.manifests]
        self.table = table_of(min(architectures, key=lambda one: one.padded_vocab_size))
        # Used again: allocating fresh pages takes longer than filling them.
        self._memory = Buffers(pinned=False)
        self._matrices = self.table.matrices()
        self._shares: dict[Path, dict[str, list[Share]]] = {}  # by folder: its replicas have one layout

    def read(self, name: str, replicas: list[int], vector: str = WEIGHTS) -> Tensor:
        """Return the full tensor of a parameter, fp32. The next call overwrites it."""
        row = self.table.find(name)
        whole = self._matrices[row.source].whole
        return self.read_rectangle(name, whole, replicas, vector).view(row.shape)

    def read_rectangle(
        self, name: str, place: Rectangle, replicas: list[int], vector: str = WEIGHTS
    ) -> Tensor:
        """Return a rectangle of a parameter, fp32, shape [rows, width]. The next call overwrites it.

        Rows that the checkpoint does not have, which are padding of the vocabulary, are zero.
        """
        source = self.table.find(name).source
        found = self._memory.get("rectangle", torch.float32, place.rows, place.width)
        found[max(self._matrices[source].rows - place.top, 0) :] = 0
        for number, replica in enumerate(replicas):
            for share in self._shares_of(replica)[source]:
                block = share.block
                top, bottom = max(place.top, block.top), min(place.top + place.rows, block.top + block.rows)
                left = max(place.left, block.left)
                right = min(place.left + place.width, block.left + block.width)
                if top < bottom and left < right:
                    target = found[
                        top - place.top : bottom - place.top, left - place.left : right - place.left
                    ]
                    rows = self._rows(share, top, bottom, replica, vector)
                    part = rows[:, left - block.left : right - block.left]
                    target.copy_(part) if number == 0 else target.add_(part)
        if len(replicas) > 1:
            found /= len(replicas)
        return found

    def first_share(self, name: str, replica: int) -> Share:
        """Return where the first rows of a parameter of a replica lie."""
        return self._shares_of(replica)[self.table.find(name).source][0]

    def _shares_of(self, replica: int) -> dict[str, list[Share]]:
        """Return where the parts of each parameter of a replica lie."""
        folder = self.saved.folders[replica]
        if folder not in self._shares:
            found = self._shares[folder] = dict[str, list[Share]]()
            topology = self.saved.topology_of(replica)
            for at in map(topology.position, range(topology.replica_size)):
                for name, share in self._shares_at(replace(at, replica=replica), topology):
                    found.setdefault(name, []).append(share)
        return self._shares[folder]

    def _shares_at(self, at: Position, topology: Topology) -> Iterator[tuple[str, Share]]:
        """Yield what of each parameter is read from the rank `at`: not what other ranks have as well."""
        owner = replace(at, dp=at.dp % topology.ep)  # all owners of the same weights have one layout
        manifest = self.saved.manifest(owner)
        table = table_of(manifest.architecture)  # which may have more padding
        for group, part in enumerate(manifest.layout):
            for row, block in part.blocks(table, self._matrices, topology, at):
                if not row.is_copy(at.tp):
                    yield row.name, Share(at, group, block)

    def _rows(self, share: Share, top: int, bottom: int, replica: int, vector: str) -> Tensor:
        """Read rows top..bottom of a matrix, as wide as the block, shape [bottom - top, width]."""
        block, name = share.block, f"{vector}.{share.group}"
        flat = self._memory.get("share", torch.float32, (bottom - top) * block.width)
        path = self.saved.file(replace(share.at, replica=replica), name)
        read_into(flat, path, name, block.own + (top - block.top) * block.width)
        return flat.view(-1, block.width)
