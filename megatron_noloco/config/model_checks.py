"""Rules between the fields of the model, and between the model and its parallel sizes."""

from collections.abc import Iterator

from megatron_noloco.config.blocks import ParallelConfig
from megatron_noloco.config.layers import layers_of_chunks
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.config.wording import count
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import families_with


def check_model(model: ModelConfig) -> Iterator[str]:
    for name in type(model).model_fields:
        families = families_with(name)
        if families and model.family not in families and getattr(model, name) is not None:
            owners = " and ".join(f'"{family}"' for family in families)
            yield f'model.{name} is not a field of the family "{model.family}", only of {owners}; leave it out'
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.query_groups
    if model.kv_channels is None and hidden % heads:
        yield (
            f"model.hidden_size {hidden} does not divide into {count(heads, 'attention head')} "
            f"({hidden} / {heads} = {hidden / heads:.2f}); set model.kv_channels or change one of them"
        )
    elif model.head_size % 2:
        name = "model.kv_channels" if model.kv_channels else "model.hidden_size / model.num_attention_heads"
        yield f"{name}: a head of {count(model.head_size, 'channel')} has no rotary embedding: it must be even"
    if heads % groups:
        yield f"model.num_attention_heads {heads} does not divide into model.num_query_groups {groups}"
    yarn = (model.yarn_rotary_scaling_factor, model.yarn_original_max_position_embeddings)
    if (yarn[0] is None) != (yarn[1] is None):
        yield (
            "model.yarn_rotary_scaling_factor and model.yarn_original_max_position_embeddings belong together; "
            "give both or neither"
        )
    elif yarn[0] is not None and model.own("rope_scaling_factor") is not None:
        yield "model.rope_scaling_factor and YaRN scale the same rotary frequencies; leave one of them out"
    experts, chosen = model.own("num_moe_experts"), model.own("moe_router_topk")
    if experts is not None and chosen is not None and chosen > experts:
        yield f"model.moe_router_topk {chosen} is more than model.num_moe_experts {experts}"
    if model.recompute_granularity == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(model, name) is None:
                yield f'model.recompute_granularity "full" needs model.{name}'
    else:
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(model, name) is not None:
                yield f'model.{name} has a meaning only with model.recompute_granularity "full"'
    if model.recompute_modules is not None:
        wrong = "mlp" if model.own("num_moe_experts") is not None else "moe"
        if model.recompute_granularity != "selective":
            yield 'model.recompute_modules has a meaning only with model.recompute_granularity "selective"'
        elif wrong in model.recompute_modules:
            yield f'model.recompute_modules: no layer of the family "{model.family}" has "{wrong}"'


def check_parallel(model: ModelConfig, parallel: ParallelConfig, microbatches: int) -> Iterator[str]:
    yield from _check_stages(model, parallel, microbatches)
    yield from _check_tensor_parallel(model, parallel)


def _check_stages(model: ModelConfig, parallel: ParallelConfig, microbatches: int) -> Iterator[str]:
    layers, stages, chunks = (
        model.num_layers,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    try:
        most = max(map(max, layers_of_chunks(parallel.split, layers, stages, chunks)))
    except ValueError as error:
        yield str(error)
    else:
        if (model.recompute_num_layers or 1) > most:
            yield (
                f"model.recompute_num_layers {model.recompute_num_layers} is more than the "
                f"{count(most, 'layer')} of a model chunk"
            )
    if chunks > 1 and stages == 1:
        yield (
            f"parallel.virtual_pipeline_model_parallel_size {chunks} needs "
            "parallel.pipeline_model_parallel_size > 1"
        )
    elif chunks > 1 and microbatches % stages:
        yield (
            f"with virtual stages the microbatches must divide into the stages: "
            f"gradient_accumulation_steps {microbatches} / {stages} stages = {microbatches / stages:.2f}"
        )


def _check_tensor_parallel(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    tp_size = parallel.tensor_model_parallel_size
    sizes = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.query_groups,
        "model.ffn_hidden_size": model.ffn_hidden_size,
    }
    if parallel.sequence_parallel:
        sizes["model.seq_length"] = model.seq_length
    for name, size in sizes.items():
        if size % tp_size:
            quotient = f"{size} / {tp_size} = {size / tp_size:.2f}"
            yield f"{name} {size} does not divide by parallel.tensor_model_parallel_size {tp_size} ({quotient})"
    if model.vocab_size is not None:
        yield from check_vocabulary(model.architecture(), parallel)
    if model.own("num_moe_experts") is not None and tp_size > 1 and not parallel.sequence_parallel:
        yield (
            f'family "{model.family}" needs parallel.sequence_parallel true with '
            f"parallel.tensor_model_parallel_size {tp_size}: Megatron-core trains experts no other way"
        )
    if parallel.sequence_parallel and tp_size == 1:
        yield "parallel.sequence_parallel needs parallel.tensor_model_parallel_size > 1"


def check_vocabulary(architecture: Architecture, parallel: ParallelConfig) -> Iterator[str]:
    rows, tp_size = architecture.padded_vocab_size, parallel.tensor_model_parallel_size
    if rows % tp_size:
        yield (
            f"the padded vocabulary {rows} does not divide by parallel.tensor_model_parallel_size {tp_size} "
            f"({rows} / {tp_size} = {rows / tp_size:.2f}); "
            f"make model.make_vocab_size_divisible_by a multiple of {tp_size}"
        )
