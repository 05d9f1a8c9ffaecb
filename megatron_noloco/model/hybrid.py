"""Megatron-core's `HybridModel` (since 0.18) with the arguments and the names of parameters of its `GPTModel`."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


class HybridLanguageModel(HybridModel):
    """Core's model of a pattern of layers, each `*` of which is a whole layer: attention and MLP or experts.

    Core's own patterns have attention (`*`) and MLP (`-`) in layers of their own. What it builds for `*` is in the
    specification, so that layers keep their numbers and parameters their names.

    Args:
        transformer_layer_spec: of a layer, for Transformer Engine; or of a block of equal layers with a norm.
        rope_scaling: whether frequencies are scaled as in Llama 3.1, by `rope_scaling_factor`; core has no such
            argument here.
        options: see `HybridModel`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        **options: Any,
    ) -> None:
        layer, norm = transformer_layer_spec, TENorm
        if isinstance(layer, TransformerBlockSubmodules):
            layer, norm = layer.layer_specs[0], layer.layer_norm
        stack = ModuleSpec(_Stack, {"norm": norm}, HybridStackSubmodules(attention_layer=layer))
        pattern = _pattern(config)
        with _split_by_pattern_only(config):
            super().__init__(config, stack, hybrid_layer_pattern=pattern, **options)
        if rope_scaling:
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels,
                rotary_percent=1.0,
                rotary_base=options["rotary_base"],
                rope_scaling=True,
                rope_scaling_factor=rope_scaling_factor,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )


class _Stack(HybridStack):
    """Core's layers, then a norm of the given class under the name that it has in `GPTModel`."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        norm: type[nn.Module],
        post_process: bool,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, post_process=post_process, post_layer_norm=False, **options)
        self.post_layer_norm = post_process
        if post_process:
            self.final_layernorm = norm(config, config.hidden_size, config.layernorm_epsilon)

    @property
    def final_norm(self) -> nn.Module:
        """The norm after the last layer (where core looks for it)."""
        return self.final_layernorm


def _pattern(config: TransformerConfig) -> str:
    """Return the layers of all model chunks in the order of the model, separated by `|`."""
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = product(range(virtual) if virtual else [None], range(config.pipeline_model_parallel_size))
    return "|".join("*" * get_num_layers_to_build(config, vp, pp) for vp, pp in chunks)


@contextmanager
def _split_by_pattern_only(config: TransformerConfig) -> Iterator[None]:
    """Hide the fields that say how layers are split over stages: with a pattern core refuses them."""
    ends = {name: getattr(config, name) for name in _ENDS}
    for name in _ENDS:
        setattr(config, name, None)
    try:
        yield
    finally:
        for name, value in ends.items():
            setattr(config, name, value)
