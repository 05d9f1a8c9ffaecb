"""One stage of a Llama, from Megatron-core's layer specs."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from megatron_noloco.config import RunConfig
from megatron_noloco.huggingface import llama as huggingface
from megatron_noloco.huggingface.folder import HuggingFaceWeights
from megatron_noloco.model import weights
from megatron_noloco.model.dropout import seed_dropout
from megatron_noloco.model.layers import CausalAttention, RMSNorm
from megatron_noloco.pipeline.groups import Groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Llama(GPTModel):
    """Core's model, whose loss does not see the padding of the vocabulary.

    Padded rows exist for the sake of shapes; left in the softmax they would take probability from real tokens,
    and the loss would depend on the padding and differ from the exported model's.
    """

    def __init__(self, *arguments: Any, real_vocab_size: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.real_vocab_size = real_vocab_size

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss [batch, tokens] of logits [tokens, batch, vocabulary / shards] (overrides core's)."""
        first = self.pg_collection.tp.rank() * logits.size(-1)
        padding = max(0, self.real_vocab_size - first)
        if padding < logits.size(-1):
            logits[..., padding:] = -torch.inf
        return super().compute_language_model_loss(labels, logits)


class Stage(nn.Module):
    """A pipeline stage: one model chunk, or several when the schedule is interleaved (virtual stages)."""

    def __init__(self, chunks: list[Llama], config: TransformerConfig) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.config = config

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of an embedding that the output layer shares; None where there is none."""
        first, last = cast(Llama, self.chunks[0]), cast(Llama, self.chunks[-1])
        if not first.share_embeddings_and_output_weights:
            return None
        holder = first if first.pre_process else last
        return cast(nn.Parameter | None, holder.shared_embedding_or_output_weight())


def transformer_config(config: RunConfig, groups: Groups) -> TransformerConfig:
    """The run's model in Megatron-core's terms."""
    model, parallel = config.model, config.parallel
    cuda = torch.cuda.is_available()
    dtype = DTYPES[config.precision]
    virtual: dict[str, Any] = {}
    if parallel.virtual_pipeline_model_parallel_size > 1:
        virtual = {
            "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
            "microbatch_group_size_per_vp_stage": parallel.pipeline_model_parallel_size,
        }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        kv_channels=model.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
        perform_initialization=False,  # model.weights fills them
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.precision == "bf16",
        fp16=config.precision == "fp16",
        tensor_model_parallel_size=groups.topology.tp,
        pipeline_model_parallel_size=groups.topology.pp,
        sequence_parallel=parallel.sequence_parallel,
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        batch_p2p_comm=True,
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        # These two fusions compile with torch.compile: worth it on a GPU, half a minute of start-up on a CPU.
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,  # needs Megatron's own gradient buffers
        cuda_graph_scope=[],
        **virtual,
    )


def uses_transformer_engine(transformer_impl: str) -> bool:
    """Whether layers come from Transformer Engine: installed, on a GPU, and not declined.

    Raises ValueError when it is demanded and cannot be had.
    """
    available = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if transformer_impl == "transformer_engine" and not available:
        raise ValueError(
            'model.transformer_impl is "transformer_engine", which needs a GPU and the transformer_engine '
            'package; use "auto" or "local"'
        )
    return available and transformer_impl != "local"


def layer_spec(transformer_engine: bool) -> ModuleSpec:
    """Core's layer, with Transformer Engine's modules, or core's own around our attention and norm."""
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec()
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def build_stage(config: RunConfig, groups: Groups, vocab_size: int) -> Stage:
    """This rank's part of the model, with its initial weights, on the host.

    Args:
        vocab_size: entries of the tokenizer; the embedding holds more rows, see `ModelConfig.architecture`.
    """
    seed_dropout(config.training.seed, groups)
    core_config = transformer_config(config, groups)
    transformer_engine = uses_transformer_engine(config.model.transformer_impl)
    vpp = config.parallel.virtual_pipeline_model_parallel_size
    chunks = [
        _build_chunk(config, core_config, groups, transformer_engine, vocab_size, index)
        for index in range(vpp)
    ]
    return Stage(chunks, core_config)


def _build_chunk(
    config: RunConfig,
    core_config: TransformerConfig,
    groups: Groups,
    transformer_engine: bool,
    vocab_size: int,
    index: int,
) -> Llama:
    vpp = config.parallel.virtual_pipeline_model_parallel_size
    vp_stage = index if vpp > 1 else None
    layer = layer_spec(transformer_engine)
    block: ModuleSpec | TransformerBlockSubmodules = layer
    if not transformer_engine:
        count = get_num_layers_to_build(core_config, vp_stage, groups.position.stage)
        block = TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)
    architecture = config.architecture(vocab_size)
    tied = architecture.tied_embeddings
    chunk = Llama(
        config=core_config,
        transformer_layer_spec=block,
        vocab_size=architecture.padded_vocab_size,
        max_sequence_length=config.model.seq_length,
        pre_process=groups.first_stage and index == 0,
        post_process=groups.last_stage and index == vpp - 1,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        rotary_base=config.model.rotary_base,
        pg_collection=groups.collection,
        vp_stage=vp_stage,
        real_vocab_size=architecture.vocab_size,
    )
    layer_offset = get_transformer_layer_offset(core_config, vp_stage, groups.position.stage)
    if config.training.pretrained is None:
        weights.initialise(
            chunk,
            groups,
            seed=config.training.seed,
            std=config.model.init_method_std,
            num_layers=config.model.num_layers,
            layer_offset=layer_offset,
            tied=tied,
        )
    else:
        with HuggingFaceWeights(Path(config.training.pretrained)) as theirs:
            padded = architecture.padded_vocab_size
            read = partial(huggingface.from_hf, read=theirs, model=config.model, padded_vocab_size=padded)
            weights.load(chunk, groups, layer_offset, tied, read)
    return chunk
