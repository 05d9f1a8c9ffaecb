"""A run of a study by the trainer itself, under mpirun, with the figures that a simulation gives."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.monitor.run_log import RunLog

_LAUNCH = Path(__file__).parents[2] / "launch" / "mpirun.sh"


def train(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train; returns the last evaluation, and the mean model's loss at each.

    Args:
        folder: for the run, which is removed when it has ended well.

    Raises ValueError for a bad configuration, RuntimeError when the run fails; its log is then there.
    """
    run = Path(tempfile.mkdtemp(dir=folder)).resolve()
    raw = raw | {"training": raw["training"] | {"output_dir": str(run)}, "checkpoint": {"save_interval": 0}}
    ranks = RunConfig(**raw).parallel.world_size
    (run / "config.json").write_text(json.dumps(raw))
    command = ["sh", str(_LAUNCH), str(ranks), str(run / "config.json")]
    with (run / "log.txt").open("w") as log:
        code = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHON": sys.executable},
        ).returncode
    if code:
        raise RuntimeError(f"a run ended with exit code {code}; see {run / 'log.txt'}")
    found = evaluations(run)
    shutil.rmtree(run)
    return found


def evaluations(run: Path) -> dict[str, Any]:
    """Return the figures of a finished run. Each replica logs all losses, and the spread of its weights."""
    logs = RunLog(run).replicas
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
