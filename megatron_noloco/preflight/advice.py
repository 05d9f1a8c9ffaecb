"""What to change where a model does not fit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_noloco.config import ConfigError, RunConfig
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import fullest_stage


def changes_that_save(
    config: RunConfig, architecture: Architecture, topology: Topology
) -> Iterator[tuple[str, int, int]]:
    """Changes of the file, one at a time: what to write, ranks of a replica, bytes on a GPU of its fullest rank.

    Those that the file does not permit, or that do not save any, are left out.
    """
    now = fullest_stage(config, architecture, topology)[2].device_bytes
    candidates: list[dict[str, Any]] = [
        {"noloco": {"slow_weights": "host"}},
        {
            "model": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        },
        {"train_micro_batch_size_per_gpu": config.micro_batch_size // 2},
        {"parallel": {"data_parallel_size": 2 * topology.dp}},
        {"parallel": {"pipeline_model_parallel_size": 2 * topology.pp}},
        {"parallel": {"tensor_model_parallel_size": 2 * topology.tp}},
    ]
    for change in candidates:
        changed = _changed(config, change)
        if changed is not None:
            layout = replace(
                topology,
                pp=changed.parallel.pipeline_model_parallel_size,
                tp=changed.parallel.tensor_model_parallel_size,
                dp=changed.parallel.data_parallel_size,
            )
            memory = fullest_stage(changed, architecture, layout)[2]
            if memory.device_bytes < now:
                yield _written(change), layout.replica_size, memory.device_bytes


def _changed(config: RunConfig, change: dict[str, Any]) -> RunConfig | None:
    raw = config.to_dict()
    raw.pop("train_batch_size")  # it follows
    for block, value in change.items():
        if raw[block] == value or (isinstance(value, dict) and value.items() <= raw[block].items()):
            return None
        raw[block] = {**raw[block], **value} if isinstance(value, dict) else value
    if "train_micro_batch_size_per_gpu" in change:
        raw["gradient_accumulation_steps"] *= 2
    raw["parallel"] = {**raw["parallel"], "replicas": "auto"}
    try:
        return RunConfig.from_dict(raw)
    except ConfigError:
        return None


def _written(change: dict[str, Any]) -> str:
    ((name, value),) = change.items()
    if not isinstance(value, dict):
        return f"{name} {value}, gradient_accumulation_steps doubled"
    return ", ".join(f"{name}.{field} {setting}" for field, setting in value.items())
