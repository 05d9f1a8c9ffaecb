"""Which layers a pipeline stage has."""

from megatron_noloco.config.wording import count
from megatron_noloco.model.architecture import PipelineSplit


def layers_of_chunks(split: PipelineSplit, num_layers: int, stages: int, virtual: int = 1) -> list[list[int]]:
    """Layers of the model chunks, [stage][virtual stage]; every one has a layer.

    Raises ValueError, in one line, where there is no such division. Core's own functions give the same
    numbers, and are tested to.
    """
    ends = [split.num_layers_in_first_pipeline_stage, split.num_layers_in_last_pipeline_stage]
    given = [layers for layers in ends if layers is not None]
    counted = split.account_for_embedding_in_pipeline_split + split.account_for_loss_in_pipeline_split
    if given and counted:
        raise ValueError(
            "parallel.num_layers_in_..._pipeline_stage and parallel.account_for_..._in_pipeline_split both "
            "say how many layers the first and the last stage have; give one of them"
        )
    if (given or counted) and stages == 1:
        raise ValueError(
            "parallel.num_layers_in_..._pipeline_stage and parallel.account_for_..._in_pipeline_split need "
            "parallel.pipeline_model_parallel_size > 1"
        )
    rest, others = num_layers + counted - sum(given), stages - len(given)
    if others == 0 and virtual > 1:
        raise ValueError(
            "with virtual stages and both parallel.num_layers_in_first_pipeline_stage and _last_ there must "
            "be stages between, by whose number Megatron-core divides; give one of the two"
        )
    if others == 0 != rest or rest < 0 or (others and rest % (others * virtual)):
        what = f"{count(num_layers, 'layer')} (model.num_layers)"
        what += f" and {counted} for embedding or loss" * bool(counted)
        what += f" less {' and '.join(map(str, given))} at the ends" * bool(given)
        into = count(others, "stage")
        into += f" x {count(virtual, 'virtual stage')} = {others * virtual}" * (virtual > 1)
        raise ValueError(f"{what} do not divide into {into}")
    of_stages = [rest // others if others else 0] * stages
    for stage, layers in zip((0, -1), ends, strict=True):
        if layers is not None:
            of_stages[stage] = layers
            if layers % virtual:
                raise ValueError(
                    f"{count(layers, 'layer')} of a stage do not divide into {count(virtual, 'virtual stage')}"
                )
    chunks = [[layers // virtual] * virtual for layers in of_stages]
    chunks[0][0] -= split.account_for_embedding_in_pipeline_split
    chunks[-1][-1] -= split.account_for_loss_in_pipeline_split
    if min(map(min, chunks)) < 1:
        raise ValueError(
            f"{count(num_layers, 'layer')} (model.num_layers) leave a stage without any ({shown(chunks)})"
        )
    return chunks


def shown(chunks: list[list[int]]) -> str:
    """Such as "3 + 4 + 3", or with virtual stages "1/2 + 2/2"."""
    return " + ".join("/".join(map(str, stage)) for stage in chunks)
