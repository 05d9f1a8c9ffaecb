"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): a Mistral with a mixture of experts in place of each MLP.

Every tensor-parallel rank has its slice of every expert: there is no expert parallelism.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import hf_keys
from megatron_noloco.model.families.family import MegatronOptions
from megatron_noloco.model.families.llama_like import OURS, THEIRS, gated_mlp
from megatron_noloco.model.families.mistral import Mistral
from megatron_noloco.model.families.table import Parameter

_MIXTURE = THEIRS + "block_sparse_moe."


class Mixtral(Mistral):
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

    def megatron_options(self, architecture: Architecture) -> MegatronOptions:
        options = super().megatron_options(architecture)
        mixture = {
            "num_moe_experts": architecture.num_moe_experts,
            "moe_router_topk": architecture.moe_router_topk,
            "moe_ffn_hidden_size": architecture.ffn_hidden_size,
        }
        return replace(options, config={**options.config, **mixture})

    def hf_config(
        self, architecture: Architecture, dtype: str, end_of_document: int | None
    ) -> dict[str, Any]:
        keys = super().hf_config(architecture, dtype, end_of_document)
        experts = {
            "num_local_experts": architecture.num_moe_experts,
            "num_experts_per_tok": architecture.moe_router_topk,
        }
        return {**keys, **experts}

    def own_values(self, theirs: hf_keys.Keys) -> dict[str, Any]:
        hf_keys.refuse_flags(theirs, ("router_jitter_noise",), "noise on the router's input is not supported")
        experts, chosen = (hf_keys.size(theirs, key) for key in ("num_local_experts", "num_experts_per_tok"))
        if chosen < 2:
            raise ValueError(f"num_experts_per_tok is {chosen}; it must be at least 2")
        return {**super().own_values(theirs), "num_moe_experts": experts, "moe_router_topk": chosen}
