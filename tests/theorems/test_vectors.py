"""Weights as one flat vector, read and written in pieces."""

import pytest
import torch
from torch import Tensor

from megatron_noloco.outer import TorchWeights
from megatron_noloco.outer.weights import Joined


def test_torch_weights_are_one_vector_in_order() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).to(torch.bfloat16))
    weights = TorchWeights(model.parameters())
    flat = torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])
    assert weights.length == len(flat) == 11
    assert torch.equal(weights.read(), flat)
    middle = torch.empty(5)
    weights.read_into(middle, 4)
    assert torch.equal(middle, flat[4:9])
    with weights.writing() as write:
        write(5, torch.arange(5.0))
    flat[5:10] = torch.arange(5.0)
    assert torch.equal(weights.read(), flat)
    assert model[1].weight.dtype == torch.bfloat16
    outside = pytest.raises(ValueError, match="elements 9 to 12 lie outside a vector of 11")
    with outside, weights.writing() as write:
        write(9, torch.ones(3))


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("stop", range(8))
def test_every_range_lies_in_the_tensors_that_have_it(start: int, stop: int) -> None:
    """Tensors without elements, at the ends and in between, are never yielded."""
    lengths = [0, 3, 0, 0, 1, 3, 0]
    parts = torch.arange(sum(lengths)).split(lengths)
    if start > stop or stop > 7:
        with pytest.raises(ValueError, match="outside a vector of 7"):
            list(Joined(parts).overlaps(start, stop - start))
        return
    found = list(Joined(parts).overlaps(start, stop - start))
    assert torch.equal(torch.cat([part for part, _ in found] or [parts[0]]), torch.arange(start, stop))
    assert [place.stop for _, place in found[:-1]] == [place.start for _, place in found[1:]]
    assert all(len(part) for part, _ in found)


@pytest.mark.parametrize("wrong", [[], [torch.ones(2, dtype=torch.int64)], [torch.ones(2, 3).t()]])
def test_torch_weights_refuse_what_they_cannot_hold(wrong: list[Tensor]) -> None:
    with pytest.raises(ValueError):
        TorchWeights(wrong)


class Refreshed(TorchWeights):
    times = 0

    def refresh(self) -> None:
        self.times += 1


def test_leaving_refreshes_unless_an_exception() -> None:
    weights, kept = Refreshed([torch.ones(3)]), torch.empty(3)
    with weights.kept_in(kept):
        with weights.writing() as write:
            write(0, torch.zeros(3))
        assert (weights.times, weights.read().tolist()) == (1, [0.0] * 3)
    assert (weights.times, weights.read().tolist()) == (2, [1.0] * 3)
    with pytest.raises(ValueError, match="outside"), weights.kept_in(kept), weights.writing() as write:
        write(0, torch.zeros(4))
    assert (weights.times, weights.read().tolist()) == (2, [1.0] * 3)
