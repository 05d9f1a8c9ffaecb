"""Short runs of the trainer itself: the user's file made short, and the process that trains with it.

`config --check --dry-run` sees in a short run the memory that a rank really needs.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.config.optimizer_block import schedule_as_deepspeed
from megatron_noloco.errors import UserError
from megatron_noloco.job.launcher import trainer
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.monitor.run_log import ReplicaLog
from megatron_noloco.preflight.memory import Memory, fullest_stage
from megatron_noloco.preflight.plan import memory_table
from megatron_noloco.settings import FederationSettings

_PHASES = ("warmup_num_steps", "decay_num_steps", "total_num_steps")  # of schedules
_DRY_STEPS = 2  # with a round after each: the first makes the state of both optimizers
_LIBRARIES = 600_000_000  # bytes of a rank on a CPU that it shares with no other rank: measured, 0.55 GB
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


class DryRun(NamedTuple):
    """The memory of the rank of a short run that has needed most.

    Attributes:
        ranks: of the replica that has trained.
        computed: as `plan` has it.
        libraries: bytes of libraries, which `measured` has besides: none on a GPU.
        measured: bytes at the peak: of torch on a GPU, resident on a CPU.
    """

    ranks: int
    computed: Memory
    libraries: int
    measured: int

    def lines(self) -> Iterator[str]:
        """Yield what is measured below what is computed."""
        several = "s" * (self.ranks > 1)
        yield f"dry run: {_DRY_STEPS} local steps of one replica ({self.ranks} rank{several}), without exchanges"
        yield memory_table(
            self.computed, [("libraries, about", self.libraries), ("measured peak", self.measured)]
        )


def dry_run(config: RunConfig, architecture: Architecture) -> DryRun:
    """Train one replica for two local steps, in a folder that is removed; raises RuntimeError where that fails."""
    config = config.replace(
        noloco=config.noloco.replace(local_steps=1, overlap_steps=0, fragments=1, sites=None, routing="off"),
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
    computed = fullest_stage(short, architecture, config.topology(ranks))
    return DryRun(ranks, computed, 0 if torch.cuda.is_available() else _LIBRARIES, measured)
