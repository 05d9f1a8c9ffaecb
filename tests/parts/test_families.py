"""Tables of model families: what follows from the rows, and that a new family is one file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from megatron_noloco.model.architecture import Architecture, Compute
from megatron_noloco.model.families import (
    FAMILIES,
    Family,
    Parameter,
    Table,
    families_with,
    table_of,
)
from megatron_noloco.model.families.llama import Llama
from megatron_noloco.model.parameters import initial_weights
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import build_groups
from megatron_noloco.plans.topology import Topology
from tests.kit.architectures import SMALL
from tests.kit.ranks import run_ranks

QKV = "decoder.layers.{layer}.self_attention.linear_qkv."


# The file of a new family: Llama with biases on queries, keys and values, and another name for a norm


class Toy(Llama):
    name = "toy"

    def rows(self, architecture: Architecture) -> Sequence[Parameter]:
        rows = []
        for row in super().rows(architecture):
            if row.name.endswith("pre_mlp_layernorm.weight"):
                row = replace(row, hf=("model.layers.{layer}.norm_before_mlp.scale",))
            rows.append(row)
            if row.name == QKV + "weight":
                names = tuple(name.replace("weight", "bias") for name in row.hf)
                rows.append(replace(row, name=QKV + "bias", shape=row.shape[:1], init="zeros", hf=names))
        return rows

    def core_config(self, architecture: Architecture) -> dict[str, Any]:
        return super().core_config(architecture) | {"add_qkv_bias": True}


TOY = replace(SMALL, family="toy")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setitem(FAMILIES, "toy", Toy())
    return FAMILIES["toy"]


def test_one_file_is_enough_to_convert(toy: Family) -> None:
    config = LlamaConfig(**toy.hf_config(TOY, "float32"))
    assert toy.architecture(config) == replace(TOY, padded_vocab_size=30)
    assert table_of(TOY).parameter_count == table_of(SMALL).parameter_count + 2 * 48
    bias = table_of(TOY).find("decoder.layers.1.self_attention.linear_qkv.bias")
    full = torch.arange(48.0)
    theirs = bias.to_hf(full)
    assert {name: tensor.shape for name, tensor in theirs.items()} == {
        "model.layers.1.self_attn.q_proj.bias": (24,),
        "model.layers.1.self_attn.k_proj.bias": (12,),
        "model.layers.1.self_attn.v_proj.bias": (12,),
    }
    assert theirs["model.layers.1.self_attn.k_proj.bias"].tolist() == [*range(12, 18), *range(36, 42)]
    assert torch.equal(bias.from_hf(theirs.__getitem__), full)
    norm = table_of(TOY).find("decoder.layers.1.mlp.linear_fc1.layer_norm_weight")
    assert list(norm.to_hf(torch.ones(16))) == ["model.layers.1.norm_before_mlp.scale"]


def build_toy(rank: int, world_size: int, architecture: Architecture, fill: bool) -> dict[str, torch.Tensor]:
    from megatron_noloco.model.stage import build_stage

    FAMILIES["toy"] = Toy()
    cpu.prepare()
    groups = build_groups(Topology(tp=world_size), routed=False)
    read = (lambda name: numbered(architecture, name)) if fill else None
    stage = build_stage(architecture, Compute(), groups, 1, read)
    return {row.name: parameter.detach().clone() for row, parameter in stage.named_rows()}


def numbered(architecture: Architecture, name: str) -> torch.Tensor:
    parameter = table_of(architecture).find(name)
    return torch.arange(float(torch.Size(parameter.shape).numel())).view(parameter.shape)


def test_one_file_is_enough_to_build_and_cut_the_model(toy: Family) -> None:
    [whole] = run_ranks(1, build_toy, TOY, False)
    bias = "decoder.layers.1.self_attention.linear_qkv.bias"
    assert whole[bias].eq(0).all()
    assert whole["decoder.layers.1.pre_mlp_layernorm.weight"].eq(1).all()
    assert whole["decoder.layers.1.mlp.linear_fc1.weight"].std() == pytest.approx(0.02, rel=0.2)
    assert {row.name for row in table_of(TOY)} == whole.keys()
    ranks = run_ranks(2, build_toy, TOY, True)
    for row in table_of(TOY):
        assert torch.equal(row.merge([rank[row.name] for rank in ranks]), numbered(TOY, row.name)), row.name
    assert ranks[1][bias].tolist() == list(range(24, 48)), "the second key/value group, whole"


# The table and the model must be of one another


class Forgetful(Toy):
    """Has no row for a parameter of the model."""

    def rows(self, architecture: Architecture) -> Sequence[Parameter]:
        return [row for row in super().rows(architecture) if not row.name.endswith("bias")]


class Boastful(Toy):
    """Has a row for a parameter that the model lacks."""

    def core_config(self, architecture: Architecture) -> dict[str, Any]:
        return Llama().core_config(architecture)


class Headless(Toy):
    """Like Boastful, outside the layers."""

    def rows(self, architecture: Architecture) -> Sequence[Parameter]:
        return [*super().rows(architecture), Parameter("head_norm.weight", (16,), init="ones")]


def refusal(rank: int, world_size: int, family: Family) -> str:
    from megatron_noloco.model.stage import build_stage

    FAMILIES["toy"] = family
    cpu.prepare()
    groups = build_groups(Topology(pp=world_size), routed=False)
    with pytest.raises(ValueError) as caught:
        build_stage(TOY, Compute(), groups, 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "ranks", "line"),
    [
        (Forgetful(), 2, "has a parameter decoder.layers.0.self_attention.linear_qkv.bias, but the table"),
        (Boastful(), 2, "has a row decoder.layers.{rank}.self_attention.linear_qkv.bias, but no parameter"),
        (Headless(), 1, "has a row head_norm.weight, but no parameter"),
    ],
    ids=["no row", "no parameter in a layer", "no parameter outside layers"],
)
def test_a_table_of_another_model_is_refused_when_it_is_built(family: Family, ranks: int, line: str) -> None:
    for rank, found in enumerate(run_ranks(ranks, refusal, family)):
        assert line.format(rank=rank) in found
        assert "\n" not in found


# The tables of the families


def of_family(name: str) -> Architecture:
    experts = {"num_moe_experts": 3, "moe_router_topk": 2} if name in families_with("num_moe_experts") else {}
    return replace(SMALL, family=name, **experts)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_merge_to_what_was_cut(family: str, tp_size: int, tied: bool) -> None:
    architecture = replace(of_family(family), num_query_groups=4, tied_embeddings=tied)
    for row in table_of(architecture):
        full = torch.randn(row.shape)
        slices = [row.slice(full, tp, tp_size) for tp in range(tp_size)]
        assert {tuple(part.shape) for part in slices} == {row.slice_shape(tp_size)}
        assert torch.equal(row.merge(slices), full), row.name


def test_a_slice_of_the_gated_mlp_has_its_part_of_both_halves() -> None:
    row = table_of(SMALL).find("decoder.layers.0.mlp.linear_fc1.weight")
    full = torch.arange(48.0).view(-1, 1).expand(48, 16)  # gate 0-23, up 24-47
    assert row.slice(full, 1, 2)[:, 0].tolist() == [*range(12, 24), *range(36, 48)]


@pytest.mark.parametrize("family", FAMILIES)
def test_muon_gets_the_same_maps_in_every_family(family: str) -> None:
    """Of a layer q, k and v of four queries' heads in two groups of 6 channels, the projection, and gate (if there
    is one), up and down of each MLP: neither biases, nor norms, nor a router."""
    linear = [row for row in table_of(of_family(family)) if row.linear]
    shapes = [tuple(part.shape) for row in linear for part in row.split(torch.empty(row.shape))]
    experts = 3 if family in families_with("num_moe_experts") else 1
    attention = [(24, 16), (12, 16), (12, 16), (16, 24)]
    mlp = [*[(24, 16)] * (1 + FAMILIES[family].gated), (16, 24)]
    assert shapes == [*attention, *mlp * experts] * SMALL.num_layers
    rows = table_of(of_family(family))
    others = {row.name.split(".")[-2] for row in rows if not row.linear and not row.name.endswith(".bias")}
    assert others - {"q_layernorm", "k_layernorm", "router"} == {
        "word_embeddings", "output_layer", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_each_rank_has_whole_is_a_vector_or_a_router(family: str) -> None:
    whole = [row for row in table_of(of_family(family)) if row.tp_dim is None]
    assert {row.name.split(".")[-2] for row in whole if len(row.shape) > 1} <= {"router"}
    assert {row.name.split(".")[-2] for row in whole if row.per_head} == (
        {"q_layernorm", "k_layernorm"} if "qwen3" in family else set()
    )


def test_parts_join_to_what_was_split() -> None:
    for row in table_of(SMALL):
        full = torch.randn(row.shape)
        assert torch.equal(row.join(row.split(full)), full), row.name
    row = table_of(SMALL).find("decoder.layers.0.self_attention.linear_qkv.weight")
    numbers = torch.arange(48.0).view(-1, 1).expand(48, 16)
    assert row.split(numbers)[1][:, 0].tolist() == [*range(12, 18), *range(36, 42)], "the keys of both groups"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_all_of_the_initial_weights(family: str) -> None:
    """The padding of the vocabulary begins at zero, and has no gradient: it is the same in all replicas."""
    read = initial_weights(of_family(family), 1)
    for row in table_of(of_family(family)):
        full = read(row.name)
        assert torch.equal(row.from_hf(row.to_hf(full).__getitem__), full), row.name
    assert (read("output_layer.weight") != 0).all(dim=1).tolist() == [True] * 30 + [False] * 2


def test_a_chunk_finds_its_rows_by_its_own_numbers() -> None:
    table = Table(tuple(Llama().rows(SMALL)), 2)
    down = table.find("decoder.layers.0.mlp.linear_fc2.weight", 1)
    assert down.name == "decoder.layers.1.mlp.linear_fc2.weight"
    fused = table.find("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight")
    assert fused.name == "decoder.layers.1.input_layernorm.weight"
    assert fused.hf == ("model.layers.1.input_layernorm.weight",)


def test_a_tied_output_layer_is_a_copy_that_counts_once() -> None:
    tied = replace(SMALL, tied_embeddings=True)
    output = table_of(tied).find("output_layer.weight")
    assert (output.source, output.hf) == ("embedding.word_embeddings.weight", ())
    assert table_of(SMALL).parameter_count - table_of(tied).parameter_count == 32 * 16
