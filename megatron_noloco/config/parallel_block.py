"""The block `parallel`: which ranks there are, and which layers each stage has."""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain
from typing import Literal

from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.errors import UserError
from megatron_noloco.fields import Positive, Settings, count, field, quoted
from megatron_noloco.model.architecture import Architecture, PipelineSplit
from megatron_noloco.model.families import families_with
from megatron_noloco.plans.topology import Topology


class ParallelConfig(Settings):
    """The parallel layout: ranks = replicas x pipeline x data x tensor parallel sizes."""

    replicas: Positive | Literal["auto"] = field(
        "auto", 'Full copies of the model; "auto" is as many as the ranks allow.'
    )
    tensor_model_parallel_size: Positive = field(1, "tp: ranks that each layer's weights are split over.")
    pipeline_model_parallel_size: Positive = field(1, "pp: pipeline stages of a replica.")
    virtual_pipeline_model_parallel_size: Positive = field(
        1, "Model chunks per stage, for the interleaved schedule."
    )
    num_layers_in_first_pipeline_stage: Positive | None = field(
        None, "Layers of the first stage, which also has the embedding; null: as the others."
    )
    num_layers_in_last_pipeline_stage: Positive | None = field(
        None, "Layers of the last stage, which also has the output layer; null: as the others."
    )
    account_for_embedding_in_pipeline_split: bool = field(
        False, "Whether the embedding takes the place of a layer in the first stage."
    )
    account_for_loss_in_pipeline_split: bool = field(
        False, "Whether the output layer and the loss take the place of a layer in the last stage."
    )
    data_parallel_size: Positive = field(
        1, "dp: synchronous data parallelism inside a replica; gradients are averaged every step."
    )
    expert_model_parallel_size: Positive = field(
        1,
        "ep: data-parallel ranks of a replica that divide the experts of each layer among them; a divisor of dp. "
        "Each of these ranks holds 1 / ep of the experts; tokens are sent to the ranks that hold their experts.",
    )
    sequence_parallel: bool = field(
        False, "Whether the sequence is split over the tensor-parallel ranks outside attention and MLP."
    )

    @property
    def split(self) -> PipelineSplit:
        """How the layers are divided over the stages."""
        return PipelineSplit(**self.model_dump(include={field.name for field in fields(PipelineSplit)}))

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.pipeline_model_parallel_size * self.data_parallel_size * self.tensor_model_parallel_size


def lay_out(parallel: ParallelConfig, world_size: int, separate_jobs: bool = False) -> Topology:
    """Return the topology of `world_size` ranks; raises UserError with the equation when they do not fit.

    Args:
        separate_jobs: whether the job is one replica of a federation.
    """
    replicas = 1 if separate_jobs else parallel.replicas
    one = Topology(
        1,
        parallel.pipeline_model_parallel_size,
        parallel.data_parallel_size,
        parallel.tensor_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.sequence_parallel,
        ep=parallel.expert_model_parallel_size,
    )
    size, inside = one.replica_size, one.replica_in_words
    fitting, rest = divmod(world_size, size)
    ranks = count(world_size, "rank")
    if replicas == "auto":
        if rest:
            near = [n for n in (world_size - rest, world_size - rest + size) if n]
            raise UserError(
                f"{ranks} do not divide into replicas of {inside} = {count(size, 'rank')}; "
                f"start {' or '.join(map(str, near))} ranks"
            )
        return replace(one, replicas=fitting)
    needed = replicas * size
    if needed != world_size:
        other = "" if rest else f", or set parallel.replicas to {fitting}"
        if separate_jobs:
            other = ", or change the sizes in this job's block parallel"
        raise UserError(
            f"{ranks} {'is' if world_size == 1 else 'are'} not {count(replicas, 'replica')} x "
            f"{inside} = {needed}; start {count(needed, 'rank')}{other}"
        )
    return replace(one, replicas=replicas)


def layers_of_chunks(split: PipelineSplit, num_layers: int, stages: int, virtual: int = 1) -> list[list[int]]:
    """Return the layers of the model chunks, [stage][virtual stage]; every one has a layer.

    Raises UserError, in one line, where there is no such division. A test compares the numbers with those of
    Megatron-core's own functions.
    """
    ends = [split.num_layers_in_first_pipeline_stage, split.num_layers_in_last_pipeline_stage]
    given = [layers for layers in ends if layers is not None]
    counted = split.account_for_embedding_in_pipeline_split + split.account_for_loss_in_pipeline_split
    if given and counted:
        raise UserError(
            "parallel.num_layers_in_..._pipeline_stage and parallel.account_for_..._in_pipeline_split both "
            "say how many layers the first and the last stage have; give one of them"
        )
    if (given or counted) and stages == 1:
        raise UserError(
            "parallel.num_layers_in_..._pipeline_stage and parallel.account_for_..._in_pipeline_split need "
            "parallel.pipeline_model_parallel_size > 1"
        )
    rest, others = num_layers + counted - sum(given), stages - len(given)
    if others == 0 and virtual > 1:
        raise UserError(
            "with virtual stages and both parallel.num_layers_in_first_pipeline_stage and _last_ there must "
            "be stages between, by whose number Megatron-core divides; give one of the two"
        )
    if others == 0 != rest or rest < 0 or (others and rest % (others * virtual)):
        what = f"{count(num_layers, 'layer')} (model.num_layers)"
        what += f" and {counted} for embedding or loss" * bool(counted)
        what += f" less {' and '.join(map(str, given))} at the ends" * bool(given)
        into = count(others, "stage")
        into += f" x {count(virtual, 'virtual stage')} = {others * virtual}" * (virtual > 1)
        raise UserError(f"{what} do not divide into {into}")
    of_stages = [rest // others if others else 0] * stages
    for stage, layers in zip((0, -1), ends, strict=True):
        if layers is not None:
            of_stages[stage] = layers
            if layers % virtual:
                raise UserError(
                    f"{count(layers, 'layer')} of a stage do not divide into {count(virtual, 'virtual stage')}"
                )
    chunks = [[layers // virtual] * virtual for layers in of_stages]
    chunks[0][0] -= split.account_for_embedding_in_pipeline_split
    chunks[-1][-1] -= split.account_for_loss_in_pipeline_split
    if min(map(min, chunks)) < 1:
        raise UserError(
            f"{count(num_layers, 'layer')} (model.num_layers) leave a stage without any ({in_words(chunks)})"
        )
    return chunks


def in_words(chunks: list[list[int]]) -> str:
    """Return layers in words, such as "3 + 4 + 3", or with virtual stages "1/2 + 2/2"."""
    return " + ".join("/".join(map(str, stage)) for stage in chunks)


def check_stages(model: ModelConfig, parallel: ParallelConfig, microbatches: int) -> Iterator[str]:
    layers, stages, chunks = (
        model.num_layers,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    try:
        of_chunks = list(chain(*layers_of_chunks(parallel.split, layers, stages, chunks)))
    except UserError as error:
        yield str(error)
    else:
        yield from _check_recomputed(model, of_chunks)
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


def _check_recomputed(model: ModelConfig, of_chunks: list[int]) -> Iterator[str]:
    """Yield why no such number of layers can be recomputed; of_chunks: the layers of each model chunk."""
    number = model.recompute_num_layers or 1
    if number > max(of_chunks):
        yield (
            f"model.recompute_num_layers {number} is more than the "
            f"{count(max(of_chunks), 'layer')} of a model chunk"
        )
    elif model.recompute_method == "uniform" and (uneven := [n for n in of_chunks if n % number]):
        yield (
            f'model.recompute_method "uniform": the {count(uneven[0], "layer")} of a model chunk do not divide '
            f"into units of model.recompute_num_layers {number}"
        )


def check_tensor_parallel(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
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


def check_expert_parallel(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    ep_size, experts = parallel.expert_model_parallel_size, model.own("num_moe_experts")
    if ep_size == 1:
        return
    name = f"parallel.expert_model_parallel_size {ep_size}"
    if experts is None:
        families = quoted(families_with("num_moe_experts"))
        yield f'{name}: the family "{model.family}" has no experts, only {families}; leave it out'
    elif experts % ep_size:
        quotient = f"{experts} / {ep_size} = {experts / ep_size:.2f}"
        yield f"model.num_moe_experts {experts} does not divide by {name} ({quotient})"
    if parallel.data_parallel_size % ep_size:
        yield (
            f"parallel.data_parallel_size {parallel.data_parallel_size} does not divide by {name}: data-parallel "
            "ranks of a replica divide the experts among them"
        )


def check_vocabulary(architecture: Architecture, parallel: ParallelConfig) -> Iterator[str]:
    """Yield why the vocabulary cannot be divided over the tensor-parallel ranks."""
    rows, tp_size = architecture.padded_vocab_size, parallel.tensor_model_parallel_size
    if rows % tp_size:
        yield (
            f"the padded vocabulary {rows} does not divide by parallel.tensor_model_parallel_size {tp_size} "
            f"({rows} / {tp_size} = {rows / tp_size:.2f}); "
            f"make model.make_vocab_size_divisible_by a multiple of {tp_size}"
        )
