"""Model families: a class each, with a table of its parameters.

To add a family:

1. Write a subclass of `Family` (with experts of `Mixture`) in a file here. It has the table of parameters, what to
   set in Megatron-core, and Hugging Face's config in both directions.
2. Add it to FAMILIES. All else follows from the table: initial weights, slices, counts, decay, Muon's matrices,
   the mean model, export and import. Only a norm that adds 1 to its weights or scaled embeddings need changes in
   `model/layers.py` or `model/stage.py`, and layers that keep other activations in `preflight/memory.py`.
3. Add it to `FAMILY_MODELS` (tests/kit/tiny.py), `THEIRS` (test_transformers.py), `MODELS` (hf_folders.py),
   `NOT_READ` (test_huggingface.py), with biases to `OF_FAMILY` (test_parameter_groups.py),
   and to docs/families.md.

Torch is not imported here, since that would slow down `config --check`.
"""

import math
from functools import lru_cache
from typing import Any

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.family import EMBEDDING, HEAD, ROPE_CONSTANTS, Family
from megatron_noloco.model.families.llama import Llama
from megatron_noloco.model.families.mistral import Mistral, Mixtral
from megatron_noloco.model.families.qwen import Qwen2, Qwen3, Qwen3Moe
from megatron_noloco.model.families.starcoder import Starcoder2
from megatron_noloco.model.families.table import Parameter, Rows, Table

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (Llama(), Qwen2(), Qwen3(), Qwen3Moe(), Mistral(), Mixtral(), Starcoder2())
}

__all__ = [
    "EMBEDDING",
    "FAMILIES",
    "HEAD",
    "ROPE_CONSTANTS",
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
    """Return the names of the families in whose `own_fields` a field is; empty if all families have it."""
    return [name for name, family in FAMILIES.items() if field in family.own_fields]


def table_of(architecture: Architecture) -> Table:
    """Return the table of a model's parameters."""
    return _table(family_of(architecture), architecture)


@lru_cache(maxsize=8)
def _table(family: Family, architecture: Architecture) -> Table:
    return Table(tuple(family.rows(architecture)), architecture.num_layers)


def architecture_of(config: Any) -> Architecture:
    """Return the architecture that a config of transformers, of one of the families, describes.

    Raises UserError, in one line.
    """
    return FAMILIES[config.model_type].architecture(config)


def training_flops(architecture: Architecture) -> int:
    """Return the floating-point operations of the matrix products in a training step on one sample.

    A product of [m, k] and [k, n] takes 2 m k n operations, and twice as many in the backward pass: once for the
    gradient of each factor. So a sample of s tokens takes

        3 * (2 * s * W  +  num_layers * 4 * num_attention_heads * kv_channels * P)

    W: the weights that multiply a token: all matrices but the embedding, which is looked up. The output layer
        counts with its padding, also where its weight is the embedding's; of the experts `moe_router_topk` count.
    P: pairs of a query and a key. For each a head multiplies two vectors of `kv_channels` numbers, and adds such
        a vector to its result. The causal mask leaves s (s + 1) / 2 pairs, a sliding window fewer.

    MFU is defined by these operations (PaLM, arXiv 2204.02311, appendix B). The count is that of Narayanan et al.
    (2021, arXiv 2104.04473, appendix), without recomputation; both papers count all s^2 pairs. Norms, activations
    and softmax are left out. Pairs of tokens in different documents count, even if a mask separates them.
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
