"""Qwen2, Qwen2.5 and Qwen3: Llamas with biases, or with norms on the heads; Qwen3-MoE has experts as well."""

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_noloco.errors import UserError
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import hf_keys
from megatron_noloco.model.families.family import OURS, THEIRS, Family
from megatron_noloco.model.families.mixture import Mixture
from megatron_noloco.model.families.table import Parameter


class Qwen(Family):
    """What Qwen2 and Qwen3 share: no layer has a sliding window, though a config.json may give its width."""

    def own_keys(self, architecture: Architecture) -> dict[str, Any]:
        return super().own_keys(architecture) | {"use_sliding_window": False}

    def own_values(self, theirs: hf_keys.Keys) -> dict[str, Any]:
        hf_keys.refuse_layer_types(theirs, "full_attention")
        layers, first = hf_keys.size(theirs, "num_hidden_layers"), theirs.get("max_window_layers", 28)
        windows = theirs.get("use_sliding_window") and theirs.get("sliding_window", 4096) is not None
        if windows and not theirs.get("layer_types") and not (type(first) is int and first >= layers):
            raise UserError(
                f"use_sliding_window is true, and max_window_layers {first!r} of {layers} layers; windows on "
                "layers are not supported"
            )
        return super().own_values(theirs)


class Qwen2(Qwen):
    """Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): a Llama with biases on queries, keys and values."""

    name = "qwen2"
    hf_class = "Qwen2ForCausalLM"
    hf_defaults: ClassVar = {"num_key_value_heads": 32, "max_position_embeddings": 32768}

    def attention_rows(self, architecture: Architecture) -> Sequence[Parameter]:
        norm, weight, projection = super().attention_rows(architecture)
        return (norm, weight, weight.bias, projection)

    def core_config(self, architecture: Architecture) -> dict[str, Any]:
        return super().core_config(architecture) | {"add_qkv_bias": True}


class Qwen3(Qwen):
    """Qwen3 (arXiv 2505.09388): a Llama with norms on the heads of queries and keys.

    The width of a head is not hidden_size / num_attention_heads: set `kv_channels`.
    """

    name = "qwen3"
    hf_class = "Qwen3ForCausalLM"
    hf_defaults: ClassVar = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}
    hf_fixed: ClassVar = {"attention_bias": False}

    def attention_rows(self, architecture: Architecture) -> Sequence[Parameter]:
        norms = (
            Parameter(
                OURS + f"self_attention.{part}_layernorm.weight",
                (architecture.kv_channels,),
                init="ones",
                hf=(THEIRS + f"self_attn.{part}_norm.weight",),
                per_head=True,
            )
            for part in "qk"
        )
        return (*super().attention_rows(architecture), *norms)

    def core_config(self, architecture: Architecture) -> dict[str, Any]:
        return super().core_config(architecture) | {"qk_layernorm": True}


class Qwen3Moe(Mixture, Qwen3):
    """Qwen3-MoE (arXiv 2505.09388): a Qwen3 with a mixture of experts in place of each MLP."""

    name = "qwen3_moe"
    own_fields: ClassVar = {**Mixture.own_fields, "num_moe_experts": 128, "moe_router_topk": 8}
    hf_class = "Qwen3MoeForCausalLM"
    hf_defaults: ClassVar = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    }
    # Every layer has experts, and the probabilities of the chosen ones add up to 1.
    hf_fixed: ClassVar = {
        **Qwen3.hf_fixed,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "use_sliding_window": False,  # here transformers does not read `max_window_layers`
    }
    # `intermediate_size` is the width of layers without experts, of which there are none here.
    hf_sizes: ClassVar = {**Qwen3.hf_sizes, "ffn_hidden_size": "moe_intermediate_size"}
    hf_router = THEIRS + "mlp.gate.weight"
    hf_expert = THEIRS + "mlp.experts.{expert}.{part}_proj.weight"
    hf_parts = ("gate", "up", "down")
    hf_counts = ("num_local_experts", "num_experts")  # the first as transformers 5 writes it
