"""The state of one rank of a run, out of a checkpoint that ranks of any other layout may have written."""

import math
from collections.abc import Iterator

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.reader import CheckpointReader, Place
from megatron_noloco.engine.layout import FlatPart
from megatron_noloco.model.families import Parameter, Table
from megatron_noloco.plans.topology import Position, Topology


class RankReader:
    """Reads what one rank continues from: the same numbers for the same weights, wherever they were.

    Where the checkpoint has a rank with the same weights in the same layout, its vectors are taken as they are, to
    the last bit. Otherwise the rank fills its vectors parameter by parameter, with its slice of each.

    Args:
        reader: of the checkpoint.
        table: of this run's model, which may have more or fewer rows of padding in its vocabulary.
        topology: of this run.
        at: this rank's position; its replica is the saved one that it continues.
        layout: of this rank's flat vectors.

    Attributes:
        moved: whether no saved rank had this layout at this place.
        source: the manifest of that rank, else of the first of the replica: for what all ranks of a replica share.
    """

    def __init__(
        self, reader: CheckpointReader, table: Table, topology: Topology, at: Position, layout: list[FlatPart]
    ) -> None:
        self._reader = reader
        self._table = table
        self._tp_size = topology.tp
        self._at = at
        self._layout = layout
        saved = reader.topology
        same = same_sizes(saved, topology) and layout == reader.saved.manifest(at).layout
        self.moved = not same
        self.source = reader.saved.manifest(Position(at.replica, 0, 0, 0) if self.moved else at)
        with self._open(self.source.position) as file:
            self._names = list(file.keys())

    def tensors(self, *prefixes: str) -> dict[str, Tensor]:
        """What the saved rank `source` has under names that begin like this, but for its slow weights."""
        with self._open(self.source.position) as file:
            return {name: file.get_tensor(name) for name in self._names if name.startswith(prefixes)}

    def of_weights(self, *prefixes: str) -> Iterator[tuple[str, Tensor]]:
        """The state of every group, one tensor at a time: vectors are this rank's own, shape [FlatPart.length].

        A group has what the saved group of its first parameter has, by name; from there is also a number for all
        weights of a group, shape [].
        """
        for group in range(len(self._layout)):
            for name, number in self._saved_state(group, prefixes).items():
                yield f"{name}.{group}", self._part(name, group) if number is None else number

    def _saved_state(self, group: int, prefixes: tuple[str, ...]) -> dict[str, Tensor | None]:
        """By name, what the saved group has that held the first parameter of a group here; None for a vector."""
        at, saved_group = self._at, group
        if self.moved:
            place = self._reader.place(self._layout[group].parameters[0][0])
            at, saved_group = Position(at.replica, place.stage, 0, place.tp), place.group
        state = {}
        with self._open(at) as file:
            for full_name in file.keys():  # noqa: SIM118  # it is no dict
                name, _, of_group = full_name.rpartition(".")
                if full_name.startswith(prefixes) and of_group == str(saved_group):
                    is_vector = bool(file.get_slice(full_name).get_shape())
                    # Its own memory, in place of the file's.
                    state[name] = None if is_vector else file.get_tensor(full_name).clone()
        return state

    def has_vector(self, name: str) -> bool:
        return name == catalog.WEIGHTS or f"{name}.0" in self._names

    def vector(self, name: str, replicas: list[int] | None = None) -> Tensor:
        """A vector of all weights of this rank, fp32: of the replica continued, or the mean over some others."""
        lengths = [part.length for part in self._layout]
        vector = torch.zeros(sum(lengths))
        for group, flat in enumerate(vector.split(lengths)):
            self._fill(flat, name, group, replicas or [self._at.replica])
        return vector

    def _part(self, name: str, group: int) -> Tensor:
        """The part of one group of the inner optimizer, shape [FlatPart.length]."""
        flat = torch.zeros(self._layout[group].length)
        self._fill(flat, name, group, [self._at.replica])
        return flat

    def _fill(self, flat: Tensor, name: str, group: int, replicas: list[int]) -> None:
        """Padding stays as it is."""
        at, part = self._at, self._layout[group]
        start, begin = 0, at.dp * part.length
        if not self.moved:
            self._reader.fill(flat, Place(at.stage, at.tp, group, part.length, begin), replicas, name)
            return
        for parameter, shape in part.parameters:
            stop = start + math.prod(shape)
            first, last = max(start, begin), min(stop, begin + part.length)
            if first < last:
                ours = self._slice(self._table.find(parameter), replicas, name).reshape(-1)
                flat[first - begin : last - begin] = ours[first - start : last - start]
            start = stop

    def _slice(self, row: Parameter, replicas: list[int], vector: str) -> Tensor:
        """This rank's slice of a parameter; only the tensor-parallel slices it needs are read."""
        saved = self._reader.table.find(row.name)
        if self._tp_size == self._reader.topology.tp and saved.shape == row.shape:
            return self._reader.read_slice(row.name, self._at.tp, replicas, vector)
        full = self._reader.read(row.name, replicas, vector)
        # Rows beyond the vocabulary: no token reads them, and the loss does not see what they predict.
        rows = full[: row.shape[0]]
        missing = row.shape[0] - len(rows)
        if missing:
            rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
        return row.slice(rows, self._at.tp, self._tp_size)

    def _open(self, at: Position) -> safe_open:
        """A saved rank's file of all that is not slow weights."""
        return safe_open(self._reader.saved.file(at, ""), framework="pt")


def same_sizes(one: Topology, other: Topology) -> bool:
    """Whether replicas have the same ranks; there may be another number of them."""
    return (one.pp, one.dp, one.tp) == (other.pp, other.dp, other.tp)
