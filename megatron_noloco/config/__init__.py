"""Config: the user's one JSON file, checked whole before anything starts, and the values that it stands for.

Nothing here imports torch or an engine, but for the rates of a schedule, which DeepSpeed's own schedule gives.
"""

from megatron_noloco.config.explain import explain, schema
from megatron_noloco.config.load import load_config, saved_config
from megatron_noloco.config.resolve import Resolved, resolve
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.config.summary import Known, describe, facts_in_words

__all__ = [
    "Known",
    "Resolved",
    "RunConfig",
    "describe",
    "explain",
    "facts_in_words",
    "load_config",
    "resolve",
    "saved_config",
    "schema",
]
