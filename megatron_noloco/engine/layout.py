"""Puts parameters into groups of the inner optimizer, and describes where they lie in a rank's flat vectors."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import Parameter, Table, table_of
from megatron_noloco.plans.canonical import Block, Matrix, blocks, in_turn, pieces_between
from megatron_noloco.plans.topology import Position, Topology

if TYPE_CHECKING:
    from torch import nn


EXPERTS = "experts"  # DeepSpeed's name for the ranks that have the same experts


class GroupKey(NamedTuple):
    """The properties by which parameters are grouped. Groups are in descending order of their keys."""

    muon: bool
    decays: bool
    everywhere: bool  # whether all data-parallel ranks have it: False for weights of experts if ep > 1

    @classmethod
    def of(cls, row: Parameter, muon: bool, ep: int = 1) -> "GroupKey":
        """Return the key of a parameter in a run with or without Muon, and with this expert-parallel size."""
        return cls(muon and row.linear, row.decays, ep == 1 or row.expert is None)


def parameter_groups(
    named_rows: Iterable[tuple[Parameter, "nn.Parameter"]], muon: bool, ep: int = 1
) -> list[dict[str, Any]]:
    """Put the parameters of a rank into groups with the same settings, in the form of torch's optimizers.

    The groups have the same order on all ranks, and the parameters of a group that of the model. The first group
    has matrices of layers, so every stage has it; a group without parameters on this rank is omitted.

    Args:
        named_rows: every parameter of this rank with its row of the family's table.
        muon: whether Muon trains the linear maps of the layers, and AdamW all other parameters.
        ep: expert-parallel size.

    Each group has, besides "params":
        muon: whether Muon trains it.
        weight_decay: 0 where it does not; elsewhere missing.
        moe, name: True and EXPERTS in a group of experts that not all data-parallel ranks have; else False and "".
    """
    groups: dict[GroupKey, list[nn.Parameter]] = {}
    for row, parameter in named_rows:
        groups.setdefault(GroupKey.of(row, muon, ep), []).append(parameter)
    return [
        {
            "params": parameters,
            "muon": key.muon,
            "moe": not key.everywhere,
            "name": "" if key.everywhere else EXPERTS,
            **({} if key.decays else {"weight_decay": 0.0}),
        }
        for key, parameters in sorted(groups.items(), reverse=True)
    ]


@dataclass(frozen=True)
class FlatPart:
    """This rank's part of one group of the inner optimizer: ZeRO concatenates, pads, and cuts into equal parts.

    There is a part for each data-parallel rank that has the parameters (`Topology.owners`). The flat weights of a
    rank are its parts of all groups, in the order of the groups; slow weights, momentum and the moments of the
    inner optimizer have the same layout.

    Args:
        length: elements of this rank's part, padding included; the same on all these ranks.
        parameters: name in the unsplit model, and shape on a tensor-parallel rank, in order.
    """

    length: int
    parameters: list[tuple[str, list[int]]]

    def blocks(
        self, table: Table, matrices: Mapping[str, Matrix], topology: Topology, at: Position
    ) -> Iterator[tuple[Parameter, Block]]:
        """Yield what the rank `at` has of each parameter, as blocks whose `own` is their place in this part.

        Args:
            table: of the model.
            matrices: of the parameters that are not copies.
        """
        experts = table.find(self.parameters[0][0]).expert is not None
        begin = topology.owners(at.dp, experts).index(at.dp) * self.length
        laid = in_turn((name, math.prod(shape)) for name, shape in self.parameters)
        for name, first, last, own in pieces_between(laid, begin, begin + self.length):
            row = table.find(name)
            for block in blocks(matrices[row.source], row.rectangles(at.tp, topology.tp), first, last, own):
                yield row, block


def held_of(
    layout: Iterable[FlatPart], architecture: Architecture, topology: Topology, at: Position
) -> tuple[list[Block], list[Block]]:
    """Return what a rank has of the canonical vector, and what of this another rank of its replica has as well.

    The canonical vector has the tensors of the export (`Table.exported`). `own` is the place in the rank's flat
    weights.
    """
    table = table_of(architecture)
    whole, tensors = table.matrices(), table.exported()
    held, copies, before = list[Block](), list[Block](), 0
    for part in layout:
        for row, block in part.blocks(table, whole, topology, at):
            placed = block._replace(own=block.own + before)
            found = list(table.find(row.source).exported(placed, tensors))
            held += found
            if row.is_copy(at.tp):
                copies += found
        before += part.length
    return held, copies
