"""What families with a mixture of experts share: the rows of router and experts, and their settings."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron_noloco.errors import UserError
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import hf_keys
from megatron_noloco.model.families.family import OURS, Family, mlp_matrices
from megatron_noloco.model.families.table import Index, Parameter, Stored


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
    hf_counts: ClassVar[Sequence[str]]  # Hugging Face's keys for the number of experts; one is enough

    def mlp_rows(self, architecture: Architecture) -> Sequence[Parameter]:
        norm, *_ = super().mlp_rows(architecture)
        experts = architecture.num_moe_experts
        assert experts is not None
        router = Parameter(
            OURS + "mlp.router.weight", (experts, architecture.hidden_size), hf=(self.hf_router,)
        )
        rows = [norm, router]
        for expert in range(experts):
            names = self._hf_names(expert)
            rows += mlp_matrices(architecture, f"{OURS}mlp.experts.local_experts.{expert}.", names)
        return rows

    def _hf_names(self, expert: int) -> list[str]:
        """Return Hugging Face's names of an expert's gate, up and down."""
        return [self.hf_expert.replace("{expert}", str(expert)).replace("{part}", p) for p in self.hf_parts]

    def hf_stacks(self, architecture: Architecture) -> dict[str, Stored]:
        """Return the two tensors that hold all experts of a layer, as transformers 5 computes with them.

        Gate and up are [experts, 2 * ffn, hidden], down is [experts, hidden, ffn]. `save_pretrained` writes them
        with `save_original_format=False`.
        """
        hidden, ffn, experts = (
            architecture.hidden_size,
            architecture.ffn_hidden_size,
            architecture.num_moe_experts,
        )
        assert experts is not None
        gate_up: dict[str, Index] = {}
        down: dict[str, Index] = {}
        for expert in range(experts):
            gate_name, up_name, down_name = self._hf_names(expert)
            gate_up |= {gate_name: (expert, slice(0, ffn)), up_name: (expert, slice(ffn, 2 * ffn))}
            down[down_name] = (expert,)
        prefix = self.hf_expert.partition("{expert}")[0]
        return {
            prefix + "gate_up_proj": Stored((experts, 2 * ffn, hidden), gate_up),
            prefix + "down_proj": Stored((experts, hidden, ffn), down),
        }

    def core_config(self, architecture: Architecture) -> dict[str, Any]:
        return super().core_config(architecture) | {
            "num_moe_experts": architecture.num_moe_experts,
            "moe_router_topk": architecture.moe_router_topk,
            "moe_ffn_hidden_size": architecture.ffn_hidden_size,
        }

    def own_keys(self, architecture: Architecture) -> dict[str, Any]:
        return super().own_keys(architecture) | {
            **dict.fromkeys(self.hf_counts, architecture.num_moe_experts),
            "num_experts_per_tok": architecture.moe_router_topk,
        }

    def own_values(self, theirs: hf_keys.Keys) -> dict[str, Any]:
        counts = {key: hf_keys.size(theirs, key) for key in self.hf_counts if theirs.get(key) is not None}
        if len(set(counts.values())) > 1:
            said = " and ".join(f"{key} is {value}" for key, value in counts.items())
            raise UserError(f"{said}; they must be the same")
        experts = next(iter(counts.values()), self.own_fields["num_moe_experts"])
        chosen = hf_keys.size(theirs, "num_experts_per_tok")
        if chosen < 2:
            raise UserError(f"num_experts_per_tok is {chosen}; it must be at least 2")
        return super().own_values(theirs) | {"num_moe_experts": experts, "moe_router_topk": chosen}
