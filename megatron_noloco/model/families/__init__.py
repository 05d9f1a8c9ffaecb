"""Model families: a file each, with a table of its parameters. A new one is added to FAMILIES."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_noloco.model.families.family import Family, MegatronOptions, Parameter, Rows, Table
from megatron_noloco.model.families.llama import Llama
from megatron_noloco.spec.architecture import Architecture

FAMILIES: dict[str, Family] = {family.name: family for family in (Llama(),)}

__all__ = [
    "FAMILIES",
    "Family",
    "MegatronOptions",
    "Parameter",
    "Rows",
    "Table",
    "architecture_of",
    "family_of",
    "table_of",
]


def family_of(architecture: Architecture) -> Family:
    return FAMILIES[architecture.family]


def table_of(architecture: Architecture) -> Table:
    return _table(family_of(architecture), architecture)


@lru_cache(maxsize=8)
def _table(family: Family, architecture: Architecture) -> Table:
    return Table(tuple(family.rows(architecture)), architecture.num_layers)


def architecture_of(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture that Hugging Face's `config.json` describes; raises ValueError, in one line."""
    family = FAMILIES.get(hf_config.get("model_type"))  # type: ignore[arg-type]  # None is not in it
    if family is None:
        known = ", ".join(f'"{name}"' for name in FAMILIES)
        raise ValueError(f"model_type is {hf_config.get('model_type')!r}; only {known} can be imported")
    return family.architecture(hf_config)
