"""The architecture of a model, and how it is computed; torch is not imported with this file."""

import importlib.util
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megatron_noloco.errors import UserError

Precision = Literal["fp32", "bf16", "fp16"]
LoadBalancing = Literal["aux_loss", "seq_aux_loss", "none"]


@dataclass(frozen=True)
class Architecture:
    """All that determines the shapes and the function of a model, with defaults filled in.

    Sizes have Megatron's names. Weights do not depend on the parallel sizes.
    """

    family: str  # a key of model.families.FAMILIES
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key/value heads
    kv_channels: int  # width of one head
    seq_length: int  # tokens in a sample
    vocab_size: int  # tokens of the tokenizer
    padded_vocab_size: int  # rows of the embedding, at least vocab_size
    rotary_base: float
    norm_epsilon: float
    tied_embeddings: bool  # the output layer's weight is the embedding
    init_method_std: float
    # YaRN; None: rotary frequencies are not scaled by it.
    yarn_rotary_scaling_factor: float | None = None  # by how much the context was extended
    yarn_original_max_position_embeddings: int | None = None  # tokens in the context before that
    # Fields that only some families have (`Family.own_fields`); None elsewhere.
    rope_scaling_factor: float | None = None  # of rotary frequencies, as in Llama 3.1
    sliding_window: int | None = None  # tokens that a token attends to, itself included; None: all before it
    num_moe_experts: int | None = None  # per layer
    moe_router_topk: int | None = None  # experts that compute each token

    @property
    def of_function(self) -> dict[str, Any]:
        """What decides which function the weights are of: neither the first weights, nor padding, nor samples."""
        without = ("init_method_std", "padded_vocab_size", "seq_length")
        return {name: value for name, value in asdict(self).items() if name not in without}


@dataclass(frozen=True)
class PipelineSplit:
    """How the layers of a model are divided over its pipeline stages, in Megatron's terms; by default evenly.

    Attributes:
        num_layers_in_first_pipeline_stage: layers of the first stage; the stages without a number share the rest.
        num_layers_in_last_pipeline_stage: layers of the last stage.
        account_for_embedding_in_pipeline_split: whether the embedding counts as a layer of the first stage.
        account_for_loss_in_pipeline_split: whether output layer and loss count as a layer of the last stage.
    """

    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False


@dataclass(frozen=True)
class Compute:
    """How a model is computed, whatever its architecture."""

    precision: Precision = "fp32"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    moe_router_load_balancing_type: LoadBalancing | None = None  # None: no experts
    moe_aux_loss_coeff: float | None = None
    z_loss_coeff: float = 0.0
    split: PipelineSplit = field(default_factory=PipelineSplit)
    separate_documents: bool = False  # documents in one sample do not attend to each other

    def uses_transformer_engine(self) -> bool:
        """Return whether Transformer Engine is used: it is installed, there is a GPU, and "local" is not set.

        Raises UserError when it is required but cannot be used.
        """
        import torch

        available = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
        if self.transformer_impl == "transformer_engine" and not available:
            raise UserError(
                'model.transformer_impl is "transformer_engine", which needs a GPU and the transformer_engine '
                'package; use "auto" or "local"'
            )
        return available and self.transformer_impl != "local"
