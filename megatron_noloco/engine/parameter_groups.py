"""The parameter groups of the inner optimizer: what its settings depend on."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from megatron_noloco.model.families import Parameter


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
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for row, parameter in named_rows:
        decoupled = decoupled_lr is not None and row.is_embedding_or_output
        groups.setdefault((muon and row.linear, not decoupled, row.decays), []).append(parameter)
    return [
        {
            "params": parameters,
            "muon": has_muon,
            "decays": decays,
            **({} if usual_lr else {"lr": decoupled_lr}),
            **({} if decays else {"weight_decay": 0.0}),
        }
        for (has_muon, usual_lr, decays), parameters in sorted(groups.items(), reverse=True)
    ]
