"""Llama (Touvron et al. 2023, arXiv 2302.13971): RMSNorm, rotary embeddings, SwiGLU, grouped queries, no biases.

Megatron-core and Hugging Face rotate the same pairs of channels (i and i + head / 2), so rotary embeddings need no
permutation of the rows of queries and keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_noloco.model.families.family import Family, MegatronOptions, Parameter, Rows
from megatron_noloco.spec.architecture import Architecture

_OURS, _THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."


class Llama(Family):
    name = "llama"

    def rows(self, architecture: Architecture) -> Sequence[Parameter]:
        a = architecture
        hidden, ffn, head = a.hidden_size, a.ffn_hidden_size, a.kv_channels
        heads_per_group = a.num_attention_heads // a.num_query_groups
        # Rows beyond the vocabulary exist here alone, so that the embedding divides into tensor-parallel slices.
        vocabulary = Rows((a.vocab_size, a.padded_vocab_size - a.vocab_size))
        # For each key/value group its queries, its key, its value: a slice of whole groups is then contiguous.
        # Ours is [groups * (heads_per_group + 2) * head, hidden], q [heads * head, hidden], k and v
        # [groups * head, hidden].
        qkv = Rows((heads_per_group * head, head, head), repeats=a.num_query_groups)
        # The gate on top of up: [2 * ffn, hidden] <-> twice [ffn, hidden]. A slice has its part of both.
        gate_and_up = Rows((ffn, ffn), cut_each=True)
        embedding = Parameter(
            "embedding.word_embeddings.weight",
            (a.padded_vocab_size, hidden),
            tp_dim=0,
            hf=("model.embed_tokens.weight",),
            rows=vocabulary,
        )
        output = Parameter(
            "output_layer.weight",
            (a.padded_vocab_size, hidden),
            tp_dim=0,
            hf=() if a.tied_embeddings else ("lm_head.weight",),
            rows=vocabulary,
            same_as=embedding.name if a.tied_embeddings else None,
        )
        return (
            embedding,
            Parameter(
                _OURS + "input_layernorm.weight",
                (hidden,),
                init="ones",
                hf=(_THEIRS + "input_layernorm.weight",),
                fused_name=_OURS + "self_attention.linear_qkv.layer_norm_weight",
            ),
            Parameter(
                _OURS + "self_attention.linear_qkv.weight",
                (a.num_query_groups * sum(qkv.sizes), hidden),
                tp_dim=0,
                hf=tuple(_THEIRS + f"self_attn.{part}_proj.weight" for part in "qkv"),
                rows=qkv,
                linear=True,
            ),
            Parameter(
                _OURS + "self_attention.linear_proj.weight",
                (hidden, a.num_attention_heads * head),
                init="residual",
                tp_dim=1,
                hf=(_THEIRS + "self_attn.o_proj.weight",),
                linear=True,
            ),
            Parameter(
                _OURS + "pre_mlp_layernorm.weight",
                (hidden,),
                init="ones",
                hf=(_THEIRS + "post_attention_layernorm.weight",),
                fused_name=_OURS + "mlp.linear_fc1.layer_norm_weight",
            ),
            Parameter(
                _OURS + "mlp.linear_fc1.weight",
                (2 * ffn, hidden),
                tp_dim=0,
                hf=(_THEIRS + "mlp.gate_proj.weight", _THEIRS + "mlp.up_proj.weight"),
                rows=gate_and_up,
                linear=True,
            ),
            Parameter(
                _OURS + "mlp.linear_fc2.weight",
                (hidden, ffn),
                init="residual",
                tp_dim=1,
                hf=(_THEIRS + "mlp.down_proj.weight",),
                linear=True,
            ),
            Parameter("decoder.final_layernorm.weight", (hidden,), init="ones", hf=("model.norm.weight",)),
            output,
        )

    def megatron_options(self, architecture: Architecture) -> MegatronOptions:
        import torch.nn.functional as F

        return MegatronOptions(
            config={
                "normalization": "RMSNorm",
                "gated_linear_unit": True,
                "activation_func": F.silu,
                "add_bias_linear": False,
            },
            model={"position_embedding_type": "rope", "rotary_base": architecture.rotary_base},
        )

    def hf_config(
        self, architecture: Architecture, dtype: str, end_of_document: int | None
    ) -> dict[str, Any]:
        a = architecture
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": a.hidden_size,
            "intermediate_size": a.ffn_hidden_size,
            "num_hidden_layers": a.num_layers,
            "num_attention_heads": a.num_attention_heads,
            "num_key_value_heads": a.num_query_groups,
            "head_dim": a.kv_channels,
            "hidden_act": "silu",
            "rms_norm_eps": a.norm_epsilon,
            "rope_theta": a.rotary_base,  # before transformers 5; the next line since
            "rope_parameters": {"rope_type": "default", "rope_theta": a.rotary_base},
            "max_position_embeddings": a.seq_length,
            "vocab_size": a.vocab_size,
            "tie_word_embeddings": a.tied_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "initializer_range": a.init_method_std,
            "bos_token_id": end_of_document,
            "eos_token_id": end_of_document,
            "dtype": dtype,
            "torch_dtype": dtype,  # the name before transformers 4.56
        }

    def architecture(self, hf_config: Mapping[str, Any]) -> Architecture:
        theirs = hf_config
        for key in ("attention_bias", "mlp_bias"):
            if theirs.get(key):
                raise ValueError(f"{key} is true; models with biases are not supported")
        if theirs.get("hidden_act", "silu") != "silu":
            raise ValueError(f'hidden_act is {theirs["hidden_act"]!r}; only "silu" is supported')
        heads, hidden = size(theirs, "num_attention_heads"), size(theirs, "hidden_size")
        return Architecture(
            family=self.name,
            num_layers=size(theirs, "num_hidden_layers"),
            hidden_size=hidden,
            ffn_hidden_size=size(theirs, "intermediate_size"),
            num_attention_heads=heads,
            num_query_groups=size(theirs, "num_key_value_heads", heads),
            kv_channels=size(theirs, "head_dim", hidden // heads),
            seq_length=size(theirs, "max_position_embeddings", 2048),
            vocab_size=size(theirs, "vocab_size"),
            padded_vocab_size=size(theirs, "vocab_size"),
            rotary_base=rotary_base(theirs),
            norm_epsilon=theirs.get("rms_norm_eps", 1e-6),
            tied_embeddings=bool(theirs.get("tie_word_embeddings", False)),
            init_method_std=theirs.get("initializer_range", 0.02),
        )


def size(theirs: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive whole number of a Hugging Face config; null counts as absent. Raises ValueError."""
    value = theirs.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{key} is missing")
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}; it must be a whole number >= 1")
    return value


def rotary_base(theirs: Mapping[str, Any]) -> float:
    """The base of plain rotary embeddings; raises ValueError for scaled ones."""
    rope = theirs.get("rope_parameters") or {}
    for scaling in (rope, theirs.get("rope_scaling") or {}):
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            raise ValueError(f"rope_scaling is {scaling}; scaled rotary embeddings are not supported")
    return float(rope.get("rope_theta") or theirs.get("rope_theta") or 10000.0)
