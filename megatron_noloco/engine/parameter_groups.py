"""The parameter groups of the inner optimizer: what its settings depend on."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from megatron_noloco.model.families import Parameter


class Kind(NamedTuple):
    """What the settings of a parameter depend on; groups are in the order of their kinds, the largest first."""

    muon: bool
    usual_lr: bool
    decays: bool

    @classmethod
    def of(cls, row: Parameter, muon: bool, decoupled: bool) -> "Kind":
        """Of a parameter, in a run with or without Muon and a `decoupled_lr`."""
        return cls(muon and row.linear, not (decoupled and row.is_embedding_or_output), row.decays)


def parameter_groups(
    named_rows: Iterable[tuple[Parameter, nn.Parameter]], muon: bool, decoupled_lr: float | None = None
) -> list[dict[str, Any]]:
    """The parameters of a rank in groups of the same settings, in the form that torch's optimizers take.

    In the same order on all ranks, and inside a group in the order of the model. The first has matrices of layers,
    so every stage has it; a group without parameters on this rank is left out.

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
