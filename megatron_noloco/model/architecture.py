"""The architecture of a model, and how it is computed. No torch at import."""

import importlib.util
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
LoadBalancing = Literal["aux_loss", "seq_aux_loss", "none"]


@dataclass(frozen=True)
class Architecture:
    """Everything that determines the shapes and the function of a model, with all defaults filled in.

    Sizes have Megatron's names. Weights do not depend on parallel sizes: an architecture has one checkpoint.
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
    # Rotary frequencies that YaRN extends; None: they are as trained.
    yarn_rotary_scaling_factor: float | None = None  # how many times longer the context became
    yarn_original_max_position_embeddings: int | None = None  # tokens of the context before
    # Fields that only some families have (`Family.own_fields`); None elsewhere.
    rope_scaling_factor: float | None = None  # of the frequencies of the rotary embeddings, as in Llama 3.1
    sliding_window: int | None = None  # tokens that a token attends to, itself included; None: all before it
    num_moe_experts: int | None = None  # MLPs of a layer
    moe_router_topk: int | None = None  # experts that compute each token


@dataclass(frozen=True)
class PipelineSplit:
    """How the layers of a model are divided over its pipeline stages, in Megatron's terms; by default evenly.

    Attributes:
        num_layers_in_first_pipeline_stage: all others have equal parts of the rest, but for the next one.
        num_layers_in_last_pipeline_stage: likewise.
        account_for_embedding_in_pipeline_split: the embedding takes the place of a layer in the first stage.
        account_for_loss_in_pipeline_split: the output layer and the loss, in the last stage.
    """

    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False


@dataclass(frozen=True)
class Compute:
    """How the model is computed; nothing here changes which model it is."""

    precision: Precision = "fp32"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    moe_router_load_balancing_type: LoadBalancing | None = None  # None: there are no experts
    moe_aux_loss_coeff: float | None = None
    z_loss_coeff: float = 0.0
    split: PipelineSplit = field(default_factory=PipelineSplit)
    separate_documents: bool = False  # documents in one sample do not attend to each other

    def uses_transformer_engine(self) -> bool:
        """Whether Transformer Engine is used: it is installed, there is a GPU, and it is not declined.

        Raises ValueError when it is demanded and cannot be had.
        """
        import torch

        available = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
        if self.transformer_impl == "transformer_engine" and not available:
            raise ValueError(
                'model.transformer_impl is "transformer_engine", which needs a GPU and the transformer_engine '
                'package; use "auto" or "local"'
            )
        return available and self.transformer_impl != "local"
