"""Which settings of the inner optimizer a parameter has."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_noloco.engine.layout import parameter_groups
from megatron_noloco.model.families import FAMILIES, Parameter, families_with, table_of
from tests.kit.architectures import SMALL


def rows_of(family: str, layers_only: bool = False) -> list[Parameter]:
    mixture = family in families_with("num_moe_experts")
    experts = {"num_moe_experts": 2, "moe_router_topk": 2} if mixture else {}
    rows = table_of(replace(SMALL, family=family, **experts))
    return [row for row in rows if not layers_only or row.layer is not None]


def names_in_groups(rows: list[Parameter], muon: bool) -> list[tuple[bool, float | None, set[str]]]:
    """Of each group: whether it has Muon, its own weight decay, and the ends of its parameters' names."""
    named = [(row, nn.Parameter(torch.empty(row.shape))) for row in rows]
    names = {parameter: row.name for row, parameter in named}
    groups = parameter_groups(named, muon)
    held = [parameter for group in groups for parameter in group["params"]]
    assert len(held) == len(set(held)) == len(rows), "each in one group"
    return [
        (
            group["muon"],
            group.get("weight_decay"),
            {".".join(names[parameter].split(".")[-2:]) for parameter in group["params"]},
        )
        for group in groups
    ]


NOT_DECAYING = {"input_layernorm.weight", "pre_mlp_layernorm.weight", "final_layernorm.weight"}
LINEAR = {"linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight"}
OF_FAMILY = {
    "qwen2": {"linear_qkv.bias"},
    "qwen3": {"q_layernorm.weight", "k_layernorm.weight"},
    "qwen3_moe": {"q_layernorm.weight", "k_layernorm.weight"},
    "starcoder2": {name.replace("weight", "bias") for name in NOT_DECAYING | LINEAR},
}
OTHERS = {"word_embeddings.weight", "output_layer.weight"}


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_and_biases_do_not_decay(family: str) -> None:
    router = {"router.weight"} if family in families_with("num_moe_experts") else set()
    without = NOT_DECAYING | OF_FAMILY.get(family, set())
    rows = rows_of(family)
    assert names_in_groups(rows, muon=False) == [
        (False, None, LINEAR | OTHERS | router),
        (False, 0.0, without),
    ]
    assert names_in_groups(rows, muon=True) == [
        (True, None, LINEAR),
        (False, None, OTHERS | router),
        (False, 0.0, without),
    ]


def test_middle_stage_lacks_embedding_group() -> None:
    norms = NOT_DECAYING - {"final_layernorm.weight"}
    assert names_in_groups(rows_of("llama", layers_only=True), muon=True) == [
        (True, None, LINEAR),
        (False, 0.0, norms),
    ]
