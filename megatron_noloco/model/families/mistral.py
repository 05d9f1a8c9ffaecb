"""Mistral: a Llama whose attention may have a sliding window; Mixtral: a Mistral with a mixture of experts."""

from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.family import THEIRS, Family
from megatron_noloco.model.families.mixture import Mixture


class Mistral(Family):
    """Mistral (Jiang et al. 2023, arXiv 2310.06825): a Llama whose attention may have a sliding window."""

    name = "mistral"
    own_fields: ClassVar = {"sliding_window": None}
    hf_class = "MistralForCausalLM"

    def core_config(self, architecture: Architecture) -> dict[str, Any]:
        options, window = super().core_config(architecture), architecture.sliding_window
        # Core counts the tokens before and after a token; Hugging Face counts the token itself as well.
        return options if window is None else options | {"window_size": (window - 1, 0)}

    def own_keys(self, architecture: Architecture) -> dict[str, Any]:
        return super().own_keys(architecture) | {"sliding_window": architecture.sliding_window}

    def own_values(self, config: Any) -> dict[str, Any]:
        return super().own_values(config) | {"sliding_window": config.sliding_window}


class Mixtral(Mixture, Mistral):
    """Mixtral (Jiang et al. 2024, arXiv 2401.04088): a Mistral with a mixture of experts in place of each MLP."""

    name = "mixtral"
    own_fields: ClassVar = {**Mistral.own_fields, **Mixture.own_fields}
    hf_class = "MixtralForCausalLM"
    hf_router = THEIRS + "block_sparse_moe.gate.weight"
    hf_expert = THEIRS + "block_sparse_moe.experts.{expert}.{part}.weight"
    hf_parts = ("w1", "w3", "w2")
