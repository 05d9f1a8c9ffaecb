"""Puts parameters into groups of the inner optimizer, and describes where they lie in a rank's flat vectors."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_noloco.model.families import Parameter

if TYPE_CHECKING:
    from torch import nn


class GroupKey(NamedTuple):
    """The properties on which a parameter's settings depend. Groups are in descending order of their keys."""

    muon: bool
    usual_lr: bool
    decays: bool

    @classmethod
    def of(cls, row: Parameter, muon: bool, decoupled: bool) -> "GroupKey":
        """Return the key of a parameter in a run with or without Muon and a `decoupled_lr`."""
        return cls(muon and row.linear, not (decoupled and row.is_embedding_or_output), row.decays)


def parameter_groups(
    named_rows: Iterable[tuple[Parameter, "nn.Parameter"]], muon: bool, decoupled_lr: float | None = None
) -> list[dict[str, Any]]:
    """Put the parameters of a rank into groups with the same settings, in the form of torch's optimizers.

    The groups have the same order on all ranks, and the parameters of a group that of the model. The first group
    has matrices of layers, so every stage has it; a group without parameters on this rank is omitted.

    Args:
        named_rows: every parameter of this rank with its row of the family's table.
        muon: whether Muon trains the linear maps of the layers, and AdamW all other parameters.
        decoupled_lr: learning rate of embedding and output layer; None: that of the optimizer.

    Each group has, besides "params":
        muon: whether Muon trains it.
        lr: `decoupled_lr` where this applies; elsewhere missing, so that the optimizer's own applies.
        decays: whether weight decay applies to its parameters.
        weight_decay: 0 where it does not; elsewhere missing.
    """
    groups: dict[GroupKey, list[nn.Parameter]] = {}
    for row, parameter in named_rows:
        groups.setdefault(GroupKey.of(row, muon, decoupled_lr is not None), []).append(parameter)
    return [
        {
            "params": parameters,
            "muon": key.muon,
            "decays": key.decays,
            **({} if key.usual_lr else {"lr": decoupled_lr}),
            **({} if key.decays else {"weight_decay": 0.0}),
        }
        for key, parameters in sorted(groups.items(), reverse=True)
    ]


@dataclass(frozen=True)
class FlatPart:
    """The parameters of one group of the inner optimizer, as ZeRO flattens them.

    ZeRO concatenates them, pads the end, and cuts the vector into equal parts, one per data-parallel rank. The
    flat weights of a rank are its parts of all groups, in the order of the groups; slow weights, momentum and the
    moments of the inner optimizer have the same layout.

    Args:
        length: elements of this rank's part, padding included; the same on all data-parallel ranks.
        parameters: name in the unsplit model, and shape on a tensor-parallel rank, in order.
    """

    length: int
    parameters: list[tuple[str, list[int]]]
