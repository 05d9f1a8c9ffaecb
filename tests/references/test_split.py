"""Which layers a pipeline stage has: our numbers are Megatron-core's, and so is what is refused."""

from dataclasses import asdict
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_noloco.config.parallel_block import layers_of_chunks
from megatron_noloco.model.architecture import PipelineSplit

ends = st.none() | st.integers(1, 4)
splits = st.builds(PipelineSplit, ends, ends, st.booleans(), st.booleans())


def core_config(split: PipelineSplit, num_layers: int, stages: int, virtual: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_dtype="fp32",
        use_cpu_initialization=True,
        **asdict(split),
    )


@settings(max_examples=200)
@given(splits, st.integers(1, 12), st.integers(2, 4), st.integers(1, 3))
def test_layers_are_where_core_builds_them(
    split: PipelineSplit, num_layers: int, stages: int, virtual: int
) -> None:
    core = built_by_core(split, num_layers, stages, virtual)
    try:
        chunks = layers_of_chunks(split, num_layers, stages, virtual)
    except ValueError:
        assert core is None
        return
    assert core == chunks
    config, before = core_config(split, num_layers, stages, virtual), 0
    for vp, pp in product(range(virtual), range(stages)):  # in the order of the model
        assert get_transformer_layer_offset(config, vp if virtual > 1 else None, pp) == before
        before += chunks[pp][vp]
    assert before == num_layers


def built_by_core(split: PipelineSplit, num_layers: int, stages: int, virtual: int) -> list[list[int]] | None:
    """Layers, [stage][virtual stage]; None where core refuses, or would leave a stage or layers out."""
    try:
        config = core_config(split, num_layers, stages, virtual)
        chunks = [
            [get_num_layers_to_build(config, vp if virtual > 1 else None, pp) for vp in range(virtual)]
            for pp in range(stages)
        ]
        get_transformer_layer_offset(config, virtual - 1 if virtual > 1 else None, stages - 1)
    except (ValueError, AssertionError, ZeroDivisionError):
        return None
    return chunks if min(map(min, chunks)) > 0 and sum(map(sum, chunks)) == num_layers else None
