"""Models of every family with random weights, as Hugging Face folders."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import FAMILIES, table_of

HEADS, HEAD_SIZE, HIDDEN, FFN, LAYERS, VOCABULARY = 4, 6, 20, 24, 2, 259
YARN = {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 16}
# Of each family, with its own fields
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama 3.1": {"family": "llama", "rope_scaling_factor": 32.0, "rotary_base": 5e5},
    "llama with YaRN": {"family": "llama", **YARN},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "qwen3 with YaRN": {"family": "qwen3", **YARN},
    "mistral": {"family": "mistral"},
    "mistral with a window": {"family": "mistral", "sliding_window": 9},
    "mixtral": {"family": "mixtral", "num_moe_experts": 3, "moe_router_topk": 2, "sliding_window": 9},
    "qwen3_moe": {"family": "qwen3_moe", "num_moe_experts": 5, "moe_router_topk": 3},
    "starcoder2": {"family": "starcoder2"},
    "starcoder2 with a window": {"family": "starcoder2", "sliding_window": 9},
}


def make_model(
    groups: int = 2, tied: bool = False, multiple: int = 128, model: str = "llama"
) -> Architecture:
    """Sizes that are all different, so that no two can be mistaken for one another."""
    common = Architecture(
        family="llama",
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        kv_channels=HEAD_SIZE,
        seq_length=32,
        vocab_size=VOCABULARY,
        padded_vocab_size=-(-VOCABULARY // multiple) * multiple,
        rotary_base=10000.0,
        norm_epsilon=1e-5,
        tied_embeddings=tied,
        init_method_std=0.02,
    )
    return replace(common, **MODELS[model])


def random_weights(model: Architecture) -> dict[str, Tensor]:
    """Ours; rows that pad the vocabulary are zero, as an import makes them."""
    generator = torch.Generator().manual_seed(0)
    rows = [row for row in table_of(model) if row.hf_shapes]  # without the copy of a tied output layer
    weights = {row.name: torch.randn(row.shape, generator=generator) for row in rows}
    for tensor in weights.values():
        if tensor.size(0) == model.padded_vocab_size:
            tensor[VOCABULARY:] = 0
    return weights


def exported(weights: dict[str, Tensor], model: Architecture) -> dict[str, Tensor]:
    table = table_of(model)
    pairs = (table.find(name).to_hf(tensor).items() for name, tensor in weights.items())
    return {name: tensor.contiguous() for pair in pairs for name, tensor in pair}


def hf_config(model: Architecture) -> dict[str, Any]:
    return FAMILIES[model.family].hf_config(model, "bfloat16")


def change_weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Return what changes the weights of a folder, which lie in one file."""

    def changed(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        whole = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
        save_file(whole, folder / "model.safetensors", {"format": "pt"})

    return changed


def write_folder(folder: Path, model: Architecture, weights: dict[str, Tensor] | None = None) -> Path:
    """A Hugging Face folder in one file, without a tokenizer; if no weights are given, all are 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(model)))
    if weights is None:
        weights = {
            name: torch.ones(shape) for row in table_of(model) for name, shape in row.hf_shapes.items()
        }
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder
