"""The config of a saved run, possibly of an earlier version, in today's form."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_noloco.config.deepspeed_block import DeepSpeedConfig
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.errors import UserError
from megatron_noloco.fields import Settings

_PEAK_UP_TO_0_2 = 1e-3  # of WarmupDecayLR without warmup_max_lr: DeepSpeed's default
_GONE = {
    "noloco": ("grouping",),
    "checkpoint": ("fewer_replicas",),
    "data": ("reset_position_ids",),  # it had no effect
    "federation": ("relay", "notice_command", "slots", "streams"),
}


def config_of_checkpoint(saved: dict[str, Any]) -> RunConfig:
    """Return the config that a checkpoint was saved with.

    Its method, optimizer and schedule have the settings of the checkpoint only where these are still accepted:
    also a checkpoint of settings that are gone can be exported.
    """
    saved = upgrade_saved_config(saved)
    try:
        return RunConfig(**saved)
    except UserError:
        without = {"evaluation", "tensorboard", "wandb", "federation", "scheduler"}
        known = {name: saved[name] for name in saved.keys() & RunConfig.model_fields.keys() - without}
        for name, definition in DeepSpeedConfig.model_fields.items():
            if name in known and isinstance(block := definition.default, Settings):
                fields = type(block).model_fields
                known[name] = {key: value for key, value in known[name].items() if key in fields}
        if "fp16" in known:
            known["fp16"] = {"enabled": known["fp16"].get("enabled", False)}
        method = {name: saved["noloco"][name] for name in ("enabled", "method") if name in saved["noloco"]}
        return RunConfig(**{**known, "optimizer": {"type": "AdamW"}, "noloco": method})


def upgrade_saved_config(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a saved run in today's form, with the values that its version took for what is gone."""
    blocks = {name: dict(saved.get(name) or {}) for name in _GONE}
    if not blocks["federation"].get("rendezvous"):
        blocks["federation"] = {}  # the other settings had no effect, and other defaults
    for block, names in _GONE.items():
        for name in names:
            blocks[block].pop(name, None)
    for block, old, upgraded in _RENAMED:
        if old in blocks[block] and (now := upgraded(blocks[block][old])) is not None:
            del blocks[block][old]
            blocks[block] |= now
    data = blocks["data"]
    if data.get("train_data_path") is not None:
        data.pop("split", None)  # it had no effect
    # Up to version 0.2.0 special tokens that a text spells out were tokens; bytes spell out none.
    data.setdefault("split_special_tokens", data.get("tokenizer_type", "byte") == "byte")
    of_today: dict[str, Any] = {name: block for name, block in blocks.items() if block or name in saved}
    return saved | of_today | _with_peak(saved)


def _with_peak(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block `scheduler` of a saved run where it has no peak."""
    scheduler = saved.get("scheduler") or {}
    params = scheduler.get("params", {})
    if scheduler.get("type") != "WarmupDecayLR" or "warmup_max_lr" in params:
        return {}
    of_optimizer = saved["optimizer"]["params"]
    rates = {of_optimizer.get(name) for name in ("muon_lr", "adam_lr")} - {None} or {
        of_optimizer.get("lr", _PEAK_UP_TO_0_2)
    }
    peak = None if rates == {_PEAK_UP_TO_0_2} else _PEAK_UP_TO_0_2
    return {"scheduler": {**scheduler, "params": {**params, "warmup_max_lr": peak}}}


# Each returns the settings of today that an old value stands for; None for a value that is no old form.


def _overlap(overlap: Any) -> dict[str, Any] | None:
    if not isinstance(overlap, dict):
        return None
    return {"overlap_steps": overlap.get("delay_steps", "auto") if overlap.get("mode") == "delayed" else 0}


def _routing(routing: Any) -> dict[str, Any] | None:
    return {"routing": routing.get("interval", "off")} if isinstance(routing, dict) else None


def _local_steps(local_steps: Any) -> dict[str, Any] | None:
    return {"skip_local_steps": local_steps == "auto"} if local_steps in ("auto", "all") else None


def _encryption(encryption: Any) -> dict[str, Any] | None:
    return {"encryption": "tls"} if encryption == "curve" else None


_RENAMED: tuple[tuple[str, str, Callable[[Any], dict[str, Any] | None]], ...] = (
    ("noloco", "overlap", _overlap),
    ("noloco", "routing", _routing),
    ("federation", "encryption", _encryption),
    ("federation", "local_steps", _local_steps),
)
