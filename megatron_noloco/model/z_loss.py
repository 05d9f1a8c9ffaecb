"""Cross-entropy over a vocabulary that tensor-parallel ranks share, with the gradient of a z-loss added."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CrossEntropyWithZLoss(torch.autograd.Function):
    """The cross-entropy of each token; its gradient is that of cross-entropy + coefficient * logsumexp(logits)^2.

    The z-loss (Chowdhery et al., "PaLM", arXiv 2204.02311, section 5) draws the logsumexp to 0, so that logits do
    not drift. It is in the gradient only, so that losses in the log and in evaluations are cross-entropies.

    Args of `apply`:
        logits: this rank's part of the vocabulary, shape [..., vocabulary / tp].
        labels: int64, shape [...]; the loss of one < 0 means nothing, and should get no gradient.
        coefficient: of the z-loss.
        group: the tensor-parallel ranks, in the order of their parts.

    Returns fp32 of shape [...].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, coefficient: float, group: Any) -> Tensor:
        largest = logits.amax(dim=-1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        exponentials = (logits - largest[..., None]).exp_()  # fp32, as `largest` is
        places = labels - dist.get_rank(group) * logits.size(-1)
        here = (places >= 0) & (places < logits.size(-1))
        places = places.where(here, 0)
        wanted = logits.gather(-1, places[..., None])[..., 0].float().where(here, 0)
        sums = torch.stack([exponentials.sum(dim=-1), wanted])
        dist.all_reduce(sums, group=group)
        logsumexp = sums[0].log() + largest
        softmax = exponentials.div_(sums[0][..., None])
        ctx.save_for_backward(softmax, places, here, 1 + 2 * coefficient * logsumexp)
        ctx.dtype = logits.dtype
        return logsumexp - sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, places, here, scale = ctx.saved_tensors
        of_logits = softmax.mul_((gradient * scale)[..., None])  # in its place: a vocabulary is large
        of_logits.scatter_add_(-1, places[..., None], -(gradient * here)[..., None])
        return of_logits.to(ctx.dtype), None, None, None
