"""Qwen2, Qwen2.5 and Qwen3: Llamas with biases, or with norms on the heads; Qwen3-MoE has experts as well."""

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_noloco.errors import UserError
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.family import OURS, THEIRS, Family
from megatron_noloco.model.families.mixture import Mixture
from megatron_noloco.model.families.table import Parameter


class Qwen(Family):
    """What Qwen2 and Qwen3 share: no layer has a sliding window, though a config.json may give its width."""

    def own_keys(self, architecture: Architecture) -> dict[str, Any]:
        return super().own_keys(architecture) | {"use_sliding_window": False}

    def own_values(self, config: Any) -> dict[str, Any]:
        if {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
            raise UserError(
                "layer_types (or use_sliding_window and max_window_layers) gives some layers a window; each must "
                'be "full_attention"'
            )
        return super().own_values(config)


class Qwen2(Qwen):
    """Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): a Llama with biases on queries, keys and values."""

    name = "qwen2"
    hf_class = "Qwen2ForCausalLM"

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
    # The probabilities of the chosen experts add up to 1, and a window would be on all layers.
    hf_fixed: ClassVar = {"norm_topk_prob": True, "use_sliding_window": False}
    # `intermediate_size` is the width of layers without experts, of which there are none here.
    hf_sizes: ClassVar = {**Qwen3.hf_sizes, "ffn_hidden_size": "moe_intermediate_size"}
    hf_router = THEIRS + "mlp.gate.weight"
    hf_expert = THEIRS + "mlp.experts.{expert}.{part}_proj.weight"
    hf_parts = ("gate", "up", "down")
