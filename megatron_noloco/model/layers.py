"""Replacements for layers of Megatron-core, on any device: attention, norms, expert router, z-loss."""

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

try:  # NVIDIA's apex (GPU only), not the package of that name on PyPI
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine
except ImportError:
    fused_rms_norm_affine = None


class CausalAttention(nn.Module):
    """Causal attention by torch's fused scaled-dot-product kernels, with grouped heads and sliding windows.

    Replaces core's `DotProductAttention`, which materialises the scores and needs CUDA buffers.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.dropout = config.attention_dropout
        self.heads_are_split = not config.sequence_parallel
        self.softmax_scale = softmax_scale
        self.tokens_before = None if config.window_size is None else config.window_size[0]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object
    ) -> Tensor:
        """Return the attention's output, [tokens, batch, heads * channels].

        Args:
            query: [tokens, batch, heads, channels]; key and value have this rank's query groups as heads.
            attention_mask: see `document_mask`; None: causal.
        """
        tokens, mask = query.size(0), attention_mask
        if self.tokens_before is not None and self.tokens_before < tokens - 1:
            near = window(tokens, self.tokens_before, query.device)
            mask = near if mask is None else mask & near
        grouped = key.size(2) != query.size(2)
        if grouped and query.is_cuda and (mask is not None or query.dtype == torch.float32):
            # Of torch's fused kernels only flash attention, without mask and in 16 bits, takes grouped heads.
            each = query.size(2) // key.size(2)
            key, value = key.repeat_interleave(each, 2), value.repeat_interleave(each, 2)
            grouped = False
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks have different heads, so each has its own generator, as in core; not on a CPU.
        own_draws = get_cuda_rng_tracker().fork() if dropout and self.heads_are_split else nullcontext()
        with own_draws:
            context = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=self.softmax_scale,
                enable_gqa=grouped,
            )
        return context.permute(2, 0, 1, 3).flatten(2)


def document_mask(documents: Tensor) -> Tensor:
    """Return the mask of causal attention within documents.

    Args:
        documents: the number of each token's document, shape [batch, tokens].

    Returns bool of shape [batch, 1, tokens, tokens], True where a token (third dimension) attends to another:
    torch's convention, and the opposite of core's.
    """
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


@lru_cache(maxsize=2)
def window(tokens: int, tokens_before: int, device: torch.device) -> Tensor:
    """Return the mask of a sliding window: a token (row) attends to `tokens_before` earlier ones and itself."""
    index = torch.arange(tokens, device=device)
    distance = index[:, None] - index
    return (distance >= 0) & (distance <= tokens_before)


class Router(TopKRouter):
    """Core's router of tokens to experts, with logits in fp32 on any device.

    Core's own method moves the weights to a CUDA device, and computes in fp32 with Transformer Engine only.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [tokens, batch, experts] of hidden states [tokens, batch, channels] (overrides core's)."""
        return F.linear(input.float(), self.weight.float())


class RMSNorm(nn.RMSNorm):
    """Torch's root-mean-square norm in the model's precision, statistics in fp32; apex's kernel where it is there.

    Core's version without fused kernels keeps fp32 weights in a bf16 model and refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        if fused_rms_norm_affine is not None and hidden.is_cuda:
            return fused_rms_norm_affine(hidden, self.weight, self.weight.shape, self.eps)
        return super().forward(hidden)


class LayerNorm(nn.LayerNorm):
    """Torch's layer norm with a bias in the model's precision, statistics in fp32.

    Core's version without fused kernels refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)


NORMS: dict[str, type[nn.Module]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}  # core's names


class CrossEntropyWithZLoss(torch.autograd.Function):
    """Cross-entropy over a vocabulary that is split over tensor-parallel ranks, with a z-loss.

    The gradient is that of cross-entropy + coefficient * logsumexp(logits)^2.
    The z-loss (Chowdhery et al., "PaLM", arXiv 2204.02311, section 5) pulls the logsumexp to 0, so that logits do
    not drift. Only the gradient contains it: the returned losses are cross-entropies.

    Args of `apply`:
        logits: this rank's part of the vocabulary, shape [..., vocabulary / tp].
        labels: int64, shape [...]; the loss of a label < 0 is undefined, and should get no gradient.
        coefficient: of the z-loss.
        group: the tensor-parallel ranks, in the order of their parts of the vocabulary.

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
        of_logits = softmax.mul_((gradient * scale)[..., None])  # in place, since a vocabulary is large
        of_logits.scatter_add_(-1, places[..., None], -(gradient * here)[..., None])
        return of_logits.to(ctx.dtype), None, None, None
