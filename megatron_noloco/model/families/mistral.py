"""Mistral (Jiang et al. 2023, arXiv 2310.06825): a Llama whose attention may have a sliding window."""

from dataclasses import replace
from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import hf_keys
from megatron_noloco.model.families.family import MegatronOptions
from megatron_noloco.model.families.llama_like import LlamaLike


class Mistral(LlamaLike):
    name = "mistral"
    own_fields: ClassVar = {"sliding_window": None}
    hf_class = "MistralForCausalLM"
    hf_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }

    def megatron_options(self, architecture: Architecture) -> MegatronOptions:
        options, window = super().megatron_options(architecture), architecture.sliding_window
        if window is None:
            return options
        # Core counts the tokens before a token and those after it; Hugging Face counts the token itself, too.
        return replace(options, config={**options.config, "window_size": (window - 1, 0)})

    def hf_config(
        self, architecture: Architecture, dtype: str, end_of_document: int | None
    ) -> dict[str, Any]:
        keys = super().hf_config(architecture, dtype, end_of_document)
        return {**keys, "sliding_window": architecture.sliding_window}

    def own_values(self, theirs: hf_keys.Keys) -> dict[str, Any]:
        window = None if theirs.get("sliding_window") is None else hf_keys.size(theirs, "sliding_window")
        hf_keys.refuse_layer_types(theirs, "full_attention" if window is None else "sliding_attention")
        return {**super().own_values(theirs), "sliding_window": window}
