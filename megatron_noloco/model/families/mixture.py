"""What families with a mixture of experts share: the rows of router and experts, and their settings."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.family import OURS, Family, mlp_matrices
from megatron_noloco.model.families.table import Parameter


class Mixture(Family):
    """A mixture of experts in place of the MLP in every layer; a base class beside that of a dense family.

    `ffn_hidden_size` is the width inside each expert. The probabilities of the chosen experts add up to 1.
    """

    own_fields: ClassVar[Mapping[str, Any]] = {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
    }
    hf_router: ClassVar[str]  # Hugging Face's name of the router's weight
    hf_expert: ClassVar[str]  # and of a matrix of the expert {expert}, which is {part}: one of
    hf_parts: ClassVar[Sequence[str]]  # gate, up and down

    def mlp_rows(self, architecture: Architecture) -> Sequence[Parameter]:
        norm, *_ = super().mlp_rows(architecture)
        experts = architecture.num_moe_experts
        assert experts is not None
        router = Parameter(
            OURS + "mlp.router.weight", (experts, architecture.hidden_size), hf=(self.hf_router,)
        )
        rows = [norm, router]
        for expert in range(experts):
            names = [
                self.hf_expert.replace("{expert}", str(expert)).replace("{part}", p) for p in self.hf_parts
            ]
            rows += mlp_matrices(architecture, f"{OURS}mlp.experts.local_experts.{expert}.", names)
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

    def own_values(self, config: Any) -> dict[str, Any]:
        experts = {"num_moe_experts": config.num_local_experts, "moe_router_topk": config.num_experts_per_tok}
        return super().own_values(config) | experts
