"""Two local steps of one replica, to see the memory that a rank really needs: `config --check --dry-run`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.monitor.run_log import ReplicaLog
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.fit import LIBRARIES_BYTES
from megatron_noloco.preflight.memory import fullest_stage
from megatron_noloco.settings import FederationSettings

_STEPS = 2  # the first makes the optimizer's state


class Peak(NamedTuple):
    """The memory of the rank that has needed most, in bytes.

    Attributes:
        ranks: of the replica.
        measured: peak of torch's memory on a GPU, of resident memory on a CPU.
        planned: what `plan` says.
    """

    ranks: int
    measured: int
    planned: int

    def __str__(self) -> str:
        where = "GPU memory" if torch.cuda.is_available() else "resident memory"
        return (
            f"dry run: {_STEPS} local steps of one replica ({self.ranks} rank{'s' * (self.ranks > 1)}): peak of "
            f"{where} {self.measured / 1e9:.2f} GB, plan says {self.planned / 1e9:.2f} GB; exchanges need more"
        )


def dry_run(config: RunConfig, architecture: Architecture) -> Peak:
    """Train one replica for two local steps, in a folder that is removed. Raises RuntimeError if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        config = _shortest(config, folder)
        topology = config.topology(config.parallel.replica_size)
        file, log = Path(folder) / "config.json", Path(folder) / "log.txt"
        file.write_text(json.dumps(config.given()))
        with log.open("w") as output:
            ended = subprocess.run(_command(file, topology), stdout=output, stderr=output, check=False)
        if ended.returncode:
            lines = log.read_text(errors="replace").strip().splitlines() or ["it has written nothing"]
            raise RuntimeError(f"the dry run has ended with exit code {ended.returncode}: {lines[-1]}")
        run = ReplicaLog(config.training.folder_of(0))
        run.update()
        measured = max(int(row.get("memory/peak_bytes", 0)) for row in run.rows)
    memory = fullest_stage(config, architecture, topology)[2]
    if torch.cuda.is_available():
        return Peak(topology.world_size, measured, memory.gpu_bytes - memory.nccl)
    return Peak(topology.world_size, measured, memory.device_bytes + memory.host_bytes + LIBRARIES_BYTES)


def _shortest(config: RunConfig, folder: str) -> RunConfig:
    return config.replace(
        noloco=config.noloco.replace(local_steps=_STEPS, sites=None, routing="off"),
        parallel=config.parallel.replace(replicas=1),
        federation=FederationSettings(),
        training=config.training.replace(
            train_iters=_STEPS, log_interval=1, output_dir=folder, exit_duration_minutes=None
        ),
        checkpoint=config.checkpoint.replace(save_interval=0, load="none"),
        evaluation=config.evaluation.replace(iters=0, full=False),
        tensorboard=config.tensorboard.replace(enabled=False),
        wandb=config.wandb.replace(enabled=False),
    )


def _command(file: Path, topology: Topology) -> list[str]:
    train = ["megatron_noloco", "train", str(file)]
    if topology.world_size == 1:
        return [sys.executable, "-m", *train]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(topology.world_size)]
    return [sys.executable, "-m", *launcher, "-m", *train]
