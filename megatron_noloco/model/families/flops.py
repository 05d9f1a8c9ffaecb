"""The floating-point operations of a training step: those of its matrix products, as the model defines them."""

import math

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of


def training_flops(architecture: Architecture) -> int:
    """Forward and backward, for one sample of `seq_length` tokens.

    A product of [m, k] and [k, n] takes 2 m k n operations, and twice as many in the backward pass: once for the
    gradient of each factor. So a sample of s tokens takes

        3 * (2 * s * W  +  num_layers * 4 * num_attention_heads * kv_channels * P)

    W: the weights that multiply a token, which are all matrices but the embedding, a table to look up. The output
        layer counts, padding included, also where its weight is the embedding's. Of the experts only
        `moe_router_topk` count.
    P: pairs of a query and a key, for each of which a head computes a product of two vectors of `kv_channels`
        numbers, and adds such a vector to its result. The causal mask leaves s (s + 1) / 2 pairs, fewer with a
        sliding window.

    These are the model's own operations, which MFU is about (PaLM, arXiv 2204.02311, appendix B), by the count of
    Narayanan et al. 2021 (arXiv 2104.04473, appendix) without what recomputation repeats. Both papers count all
    s^2 pairs. Norms, activations and the softmax are left out. Pairs of tokens of different documents count, even
    where they do not attend to each other.
    """
    a = architecture
    matrices = [row for row in table_of(a) if len(row.shape) == 2 and not row.name.startswith("embedding.")]
    of_experts = sum(math.prod(row.shape) for row in matrices if ".experts." in row.name)
    weights = sum(math.prod(row.shape) for row in matrices) - of_experts
    if of_experts:
        assert a.num_moe_experts is not None
        assert a.moe_router_topk is not None
        weights += of_experts // a.num_moe_experts * a.moe_router_topk
    keys = min(a.sliding_window or a.seq_length, a.seq_length)  # of the last query
    pairs = keys * (keys + 1) // 2 + (a.seq_length - keys) * keys
    attention = 4 * a.num_attention_heads * a.kv_channels * pairs
    return 3 * (2 * a.seq_length * weights + a.num_layers * attention)
