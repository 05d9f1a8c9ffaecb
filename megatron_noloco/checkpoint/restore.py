"""Restore the state of one rank: as it was saved, or collected from ranks of another layout."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_noloco.checkpoint.catalog import WEIGHTS
from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.reader import CheckpointReader, read_into
from megatron_noloco.checkpoint.resume import same_sizes, source_replica
from megatron_noloco.checkpoint.run_settings import CheckpointSettings
from megatron_noloco.engine.layout import FlatPart
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.engine.state import PREFIXES
from megatron_noloco.job.agreement import gather_from_all_ranks
from megatron_noloco.model.dropout import seed_dropout, set_random_state
from megatron_noloco.model.families import Table, table_of
from megatron_noloco.outer import VECTORS, Rounds
from megatron_noloco.outer.vectors import HOST
from megatron_noloco.plans.topology import Position, Topology


def restore(saved: Ensemble, engine: ReplicaEngine, outer: Rounds, settings: CheckpointSettings) -> None:
    """Restore engine, outer optimizer and random states from a verified checkpoint. All ranks call it."""
    groups = engine.groups
    place = groups.position
    at = replace(place, replica=source_replica(place.replica, saved.topology))
    reader = RankReader(
        CheckpointReader(saved),
        table_of(engine.stage.architecture),
        groups.topology,
        at,
        engine.parameter_layout(),
    )
    engine.restore(reader.engine_state(*PREFIXES), reader.source.engine)
    state = {name: reader.vector(name) for name in VECTORS if reader.has_vector(name)}
    state |= reader.tensors("delayed_")
    # Fragments are cut alike in all stages, so all merge at once if one has to.
    outer.restore(state, moved=any(gather_from_all_ranks(reader.moved)))
    if reader.moved or at != place:  # there is no saved random state for this position
        seed_dropout(settings.seed, groups, saved.manifests[0].step)
    else:
        set_random_state(reader.tensors("rng."))


class RankReader:
    """Reads the state of one rank from a checkpoint of any layout.

    Where a saved rank has the same weights in the same layout, its vectors are copied. Otherwise the vectors are
    filled parameter by parameter, with this rank's slice of each.

    Args:
        reader: of the checkpoint.
        table: of this run's model, whose vocabulary may have more or less padding than the saved one.
        topology: of this run.
        at: this rank's position, with the saved replica that it continues as its replica.
        layout: of this rank's flat vectors.

    Attributes:
        moved: whether no saved rank has the same weights in the same layout.
        source: the manifest of that saved rank. If there is none, that of the first rank of the replica, for the
            state that is the same on all its ranks.
    """

    def __init__(
        self, reader: CheckpointReader, table: Table, topology: Topology, at: Position, layout: list[FlatPart]
    ) -> None:
        self._reader = reader
        self._table = table
        self._topology = topology
        self._at = at
        self._layout = layout
        self._matrices = table.matrices()
        saved = reader.saved
        self.moved = not same_sizes(saved.topology, topology) or layout != saved.manifest(at).layout
        self.source = saved.manifest(Position(at.replica, 0, 0, 0) if self.moved else at)
        with self._open(self.source.position) as file:
            self._names = list(file.keys())

    def tensors(self, *prefixes: str) -> dict[str, Tensor]:
        """Return the tensors of `source`, slow weights excepted, whose names begin with one of the prefixes."""
        with self._open(self.source.position) as file:
            return {name: file.get_tensor(name) for name in self._names if name.startswith(prefixes)}

    def engine_state(self, *prefixes: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer state of each group in this run's layout: name and tensor.

        A group has the same tensors as the saved group of its first parameter: vectors of shape [FlatPart.length],
        filled for this layout, and single numbers of shape [], taken from that group.
        """
        for group, part in enumerate(self._layout):
            for name, tensor in self._saved_state(group, prefixes).items():
                if tensor is None:
                    tensor = torch.zeros(part.length, dtype=torch.float32, device=HOST)
                    self._fill(tensor, name, group)
                yield f"{name}.{group}", tensor

    def _saved_state(self, group: int, prefixes: tuple[str, ...]) -> dict[str, Tensor | None]:
        """Return names and single numbers of the saved group of `group`'s first parameter; None for vectors."""
        at, saved_group = self._at, group
        if self.moved:
            first = self._reader.first_share(self._layout[group].parameters[0][0], at.replica)
            at, saved_group = replace(first.at, replica=at.replica), first.group
        state = {}
        with self._open(at) as file:
            for full_name in file.keys():  # noqa: SIM118  # not a dict
                name, _, of_group = full_name.rpartition(".")
                if full_name.startswith(prefixes) and of_group == str(saved_group):
                    is_vector = bool(file.get_slice(full_name).get_shape())
                    # Cloned, since its memory is the mapped file's.
                    state[name] = None if is_vector else file.get_tensor(full_name).clone()
        return state

    def has_vector(self, name: str) -> bool:
        return name == WEIGHTS or f"{name}.0" in self._names

    def vector(self, name: str) -> Tensor:
        """Return a vector of this rank, fp32, of the replica that it continues."""
        lengths = [part.length for part in self._layout]
        vector = torch.zeros(sum(lengths), dtype=torch.float32, device=HOST)
        for group, flat in enumerate(vector.split(lengths)):
            self._fill(flat, name, group)
        return vector

    def _fill(self, flat: Tensor, name: str, group: int) -> None:
        """Fill this rank's part of one group of a vector, shape [FlatPart.length]; padding is not written."""
        if not self.moved:
            saved_name = f"{name}.{group}"
            read_into(flat, self._reader.saved.file(self._at, saved_name), saved_name, 0)
            return
        # Padding of the vocabulary is cut or added: no token reads these rows, and the loss leaves them out.
        part = self._layout[group]
        for row, block in part.blocks(self._table, self._matrices, self._topology, self._at):
            rectangle = self._reader.read_rectangle(row.name, block.place, [self._at.replica], name)
            flat[block.own : block.own + block.size] = rectangle.view(-1)

    def _open(self, at: Position) -> safe_open:
        """Open the file of a saved rank that has all tensors but the slow weights."""
        return safe_open(self._reader.saved.file(at, ""), framework="pt")
