"""The z-loss is in the gradient, whole, on any number of tensor-parallel ranks, and not in the losses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_noloco.data.samples import IGNORED
from megatron_noloco.model.layers import CrossEntropyWithZLoss
from tests.kit.ranks import run_ranks

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
