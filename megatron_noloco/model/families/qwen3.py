"""Qwen3, the dense models (arXiv 2505.09388): a Llama with norms on the heads of queries and keys.

The width of a head is not hidden_size / num_attention_heads: set `kv_channels`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import hf_keys
from megatron_noloco.model.families.family import MegatronOptions
from megatron_noloco.model.families.llama_like import OURS, THEIRS, LlamaLike
from megatron_noloco.model.families.qwen2 import refuse_windows
from megatron_noloco.model.families.table import Parameter


class Qwen3(LlamaLike):
    name = "qwen3"
    hf_class = "Qwen3ForCausalLM"
    hf_defaults: ClassVar = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}

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

    def megatron_options(self, architecture: Architecture) -> MegatronOptions:
        options = super().megatron_options(architecture)
        return replace(options, config={**options.config, "qk_layernorm": True})

    def hf_config(
        self, architecture: Architecture, dtype: str, end_of_document: int | None
    ) -> dict[str, Any]:
        keys = super().hf_config(architecture, dtype, end_of_document)
        return {**keys, "attention_bias": False, "use_sliding_window": False}

    def own_values(self, theirs: hf_keys.Keys) -> dict[str, Any]:
        hf_keys.refuse_flags(theirs, ("attention_bias",), "a Qwen3 with biases is not supported")
        refuse_windows(theirs)
        return super().own_values(theirs)
