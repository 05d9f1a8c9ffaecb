"""In which group of the inner optimizer a parameter is, and where it lies in the flat vectors of a rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_noloco.model.families import Parameter

if TYPE_CHECKING:
    from torch import nn


class Kind(NamedTuple):
    """What the settings of a parameter depend on; groups are in the order of their kinds, the largest first."""

    muon: bool
    usual_lr: bool
    decays: bool

    @classmethod
    def of(cls, row: Parameter, muon: bool, decoupled: bool) -> "Kind":
        """Return the kind of a parameter in a run with or without Muon and a `decoupled_lr`."""
        return cls(muon and row.linear, not (decoupled and row.is_embedding_or_output), row.decays)


def parameter_groups(
    named_rows: Iterable[tuple[Parameter, "nn.Parameter"]], muon: bool, decoupled_lr: float | None = None
) -> list[dict[str, Any]]:
    """Put the parameters of a rank into groups of the same settings, in the form that torch's optimizers take.

    The groups have the same order on all ranks, and the parameters of a group the order of the model. The first
    group has matrices of layers, so every stage has it; a group without parameters on this rank is left out.

    Args:
        named_rows: every parameter of this rank with its row of the family's table.
        muon: whether the linear maps of the layers have Muon and all others AdamW.
        decoupled_lr: learning rate of embedding and output layer; None: that of the optimizer.

    Each group has, besides "params":
        muon: whether it has Muon.
        lr: `decoupled_lr`, where it applies; otherwise the optimizer's own applies.
        decays: whether weight decay applies to its parameters.
        weight_decay: 0, where it does not; otherwise the optimizer's own applies.
    """
    groups: dict[Kind, list[nn.Parameter]] = {}
    for row, parameter in named_rows:
        groups.setdefault(Kind.of(row, muon, decoupled_lr is not None), []).append(parameter)
    return [
        {
            "params": parameters,
            "muon": kind.muon,
            "decays": kind.decays,
            **({} if kind.usual_lr else {"lr": decoupled_lr}),
            **({} if kind.decays else {"weight_decay": 0.0}),
        }
        for kind, parameters in sorted(groups.items(), reverse=True)
    ]


@dataclass(frozen=True)
class FlatPart:
    """The parameters of one group of the inner optimizer, as ZeRO flattens them.

    They lie one after the other, padded at the end, and the whole is cut into equal parts, one for each
    data-parallel rank. The flat weights of a rank are its parts of all groups, in the order of the groups; slow
    weights, momentum and the moments of the inner optimizer lie alike.

    Args:
        length: elements of this rank's part, padding included; the same on all data-parallel ranks.
        parameters: name in the unsplit model and shape on a tensor-parallel rank, in order.
    """

    length: int
    parameters: list[tuple[str, list[int]]]
