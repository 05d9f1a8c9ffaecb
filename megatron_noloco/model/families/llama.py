"""Llama, which has all that `Family` has by default, and rotary frequencies of its own."""

from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.family import ROPE_CONSTANTS, Family


class Llama(Family):
    """Llama (Touvron et al. 2023, arXiv 2302.13971) and Llama 2, 3, 3.1, 3.2, 3.3: no biases.

    From 3.1 on the frequencies of the rotary embeddings are scaled for longer contexts (Grattafiori et al. 2024,
    arXiv 2407.21783; the formula is in Megatron-core's `RotaryEmbedding._apply_scaling`).
    """

    name = "llama"
    own_fields: ClassVar = {"rope_scaling_factor": None}
    hf_class = "LlamaForCausalLM"
    rope_types = ("llama3", "yarn")

    def core_model(self, architecture: Architecture) -> dict[str, Any]:
        options, factor = super().core_model(architecture), architecture.rope_scaling_factor
        if factor is None:
            return options
        return options | {"rope_scaling": True, "rope_scaling_factor": factor}

    def hf_rope(self, architecture: Architecture) -> dict[str, Any]:
        factor = architecture.rope_scaling_factor
        if factor is None:
            return super().hf_rope(architecture)
        return {"rope_type": "llama3", "factor": factor, **ROPE_CONSTANTS["llama3"]}
