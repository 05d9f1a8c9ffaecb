"""Put the state of one rank back: as it saved it, or collected from ranks of another layout."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_noloco.checkpoint.catalog import OUTER_VECTORS, WEIGHTS, Manifest
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.reader import CheckpointReader, Place
from megatron_noloco.checkpoint.resume import same_sizes, source_replica
from megatron_noloco.checkpoint.settings import CheckpointSettings
from megatron_noloco.engine.layout import FlatPart
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.engine.state import PREFIXES
from megatron_noloco.model.dropout import seed_dropout, set_random_state
from megatron_noloco.model.families import Parameter, Table, table_of
from megatron_noloco.outer import Rounds
from megatron_noloco.plans.topology import Position, Topology

FOLDED = (WEIGHTS, "outer_momentum")  # with fewer replicas, the mean of these over all replicas can be kept


def restore(
    folder: Path,
    manifests: list[Manifest],
    engine: ReplicaEngine,
    outer: Rounds,
    settings: CheckpointSettings,
) -> None:
    """Continue from the checkpoint in `folder`, which was verified; all ranks of a replica call it.

    Args:
        manifests: of all saved ranks, in rank order.
    """
    groups, saved = engine.groups, manifests[0].topology
    place = groups.position
    at = replace(place, replica=source_replica(place.replica, saved))
    reader = RankReader(
        CheckpointReader(Ensemble.of(folder, manifests)),
        table_of(engine.stage.architecture),
        groups.topology,
        at,
        engine.parameter_layout(),
    )
    engine.restore(reader.of_weights(*PREFIXES), reader.source.engine)
    state = {name: reader.vector(name) for name in OUTER_VECTORS if reader.has_vector(name)}
    state |= reader.tensors("delayed_")
    if settings.fold and groups.topology.ensemble < saved.replicas:
        for name in filter(reader.has_vector, FOLDED):
            shift = shift_of_mean(reader, name, saved.replicas, groups.topology.ensemble)
            state[name] += shift
            if name == WEIGHTS:
                engine.weights.add(shift)
    outer.restore(state, moved=reader.moved)
    if reader.moved or at != place:  # no saved rank drew random numbers here
        seed_dropout(settings.seed, groups, manifests[0].step)
    else:
        set_random_state(reader.tensors("rng."))


class RankReader:
    """Reads the state that one rank continues from: the same numbers for the same weights, wherever they were.

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
        source: the manifest of that rank, else of the first rank of the replica, for what all its ranks share.
    """

    def __init__(
        self, reader: CheckpointReader, table: Table, topology: Topology, at: Position, layout: list[FlatPart]
    ) -> None:
        self._reader = reader
        self._table = table
        self._tp_size = topology.tp
        self._at = at
        self._layout = layout
        saved = reader.saved
        self.moved = not same_sizes(saved.topology, topology) or layout != saved.manifest(at).layout
        self.source = saved.manifest(Position(at.replica, 0, 0, 0) if self.moved else at)
        with self._open(self.source.position) as file:
            self._names = list(file.keys())

    def tensors(self, *prefixes: str) -> dict[str, Tensor]:
        """Return the tensors of the saved rank `source` whose names begin like this; slow weights excepted."""
        with self._open(self.source.position) as file:
            return {name: file.get_tensor(name) for name in self._names if name.startswith(prefixes)}

    def of_weights(self, *prefixes: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the state of every group, one tensor at a time; vectors are this rank's, shape [FlatPart.length].

        A group has, by name, what the saved group of its first parameter has. A single number for all weights of a
        group, shape [], is taken from there as well.
        """
        for group, part in enumerate(self._layout):
            for name, number in self._saved_state(group, prefixes).items():
                if number is None:
                    number = torch.zeros(part.length)
                    self._fill(number, name, group, [self._at.replica])
                yield f"{name}.{group}", number

    def _saved_state(self, group: int, prefixes: tuple[str, ...]) -> dict[str, Tensor | None]:
        """Return by name what the saved group of the first parameter of `group` has; None for a vector."""
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
        return name == WEIGHTS or f"{name}.0" in self._names

    def vector(self, name: str, replicas: list[int] | None = None) -> Tensor:
        """Return a vector of all weights of this rank, fp32, of the replica continued or averaged over others."""
        lengths = [part.length for part in self._layout]
        vector = torch.zeros(sum(lengths))
        for group, flat in enumerate(vector.split(lengths)):
            self._fill(flat, name, group, replicas or [self._at.replica])
        return vector

    def _fill(self, flat: Tensor, name: str, group: int, replicas: list[int]) -> None:
        """Fill this rank's part of one group, shape [FlatPart.length]; padding stays as it is."""
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
        """Return this rank's slice of a parameter; only the tensor-parallel slices it needs are read."""
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
        """Open a saved rank's file of everything but slow weights."""
        return safe_open(self._reader.saved.file(at, ""), framework="pt")


def shift_of_mean(reader: RankReader, name: str, saved_replicas: int, replicas: int) -> Tensor:
    """Return what each kept replica must add so that the mean over those kept becomes the mean over all saved.

    The replicas are read one after the other, so that a few vectors of memory suffice for any number of replicas.
    """
    every, kept = (list(range(count)) for count in (saved_replicas, replicas))
    return reader.vector(name, every).sub_(reader.vector(name, kept))
