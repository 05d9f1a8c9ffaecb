"""Two local steps of one replica, to see the memory that a rank really needs: `config --check --dry-run`."""

import tempfile
from pathlib import Path

import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.monitor.run_log import ReplicaLog
from megatron_noloco.preflight.fit import LIBRARIES_BYTES
from megatron_noloco.preflight.memory import fullest_stage
from megatron_noloco.preflight.short_run import shortened, train_in, trainer
from megatron_noloco.settings import FederationSettings

_STEPS = 2  # the first makes the optimizer's state


def dry_run(config: RunConfig, architecture: Architecture) -> str:
    """Train one replica for two local steps, in a folder that is removed; return a line about its memory.

    It compares the rank that has needed most with what `plan` says: torch's memory on a GPU, resident memory on a
    CPU. Raises RuntimeError where the training fails.
    """
    config = config.replace(
        noloco=config.noloco.replace(local_steps=_STEPS, sites=None, routing="off"),
        parallel=config.parallel.replace(replicas=1),
        federation=FederationSettings(),
    )
    short = shortened(config, _STEPS)
    short = short.replace(
        training=short.training.replace(log_interval=1),
        checkpoint=short.checkpoint.replace(load="none"),
        evaluation=short.evaluation.replace(iters=0, full=False),
    )
    ranks = config.parallel.replica_size
    with tempfile.TemporaryDirectory() as folder:
        if code := train_in(Path(folder), short, trainer(ranks)):
            log = (Path(folder) / "log.txt").read_text(errors="replace")
            lines = log.strip().splitlines() or ["it has written nothing"]
            raise RuntimeError(f"the dry run has ended with exit code {code}: {lines[-1]}")
        run = ReplicaLog(Path(folder) / "replica_00")
        run.update()
        measured = max(int(row.get("memory/peak_bytes", 0)) for row in run.rows)
    memory = fullest_stage(short, architecture, config.topology(ranks))
    on_gpu = torch.cuda.is_available()
    planned = memory.device_bytes + (0 if on_gpu else memory.host_bytes + LIBRARIES_BYTES)
    return (
        f"dry run: {_STEPS} local steps of one replica ({ranks} rank{'s' * (ranks > 1)}): peak of "
        f"{'GPU' if on_gpu else 'resident'} memory {measured / 1e9:.2f} GB, plan says {planned / 1e9:.2f} GB; "
        "exchanges need more"
    )
