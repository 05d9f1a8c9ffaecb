"""Config: the user's one JSON file, checked whole before anything starts, without torch or DeepSpeed."""

from megatron_noloco.config.blocks import (
    ModelConfig,
    NolocoConfig,
    ParallelConfig,
    RoutingConfig,
    TrainingConfig,
)
from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.config.explain import explain
from megatron_noloco.config.load import load_config
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.config.summary import describe
from megatron_noloco.config.wording import ConfigError

__all__ = [
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "NolocoConfig",
    "ParallelConfig",
    "RoutingConfig",
    "RunConfig",
    "TrainingConfig",
    "describe",
    "explain",
    "load_config",
]
