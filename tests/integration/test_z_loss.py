"""The z-loss is in the gradient, whole, on any number of tensor-parallel ranks, and not in the losses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_noloco.data.samples import IGNORED
from megatron_noloco.model.layers import CrossEntropyWithZLoss
from tests.harness import run_ranks
from tests.integration.tiny import tiny, train

VOCABULARY, COEFFICIENT = 12, 0.3


def batch() -> tuple[Tensor, Tensor]:
    """Logits [3, 2, vocabulary], the last two of which are padding, and labels, one of them ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(3, 2, VOCABULARY, generator=generator)
    logits[..., -2:] = -torch.inf
    labels = torch.randint(VOCABULARY - 2, (3, 2), generator=generator)
    labels[1, 1] = IGNORED
    return logits, labels


def losses_and_gradient(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    logits, labels = batch()
    part = logits.chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    losses: Any = CrossEntropyWithZLoss.apply(part, labels, COEFFICIENT, dist.group.WORLD)
    counted = labels != IGNORED
    ((losses * counted).sum() / counted.sum()).backward()
    assert part.grad is not None
    return losses.detach()[counted], part.grad


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradient_and_losses_are_those_of_plain_torch(ranks: int) -> None:
    found = run_ranks(ranks, losses_and_gradient)
    logits, labels = batch()
    logits.requires_grad_()
    counted = labels != IGNORED
    cross_entropy = F.cross_entropy(logits[counted], labels[counted])
    z_loss = COEFFICIENT * logits.logsumexp(dim=-1)[counted].square().mean()
    (cross_entropy + z_loss).backward()
    assert logits.grad is not None
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found], dim=-1), logits.grad)
    for losses, _ in found:
        torch.testing.assert_close(losses.mean(), cross_entropy)


def run(ranks: int, coefficient: float, **parallel: int) -> tuple[Tensor, Tensor]:
    """Losses and gradient norms of some steps."""
    changes = {"model": {"z_loss_coeff": coefficient, "init_method_std": 0.2}, "parallel": parallel}
    found = run_ranks(ranks, train, tiny(changes), 3)
    return torch.tensor(found[-1]["losses"]), torch.tensor(found[-1]["grad_norms"])


def test_stages_and_tensor_parallel_ranks_train_alike_with_it() -> None:
    losses, norms = run(1, 1.0)
    split_losses, split_norms = run(4, 1.0, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    torch.testing.assert_close(split_losses, losses, rtol=0, atol=1e-4)
    torch.testing.assert_close(split_norms, norms, rtol=1e-4, atol=0)
    without_losses, without_norms = run(1, 0.0)
    torch.testing.assert_close(losses[0], without_losses[0])  # of the same weights
    assert (norms[0] / without_norms[0] - 1).abs() > 0.1
