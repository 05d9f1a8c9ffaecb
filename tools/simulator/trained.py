"""A run of a study by the trainer itself, with the figures that a simulation gives."""

from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_noloco.config import RunConfig
from tools.runner import launched


def train(raw: dict[str, Any], _: Path) -> dict[str, Any]:
    """Train; returns the last evaluation, and the mean model's loss at each.

    Each replica logs all losses, and the spread of its weights.
    """
    ranks = RunConfig(**raw).world_size
    assert ranks is not None, 'a study has no "auto" replicas'
    logs, _said = launched(raw | {"checkpoint": {"save_interval": 0}}, ranks)
    by_replica = [log.rows_of("evaluation") for log in logs]
    last = by_replica[0][-1]
    spreads = [rows[-1]["validation/spread"] or 0.0 for rows in by_replica]  # null: one replica
    return {
        "step": last["step"],
        "replica_losses": last["validation/replica_losses"],
        "mean_model_loss": last["validation/mean_model_loss"],
        "spread": fmean(spread**2 for spread in spreads) ** 0.5,
        "sent_bytes": max(log.rows_of("step")[-1].get("total/sent_bytes", 0) for log in logs),
        "history": [[row["step"], row["validation/mean_model_loss"]] for row in by_replica[0]],
    }
