"""The shards of an engine: whatever divides a model, they have its canonical vector once."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_noloco.attach.shards import Engine, Shard, held
from megatron_noloco.attach.torch_module import Replicated
from megatron_noloco.engine import zero
from megatron_noloco.plans.canonical import matrices

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6)


class Model(nn.Module):
    """Parameters of drawn shapes; every element is its place in the canonical vector."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        named = {f"p{at}": tuple(shape) for at, shape in enumerate(shapes)}
        for name, matrix in matrices(named).items():
            values = torch.arange(matrix.start, matrix.stop, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(values.view(named[name])))


def shown(engine: Engine) -> dict[int, float]:
    """By the places in the canonical vector, the elements that an engine shows there."""
    vector, found = engine.read(), dict[int, float]()
    for block in held(engine) or []:
        for row in range(block.rows):
            for column in range(block.width):
                place = block.first + row * block.matrix.columns + column
                found[place] = float(vector[block.own + row * block.width + column])
    return found


@given(SHAPES, st.integers(1, 4), st.lists(st.integers(0, 6)), st.data())
def test_ranks_with_copies_have_each_element_once(
    shapes: list[list[int]], ranks: int, edges: list[int], data: st.DataObject
) -> None:
    """Also where the optimizer steps flat tensors with several parameters each."""
    model = Model(shapes)
    parameters = data.draw(st.permutations(list(model.parameters())))
    cuts = sorted({0, *(edge for edge in edges if edge < len(parameters)), len(parameters)})
    groups = [parameters[start:stop] for start, stop in pairwise(cuts)]
    flats = [(torch.cat([one.detach().flatten() for one in group]), group) for group in groups]
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_process_group_ranks", lambda group: list(range(ranks)))
        patch.setattr("torch.distributed.get_rank", lambda group: group)
        for rank in range(ranks):
            places = shown(Replicated([model], flats, rank))  # type: ignore[arg-type]
            assert all(place == value for place, value in places.items())
            found += places
    assert sorted(found) == list(range(sum(one.numel() for one in parameters)))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 7))
def test_zero_exchanges_each_element_once(sizes: list[int], ranks: int, padding: int) -> None:
    total = sum(sizes) + padding
    length = -(-total // ranks) or 1
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_rank", lambda group: group)
        for rank in range(ranks):
            optimizer = SimpleNamespace(
                bit16_groups=[parameters],
                single_partition_of_fp32_groups=[torch.zeros(length)],
                real_dp_process_group=[rank],
            )
            ((flat, pieces),) = zero.flats_of(optimizer) or []
            own = [place for one in pieces for place in range(one.own, one.own + one.end - one.begin)]
            assert own == list(range(len(flat)))
            found += [(id(one.parameter), at) for one in pieces if one.parameter is not None
                      for at in range(one.begin, one.end)]  # fmt: skip
    assert sorted(found) == sorted((id(one), at) for one in parameters for at in range(one.numel()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_is_live_and_finds_its_elements_in_a_moment(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.arange(6, dtype=dtype).view(2, 3))
    shard = Shard("weight", weight, 1, 4, ())
    shard.of(weight).fill_(9)
    assert weight.flatten().tolist() == [0, 9, 9, 9, 4, 5]
    assert shard.of(torch.arange(6).view(2, 3)).tolist() == [1, 2, 3]
