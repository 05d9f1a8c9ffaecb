"""Short runs of the trainer itself: the user's file made short, and the process that trains with it.

`config --check --dry-run` sees in a short run the memory that a rank really needs.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.config.optimizer_block import schedule_as_deepspeed
from megatron_noloco.errors import UserError
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.monitor.run_log import ReplicaLog
from megatron_noloco.preflight.fit import LIBRARIES_BYTES
from megatron_noloco.preflight.memory import fullest_stage
from megatron_noloco.settings import FederationSettings

_PHASES = ("warmup_num_steps", "decay_num_steps", "total_num_steps")  # of schedules
_DRY_STEPS = 2  # the first makes the optimizer's state
PEAKS = ("warmup_min_lr", "warmup_max_lr")  # of schedules: learning rates in place of the optimizer's


def shortened(config: RunConfig, steps: int, factor: float = 1.0) -> RunConfig:
    """Return the config of a run of `steps` local steps, with learning rates times `factor`.

    All phases of its schedule are shortened alike. It evaluates the mean model at its end, and writes little.
    """
    whole, optimizer, scheduler = config.training.train_iters, config.optimizer, config.scheduler
    if scheduler is not None:
        params = schedule_as_deepspeed(scheduler, whole)["params"]
        phases = {name: params[name] for name in _PHASES if name in params}
        # Rounded down, so that together they are no longer than the run; a phase that there is has a step.
        phases = {name: max(min(1, phase), phase * steps // whole) for name, phase in phases.items()}
        if (total := phases.pop("total_num_steps", None)) is not None:
            phases["total_num_steps"] = max(total, sum(phases.values()))
        peaks = {name: _times(factor, params[name]) for name in PEAKS if params.get(name) is not None}
        scheduler = scheduler.replace(params=scheduler.params.replace(**phases, **peaks))
    rates = {name: _times(factor, rate) for name, rate in optimizer.rates.items()}
    return config.replace(
        **({} if scheduler is None else {"scheduler": scheduler}),
        optimizer=optimizer.replace(params=optimizer.params.replace(**rates)),
        training=config.training.replace(train_iters=steps, exit_duration_minutes=None),
        checkpoint=config.checkpoint.replace(save_interval=0, load="auto"),
        evaluation=config.evaluation.replace(interval=0, mean_model=True),
        tensorboard=config.tensorboard.replace(enabled=False),
        wandb=config.wandb.replace(enabled=False),
    )


def _times(factor: float, rate: float) -> float:
    """Return a learning rate times a factor, in three digits."""
    return float(f"{factor * rate:.3g}")


def trainer(ranks: int = 1) -> list[str]:
    """Return the command that starts the trainer with so many ranks here; the path of a config is appended."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [sys.executable, "-m", *launcher * (ranks > 1), "megatron_noloco", "train"]


def train_in(folder: Path, config: RunConfig, command: Sequence[str]) -> int:
    """Train in a folder, whose log.txt gets what the trainer writes; return the exit code.

    Args:
        command: starts the trainer; the path of a config is appended.

    Raises UserError for a command that cannot be started.
    """
    folder.mkdir(exist_ok=True)
    config = config.replace(training=config.training.replace(output_dir=str(folder)))
    (folder / "config.json").write_text(json.dumps(config.given(), indent=1))
    with (folder / "log.txt").open("a") as log:
        try:
            process = subprocess.Popen(
                [*command, str(folder / "config.json")], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        except OSError as error:
            raise UserError(f"{command[0]}: cannot be started: {error.strerror}") from None
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()  # it was interrupted as well, and saves
            raise


def dry_run(config: RunConfig, architecture: Architecture) -> str:
    """Train one replica for two local steps, in a folder that is removed; return a line about its memory.

    It compares the rank that has needed most with what `plan` says: torch's memory on a GPU, resident memory on a
    CPU. Raises RuntimeError where the training fails.
    """
    config = config.replace(
        noloco=config.noloco.replace(
            local_steps=_DRY_STEPS, overlap_steps=0, fragments=1, sites=None, routing="off"
        ),
        parallel=config.parallel.replace(replicas=1),
        federation=FederationSettings(),
    )
    short = shortened(config, _DRY_STEPS)
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
        f"dry run: {_DRY_STEPS} local steps of one replica ({ranks} rank{'s' * (ranks > 1)}): peak of "
        f"{'GPU' if on_gpu else 'resident'} memory {measured / 1e9:.2f} GB, plan says {planned / 1e9:.2f} GB; "
        "exchanges need more"
    )
