"""Settings in the forms of earlier versions, translated to today's. Version 0.3 is the last that reads them."""

import json
from collections.abc import Callable
from typing import Any

from megatron_noloco.config.optimizer_block import with_peak
from megatron_noloco.fields import shown


def in_todays_form(given: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a configuration in today's form, and a line for each setting that has an old form.

    Values that no version accepted stay as they are: the checks name them.
    """
    lines = []
    for block, old, translated in _TRANSLATIONS:
        settings = given.get(block)
        if not isinstance(settings, dict) or old not in settings:
            continue
        now = translated(settings[old])
        rest = {name: value for name, value in settings.items() if name != old}
        if now is None or now.keys() & rest.keys():
            continue
        given = given | {block: rest | now}
        write = [f'write "{name}": {json.dumps(value)}' for name, value in now.items()] or ["leave it out"]
        lines.append(f"{block}.{old} {shown(settings[old])}: {write[0]}")
    return given, tuple(lines)


def of_saved_run(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a saved run, with the values that its version took for settings left out."""
    federation = saved.get("federation") or {}
    if not federation.get("rendezvous"):
        federation = {}  # the other settings had no effect, and other defaults
    federation = {name: value for name, value in federation.items() if name not in _GONE}
    data = dict(saved.get("data") or {})
    data.pop("reset_position_ids", None)  # it had no effect
    if data.get("train_data_path") is not None:
        data.pop("split", None)  # it had no effect
    # Up to version 0.2.0 special tokens that a text spells out were tokens; bytes spell out none.
    data.setdefault("split_special_tokens", data.get("tokenizer_type", "byte") == "byte")
    return saved | {"federation": federation, "data": data} | with_peak(saved)


# Each returns the settings of today that an old value stands for; None for a value that is no old form.


def _overlap(overlap: Any) -> dict[str, Any] | None:
    if not isinstance(overlap, dict) or not overlap.keys() <= {"mode", "delay_steps"}:
        return None
    mode, steps = overlap.get("mode", "none"), overlap.get("delay_steps", "auto")
    if mode == "delayed":
        return {"overlap_steps": steps}
    return {"overlap_steps": 0} if mode == "none" and steps in ("auto", 0) else None


def _routing(routing: Any) -> dict[str, Any] | None:
    if not isinstance(routing, dict) or not routing.keys() <= {"interval"}:
        return None
    interval = routing.get("interval", "off")
    return {"routing": interval} if isinstance(interval, str) else None


def _only(left: Any) -> Callable[[Any], dict[str, Any] | None]:
    """Return the translation of a setting that is gone, of whose values only one is left."""
    return lambda value: {} if (type(value), value) == (type(left), left) else None


def _local_steps(local_steps: Any) -> dict[str, Any] | None:
    return {"skip_local_steps": local_steps == "auto"} if local_steps in ("auto", "all") else None


def _encryption(encryption: Any) -> dict[str, Any] | None:
    return {"encryption": "tls"} if encryption == "curve" else None


_TRANSLATIONS: tuple[tuple[str, str, Callable[[Any], dict[str, Any] | None]], ...] = (
    ("noloco", "overlap", _overlap),
    ("noloco", "routing", _routing),
    ("noloco", "grouping", _only("replica")),
    ("checkpoint", "fewer_replicas", _only("drop")),
    ("data", "reset_position_ids", _only(False)),
    ("federation", "encryption", _encryption),
    ("federation", "local_steps", _local_steps),
    ("federation", "relay", _only(False)),
    ("federation", "notice_command", _only(None)),
)
_GONE = ("relay", "notice_command", "slots", "streams")  # from the block `federation`
