"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): a Llama with biases on queries, keys and values."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import hf_keys
from megatron_noloco.model.families.family import MegatronOptions
from megatron_noloco.model.families.llama_like import LlamaLike
from megatron_noloco.model.families.table import Parameter


class Qwen2(LlamaLike):
    name = "qwen2"
    hf_class = "Qwen2ForCausalLM"
    hf_defaults: ClassVar = {"num_key_value_heads": 32, "max_position_embeddings": 32768}

    def attention_rows(self, architecture: Architecture) -> Sequence[Parameter]:
        norm, weight, projection = super().attention_rows(architecture)
        bias = replace(
            weight,
            name=weight.name.replace("weight", "bias"),
            shape=weight.shape[:1],
            init="zeros",
            hf=tuple(name.replace("weight", "bias") for name in weight.hf),
            linear=False,
        )
        return (norm, weight, bias, projection)

    def megatron_options(self, architecture: Architecture) -> MegatronOptions:
        options = super().megatron_options(architecture)
        return replace(options, config={**options.config, "add_qkv_bias": True})

    def hf_config(
        self, architecture: Architecture, dtype: str, end_of_document: int | None
    ) -> dict[str, Any]:
        keys = super().hf_config(architecture, dtype, end_of_document)
        return {**keys, "use_sliding_window": False}

    def own_values(self, theirs: hf_keys.Keys) -> dict[str, Any]:
        refuse_windows(theirs)
        return super().own_values(theirs)


def refuse_windows(theirs: hf_keys.Keys) -> None:
    """Raise ValueError where Qwen's layers from `max_window_layers` on have a sliding window.

    The released dense models have none, though their config.json names one.
    """
    hf_keys.refuse_layer_types(theirs, "full_attention")
    if theirs.get("layer_types") or not theirs.get("use_sliding_window"):
        return
    layers, first = hf_keys.size(theirs, "num_hidden_layers"), theirs.get("max_window_layers", 28)
    if theirs.get("sliding_window", 4096) is not None and not (type(first) is int and first >= layers):
        raise ValueError(
            f"use_sliding_window is true, and max_window_layers {first!r} of {layers} layers; windows on layers "
            "are not supported"
        )
