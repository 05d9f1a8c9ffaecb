"""Build one pipeline stage of a language model from Megatron-core's layer specs."""

from collections.abc import Iterator
from copy import copy
from dataclasses import asdict
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_noloco.model import parameters
from megatron_noloco.model.architecture import Architecture, Compute
from megatron_noloco.model.dropout import seed_dropout
from megatron_noloco.model.families import ROPE_CONSTANTS, Parameter, family_of, table_of
from megatron_noloco.model.layers import NORMS, CausalAttention, CrossEntropyWithZLoss, Router, document_mask
from megatron_noloco.pipeline.core_versions import NO_CUDA_GRAPHS, submodules_of
from megatron_noloco.pipeline.groups import Groups
from megatron_noloco.plans.topology import Topology

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Chunk(GPTModel):
    """Core's model of consecutive layers, with masks between documents, and a loss without vocabulary padding.

    Padded rows of the vocabulary are left out of the softmax. Otherwise they would take probability from real
    tokens, and the loss would depend on the padding and differ from that of the exported model.

    `GPTModel` is deprecated since core 0.19 (Megatron-LM #6071). Its successor `HybridModel` gave the same losses
    when it stood in its place (version 0.4 had that file, model/hybrid.py).
    """

    def __init__(
        self, architecture: Architecture, experts: range, z_loss_coeff: float, **options: Any
    ) -> None:
        super().__init__(**options)
        self.architecture = architecture
        self.experts = experts
        self.z_loss_coeff = z_loss_coeff

    def forward(
        self,
        tokens: Tensor | None,
        positions: None,
        documents: Tensor | None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states, logits, or with labels losses [batch, tokens] (overrides core's).

        Args:
            tokens: int64 [batch, tokens], for the model's first chunk; other chunks receive hidden states.
            positions: None: rotary embeddings depend on differences of positions only.
            documents: the number of each token's document, [batch, tokens]; None: there is one document.
            labels: int64 [batch, tokens], for the last chunk; the loss of a label < 0 is undefined.
        """
        mask = None if documents is None else document_mask(documents)
        return super().forward(tokens, positions, mask, labels=labels)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss [batch, tokens] of logits [tokens, batch, padded vocabulary / tp] (overrides core's)."""
        first = self.pg_collection.tp.rank() * logits.size(-1)
        real = max(0, self.architecture.vocab_size - first)
        if real < logits.size(-1):
            logits[..., real:] = -torch.inf
        if self.z_loss_coeff == 0 or not self.training:
            return super().compute_language_model_loss(labels, logits)
        losses = CrossEntropyWithZLoss.apply(logits, labels.T, self.z_loss_coeff, self.pg_collection.tp)
        return cast(Tensor, losses).T.contiguous()

    def named_rows(self) -> Iterator[tuple[Parameter, nn.Parameter]]:
        """Yield every parameter with its row of the family's table; raises UserError where they do not match."""
        first_layer = self.decoder.layers[0].layer_number - 1  # core counts from 1
        return parameters.match_rows(self, table_of(self.architecture), first_layer, self.experts)


class Stage(nn.Module):
    """A pipeline stage: one model chunk, or several when the schedule is interleaved (virtual stages).

    Args:
        separate_documents: whether documents in a sample do not attend to each other.
    """

    def __init__(
        self, chunks: list[Chunk], config: TransformerConfig, separate_documents: bool = False
    ) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.config = config
        self.separate_documents = separate_documents

    @property
    def architecture(self) -> Architecture:
        return cast(Chunk, self.chunks[0]).architecture

    def named_rows(self) -> Iterator[tuple[Parameter, nn.Parameter]]:
        """Yield every parameter with its row of the family's table, chunk by chunk."""
        for chunk in self.chunks:
            yield from cast(Chunk, chunk).named_rows()

    def fill(self, read: parameters.Read) -> None:
        """Fill this stage's weights by `read`, which returns full tensors by their names in the unsplit model.

        Raises UserError when a tensor has the wrong shape.
        """
        tp = cast(Chunk, self.chunks[0]).pg_collection.tp
        for row, parameter in self.named_rows():
            parameters.fill(parameter, row, read, tp.rank(), tp.size())

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the weight that embedding and output layer share; None if it has none."""
        first, last = cast(Chunk, self.chunks[0]), cast(Chunk, self.chunks[-1])
        if not self.architecture.tied_embeddings:
            return None
        holder = first if first.pre_process else last
        return cast(nn.Parameter | None, holder.shared_embedding_or_output_weight())


def build_stage(
    architecture: Architecture,
    compute: Compute,
    groups: Groups,
    seed: int,
    read: parameters.Read | None = None,
) -> Stage:
    """Build this rank's part of the model, with its weights, on the host.

    Args:
        seed: of the initial weights and of dropout.
        read: returns full tensors by their names in the unsplit model; None: initial weights are drawn.

    Raises UserError when the model and the table of its family do not match.
    """
    seed_dropout(seed, groups)
    stage = empty_stage(architecture, compute, groups)
    stage.fill(read or parameters.initial_weights(architecture, seed))
    return stage


def empty_stage(architecture: Architecture, compute: Compute, groups: Groups) -> Stage:
    """Build this rank's part of the model with uninitialized weights."""
    config = transformer_config(architecture, compute, groups.topology)
    chunks = [
        _empty_chunk(architecture, compute, config, groups, index) for index in range(groups.topology.vpp)
    ]
    return Stage(chunks, config, compute.separate_documents)


def _empty_chunk(
    architecture: Architecture, compute: Compute, config: TransformerConfig, groups: Groups, index: int
) -> Chunk:
    # Transformer Engine's attention takes no mask of documents.
    transformer_engine = not compute.separate_documents and compute.uses_transformer_engine()
    layer = _layer_spec(config, transformer_engine)
    vpp = groups.topology.vpp
    vp_stage = index if vpp > 1 else None
    block: ModuleSpec | TransformerBlockSubmodules = layer
    if not transformer_engine:  # core's own block would end with core's norm
        count = get_num_layers_to_build(config, vp_stage, groups.position.stage)
        norm = NORMS[config.normalization]
        block = TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)
    return Chunk(
        architecture,
        groups.topology.experts(groups.position.dp, architecture.num_moe_experts or 0),
        compute.z_loss_coeff,
        config=config,
        transformer_layer_spec=block,
        vocab_size=architecture.padded_vocab_size,
        max_sequence_length=architecture.seq_length,
        pre_process=groups.first_stage and index == 0,
        post_process=groups.last_stage and index == vpp - 1,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        pg_collection=groups.collection,
        vp_stage=vp_stage,
        **family_of(architecture).core_model(architecture),
    )


def _layer_spec(config: TransformerConfig, transformer_engine: bool) -> ModuleSpec:
    """Return core's layer with our router, and Transformer Engine's modules or our attention and norm."""
    options = {"num_experts": config.num_moe_experts, "qk_layernorm": config.qk_layernorm}
    if transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(**options)
    else:
        spec = get_gpt_layer_local_spec(normalization=config.normalization, **options)
        norm = NORMS[config.normalization]
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = norm
    if config.num_moe_experts is not None:
        submodules_of(spec.submodules.mlp).router = Router
    return spec


def transformer_config(architecture: Architecture, compute: Compute, topology: Topology) -> TransformerConfig:
    """Return the model's configuration for Megatron-core."""
    cuda = torch.cuda.is_available()
    dtype = DTYPES[compute.precision]
    config = TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.kv_channels,
        layernorm_epsilon=architecture.norm_epsilon,
        hidden_dropout=compute.hidden_dropout,
        attention_dropout=compute.attention_dropout,
        init_method_std=architecture.init_method_std,
        perform_initialization=False,  # Stage.fill gives weights
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=compute.precision == "bf16",
        fp16=compute.precision == "fp16",
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
        expert_model_parallel_size=topology.ep,
        sequence_parallel=topology.sequence_parallel,
        recompute_granularity=compute.recompute_granularity,
        recompute_method=compute.recompute_method,
        recompute_num_layers=compute.recompute_num_layers,
        recompute_modules=copy(compute.recompute_modules),  # core adds to it
        **asdict(compute.split),
        moe_router_load_balancing_type=compute.moe_router_load_balancing_type or "none",
        moe_aux_loss_coeff=compute.moe_aux_loss_coeff or 0.0,
        batch_p2p_comm=True,
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        # These three fusions compile with torch.compile: worth it on a GPU, half a minute of start-up on a CPU.
        # Without a gate core fuses nothing but F.gelu, and computes it with tanh only where it is fused.
        bias_activation_fusion=cuda and family_of(architecture).gated,
        bias_dropout_fusion=cuda,
        cross_entropy_loss_fusion=cuda and compute.precision == "bf16",  # core's rounds the gradient to bf16
        apply_rope_fusion=compute.uses_transformer_engine(),  # a kernel of Transformer Engine
        masked_softmax_fusion=False,  # attention is torch's or Transformer Engine's, both fused
        gradient_accumulation_fusion=False,  # needs Megatron's own gradient buffers
        **NO_CUDA_GRAPHS,
        **family_of(architecture).core_config(architecture),
    )
    for name, value in _yarn(architecture).items():
        setattr(config, name, value)
    return config


def _yarn(architecture: Architecture) -> dict[str, Any]:
    """Return the attributes for YaRN, which core's model reads and TransformerConfig has no fields for."""
    if architecture.yarn_rotary_scaling_factor is None:
        return {}
    yarn = ROPE_CONSTANTS["yarn"]
    return {
        "yarn_rotary_scaling_factor": architecture.yarn_rotary_scaling_factor,
        "yarn_original_max_position_embeddings": architecture.yarn_original_max_position_embeddings,
        "yarn_beta_fast": yarn["beta_fast"],
        "yarn_beta_slow": yarn["beta_slow"],
        "yarn_mscale": yarn["mscale"],
        "yarn_mscale_all_dim": yarn["mscale_all_dim"],
        "yarn_correction_range_round_to_int": yarn["truncate"],
    }
