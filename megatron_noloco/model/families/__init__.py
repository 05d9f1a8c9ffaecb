"""Model families: a file each, with a table of its parameters. A new one is added to FAMILIES."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.family import Family, MegatronOptions
from megatron_noloco.model.families.llama import Llama
from megatron_noloco.model.families.mistral import Mistral
from megatron_noloco.model.families.mixtral import Mixtral
from megatron_noloco.model.families.qwen2 import Qwen2
from megatron_noloco.model.families.qwen3 import Qwen3
from megatron_noloco.model.families.table import Parameter, Rows, Table

FAMILIES: dict[str, Family] = {
    family.name: family for family in (Llama(), Qwen2(), Qwen3(), Mistral(), Mixtral())
}

__all__ = [
    "FAMILIES",
    "Family",
    "MegatronOptions",
    "Parameter",
    "Rows",
    "Table",
    "architecture_of",
    "families_with",
    "family_of",
    "table_of",
]


def family_of(architecture: Architecture) -> Family:
    return FAMILIES[architecture.family]


def families_with(field: str) -> list[str]:
    """The families that have a field of their own; none for a field that all have."""
    return [name for name, family in FAMILIES.items() if field in family.own_fields]


def table_of(architecture: Architecture) -> Table:
    return _table(family_of(architecture), architecture)


@lru_cache(maxsize=8)
def _table(family: Family, architecture: Architecture) -> Table:
    return Table(tuple(family.rows(architecture)), architecture.num_layers)


def architecture_of(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture that Hugging Face's `config.json` describes; raises ValueError, in one line."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    if family is None:
        known = ", ".join(f'"{name}"' for name in FAMILIES)
        raise ValueError(f"model_type is {hf_config.get('model_type')!r}; only {known} can be imported")
    return family.architecture(hf_config)
