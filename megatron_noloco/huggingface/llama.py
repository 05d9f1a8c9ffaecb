"""Hugging Face's Llama and ours: one table of names and shapes, read in both directions. No Megatron needed.

| ours (Megatron-core)                            | Hugging Face                                    |
|-------------------------------------------------|-------------------------------------------------|
| embedding.word_embeddings.weight                | model.embed_tokens.weight, without padded rows  |
| decoder.layers.N.input_layernorm.weight         | model.layers.N.input_layernorm.weight           |
| decoder.layers.N.self_attention.linear_qkv      | q_proj, k_proj, v_proj: ours is interleaved per |
|                                                 | key/value group as [queries..., key, value]     |
| decoder.layers.N.self_attention.linear_proj     | o_proj                                          |
| decoder.layers.N.pre_mlp_layernorm.weight       | post_attention_layernorm.weight                 |
| decoder.layers.N.mlp.linear_fc1                 | gate_proj on top of up_proj                     |
| decoder.layers.N.mlp.linear_fc2                 | down_proj                                       |
| decoder.final_layernorm.weight                  | model.norm.weight                               |
| output_layer.weight                             | lm_head.weight, without padded rows             |

Both rotate the halves of a head in the same way, so rotary embeddings need no permutation.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.huggingface.folder import HuggingFaceWeights, read_object

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)$")
_VOCABULARY = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}
_OUTSIDE_LAYERS = _VOCABULARY | {"decoder.final_layernorm.weight": "model.norm.weight"}
_IN_LAYER: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),  # Transformer Engine's name
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),  # Transformer Engine's name
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}


def hf_names(name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that one of ours is made of."""
    if name in _OUTSIDE_LAYERS:
        return (_OUTSIDE_LAYERS[name],)
    match = _LAYER.match(name)
    assert match is not None, f"no Hugging Face counterpart of {name}"
    return tuple(f"model.layers.{match[1]}.{theirs}" for theirs in _IN_LAYER[match[2]])


def to_hf(name: str, ours: Tensor, model: ModelConfig, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """Split one full (unsharded) tensor of ours into Hugging Face's."""
    names = hf_names(name)
    if name in _VOCABULARY:
        parts: tuple[Tensor, ...] = (ours[:vocab_size],)
    elif name.endswith("linear_qkv.weight"):
        queries = model.num_attention_heads // model.query_groups
        grouped = ours.view(model.query_groups, queries + 2, model.head_size, ours.size(1))
        parts = tuple(part.reshape(-1, ours.size(1)) for part in grouped.split([queries, 1, 1], dim=1))
    elif name.endswith("linear_fc1.weight"):
        parts = ours.chunk(2)
    else:
        parts = (ours,)
    return zip(names, parts, strict=True)


def from_hf(name: str, read: Callable[[str], Tensor], model: ModelConfig, padded_vocab_size: int) -> Tensor:
    """Make one full tensor of ours from Hugging Face's; padded rows are zero."""
    parts = [read(theirs) for theirs in hf_names(name)]
    if name in _VOCABULARY:
        padding = padded_vocab_size - parts[0].size(0)
        return torch.nn.functional.pad(parts[0], (0, 0, 0, padding))
    if name.endswith("linear_qkv.weight"):
        hidden = parts[0].size(1)
        grouped = [part.view(model.query_groups, -1, model.head_size, hidden) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, hidden)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def hf_config(model: ModelConfig, vocab_size: int, dtype: str, end_of_document: int | None) -> dict[str, Any]:
    """The `config.json` of a model of ours."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "max_position_embeddings": model.seq_length,
        "vocab_size": vocab_size,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": model.init_method_std,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def model_block(folder: Path) -> dict[str, Any]:
    """The `model` block that a Hugging Face folder's config asks for.

    Raises ValueError, in one line, for anything our Llama is not.
    """
    path = folder / "config.json"
    theirs = read_object(path, "give the folder of a Hugging Face Llama")
    if theirs.get("model_type") != "llama":
        raise ValueError(f'{path}: model_type is {theirs.get("model_type")!r}; only "llama" can be imported')
    for key in ("attention_bias", "mlp_bias"):
        if theirs.get(key):
            raise ValueError(f"{path}: {key} is true; models with biases are not supported")
    if theirs.get("hidden_act", "silu") != "silu":
        raise ValueError(f'{path}: hidden_act is {theirs["hidden_act"]!r}; only "silu" is supported')
    rope = theirs.get("rope_parameters") or {}
    for scaling in (rope, theirs.get("rope_scaling") or {}):
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise ValueError(f"{path}: rope_scaling is {scaling}; scaled rotary embeddings are not supported")
    try:
        return {
            "num_layers": theirs["num_hidden_layers"],
            "hidden_size": theirs["hidden_size"],
            "ffn_hidden_size": theirs["intermediate_size"],
            "num_attention_heads": theirs["num_attention_heads"],
            "num_query_groups": theirs.get("num_key_value_heads") or theirs["num_attention_heads"],
            "kv_channels": theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"],
            "vocab_size": theirs["vocab_size"],
            "rotary_base": float(rope.get("rope_theta") or theirs.get("rope_theta") or 10000.0),
            "norm_epsilon": theirs.get("rms_norm_eps", 1e-6),
            "untie_embeddings_and_output_weights": not theirs.get("tie_word_embeddings", False),
            "seq_length": theirs.get("max_position_embeddings", 2048),
        }
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None


def check_fits(folder: Path, model: ModelConfig) -> None:
    """Raise ValueError, one line per problem, unless the folder holds the weights of this model, all of them.

    Reads the headers of the files only.
    """
    ours = model.model_dump() | {"num_query_groups": model.query_groups, "kv_channels": model.head_size}
    lines = [
        f"training.pretrained: model.{name} is {ours[name]!r}, but {value!r} in {folder / 'config.json'}"
        for name, value in model_block(folder).items()
        if name != "seq_length" and ours[name] != value
    ]
    if lines:
        raise ValueError("\n".join(lines))
    with HuggingFaceWeights(folder) as weights:
        for name, shape in _shapes(model):
            weights.check(name, shape)


def _shapes(model: ModelConfig) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every Hugging Face tensor of a model whose vocabulary is known."""
    assert model.vocab_size is not None
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    queries, keys = (count * model.head_size for count in (model.num_attention_heads, model.query_groups))
    yield "model.embed_tokens.weight", [model.vocab_size, hidden]
    for layer in range(model.num_layers):
        for name, shape in {
            "input_layernorm": [hidden],
            "self_attn.q_proj": [queries, hidden],
            "self_attn.k_proj": [keys, hidden],
            "self_attn.v_proj": [keys, hidden],
            "self_attn.o_proj": [hidden, queries],
            "post_attention_layernorm": [hidden],
            "mlp.gate_proj": [ffn, hidden],
            "mlp.up_proj": [ffn, hidden],
            "mlp.down_proj": [hidden, ffn],
        }.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", [hidden]
    if model.untie_embeddings_and_output_weights:
        yield "lm_head.weight", [model.vocab_size, hidden]
