"""A good configuration, and edits to it."""

import copy
from pathlib import Path
from typing import Any

from megatron_noloco.config import RunConfig

MISSING = object()
FEDERATION = {
    "parallel.replicas": MISSING,
    "noloco.routing": "off",
    "federation": {"rendezvous": "file://there", "key_file": "key"},
}
GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "noloco": {"recipe": "paper", "local_steps": 5, "final_average": False, "routing": "round"},
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 32,
    },
    "parallel": {"replicas": 4, "pipeline_model_parallel_size": 2},
    "data": {"text": "python-stdlib"},
    "training": {"train_iters": 10},
}


# The least that a config needs; a test changes the blocks that it is about.
SMALLEST: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 16,
    },
    "noloco": {"recipe": "paper", "local_steps": 2},
    "data": {"text": "somewhere"},
    "training": {"train_iters": 2},
}


def edited(edits: dict[str, Any]) -> dict[str, Any]:
    """GOOD with dotted keys set, or removed where the value is MISSING."""
    raw = copy.deepcopy(GOOD)
    for dotted, value in edits.items():
        *blocks, name = dotted.split(".")
        place = raw
        for block in blocks:
            place = place.setdefault(block, {})
        if value is MISSING:
            del place[name]
        else:
            place[name] = copy.deepcopy(value)
    return raw


def config(**edits: Any) -> RunConfig:
    """GOOD with edits; `__` stands for the dot."""
    return RunConfig(**edited({name.replace("__", "."): value for name, value in edits.items()}))


FILES = Path(__file__).parents[1] / "other_programs"
