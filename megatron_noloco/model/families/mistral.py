"""Mistral: a Llama whose attention may have a sliding window; Mixtral: a Mistral with a mixture of experts."""

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import hf_keys
from megatron_noloco.model.families.llama import OURS, THEIRS, Family, gated_mlp
from megatron_noloco.model.families.table import Parameter

_MIXTURE = THEIRS + "block_sparse_moe."


class Mistral(Family):
    """Mistral (Jiang et al. 2023, arXiv 2310.06825): a Llama whose attention may have a sliding window."""

    name = "mistral"
    own_fields: ClassVar = {"sliding_window": None}
    hf_class = "MistralForCausalLM"
    hf_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }

    def core_config(self, architecture: Architecture) -> dict[str, Any]:
        options, window = super().core_config(architecture), architecture.sliding_window
        # Core counts the tokens before and after a token; Hugging Face counts the token itself as well.
        return options if window is None else options | {"window_size": (window - 1, 0)}

    def own_keys(self, architecture: Architecture) -> dict[str, Any]:
        return {"sliding_window": architecture.sliding_window}

    def own_values(self, theirs: hf_keys.Keys) -> dict[str, Any]:
        window = None if theirs.get("sliding_window") is None else hf_keys.size(theirs, "sliding_window")
        hf_keys.refuse_layer_types(theirs, "full_attention" if window is None else "sliding_attention")
        return super().own_values(theirs) | {"sliding_window": window}


class Mixtral(Mistral):
    """Mixtral (Jiang et al. 2024, arXiv 2401.04088): a Mistral with a mixture of experts in place of each MLP.

    Every tensor-parallel rank has its slice of every expert: there is no expert parallelism.
    """

    name = "mixtral"
    own_fields: ClassVar = {
        **Mistral.own_fields,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
    }
    hf_class = "MixtralForCausalLM"
    hf_defaults: ClassVar = {
        **Mistral.hf_defaults,
        "sliding_window": None,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }

    def mlp_rows(self, architecture: Architecture) -> Sequence[Parameter]:
        norm, *_ = super().mlp_rows(architecture)
        experts = architecture.num_moe_experts
        assert experts is not None
        router = Parameter(
            OURS + "mlp.router.weight", (experts, architecture.hidden_size), hf=(_MIXTURE + "gate.weight",)
        )
        rows = [norm, router]
        for expert in range(experts):
            names = [f"{_MIXTURE}experts.{expert}.{part}.weight" for part in ("w1", "w3", "w2")]
            rows += gated_mlp(architecture, f"{OURS}mlp.experts.local_experts.{expert}.", names)
        return rows

    def core_config(self, architecture: Architecture) -> dict[str, Any]:
        return super().core_config(architecture) | {
            "num_moe_experts": architecture.num_moe_experts,
            "moe_router_topk": architecture.moe_router_topk,
            "moe_ffn_hidden_size": architecture.ffn_hidden_size,
        }

    def own_keys(self, architecture: Architecture) -> dict[str, Any]:
        return super().own_keys(architecture) | {
            "num_local_experts": architecture.num_moe_experts,
            "num_experts_per_tok": architecture.moe_router_topk,
        }

    def own_values(self, theirs: hf_keys.Keys) -> dict[str, Any]:
        hf_keys.refuse_flags(theirs, ("router_jitter_noise",), "noise on the router's input is not supported")
        experts, chosen = (hf_keys.size(theirs, key) for key in ("num_local_experts", "num_experts_per_tok"))
        if chosen < 2:
            raise ValueError(f"num_experts_per_tok is {chosen}; it must be at least 2")
        return super().own_values(theirs) | {"num_moe_experts": experts, "moe_router_topk": chosen}
