"""Model families: a class each, with a table of its parameters. A new one is added to FAMILIES.

No torch at import: `config --check` must answer at once.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.llama import Family, Llama
from megatron_noloco.model.families.mistral import Mistral, Mixtral
from megatron_noloco.model.families.qwen import Qwen2, Qwen3
from megatron_noloco.model.families.table import Parameter, Rows, Table

FAMILIES: dict[str, Family] = {
    family.name: family for family in (Llama(), Qwen2(), Qwen3(), Mistral(), Mixtral())
}

__all__ = [
    "FAMILIES",
    "Family",
    "Parameter",
    "Rows",
    "Table",
    "architecture_of",
    "families_with",
    "family_of",
    "table_of",
    "training_flops",
]


def family_of(architecture: Architecture) -> Family:
    """Return the family of a model."""
    return FAMILIES[architecture.family]


def families_with(field: str) -> list[str]:
    """Return the names of the families that have `field` as a field of their own; empty if all have it."""
    return [name for name, family in FAMILIES.items() if field in family.own_fields]


def table_of(architecture: Architecture) -> Table:
    """Return the table of a model's parameters."""
    return _table(family_of(architecture), architecture)


@lru_cache(maxsize=8)
def _table(family: Family, architecture: Architecture) -> Table:
    return Table(tuple(family.rows(architecture)), architecture.num_layers)


def architecture_of(hf_config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that Hugging Face's `config.json` describes; raises ValueError, in one line."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    if family is None:
        known = ", ".join(f'"{name}"' for name in FAMILIES)
        raise ValueError(f"model_type is {hf_config.get('model_type')!r}; only {known} can be imported")
    return family.architecture(hf_config)


def training_flops(architecture: Architecture) -> int:
    """Return the floating-point operations of a training step on one sample of `seq_length` tokens.

    These are the operations of its matrix products, forward and backward, as the model defines them.

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
