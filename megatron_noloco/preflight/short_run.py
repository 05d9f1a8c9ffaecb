"""Short runs of the trainer itself: the user's file made short, and the process that trains with it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_noloco.config import RunConfig
from megatron_noloco.config.optimizer_block import schedule_as_deepspeed, warm_up_of
from megatron_noloco.errors import UserError

_PHASES = ("decay_num_steps", "total_num_steps")  # of schedules, beside the warm-up
PEAKS = ("warmup_min_lr", "warmup_max_lr")  # of schedules: learning rates in place of the optimizer's


def shortened(config: RunConfig, steps: int, factor: float = 1.0) -> RunConfig:
    """Return the config of a run of `steps` local steps, with learning rates times `factor`.

    All phases of its schedule are shortened alike. It evaluates the mean model at its end, and writes little.
    """
    whole, optimizer, scheduler = config.training.train_iters, config.optimizer, config.scheduler
    if scheduler is not None:
        params = schedule_as_deepspeed(scheduler, whole)["params"]
        warm_up, _ = warm_up_of(scheduler.type, params)
        phases = {"warmup_num_steps": warm_up} | {name: params[name] for name in _PHASES if name in params}
        # Rounded down, so that together they are no longer than the run.
        phases = {name: max(min(1, phase), phase * steps // whole) for name, phase in phases.items()}
        peaks = {name: params[name] * factor for name in PEAKS if params.get(name) is not None}
        scheduler = scheduler.replace(params=scheduler.params.replace(**phases, **peaks))
    rates = {name: rate * factor for name, rate in optimizer.rates.items()}
    return config.replace(
        **({} if scheduler is None else {"scheduler": scheduler}),
        optimizer=optimizer.replace(params=optimizer.params.replace(**rates)),
        training=config.training.replace(train_iters=steps, exit_duration_minutes=None),
        checkpoint=config.checkpoint.replace(save_interval=0, load="auto"),
        evaluation=config.evaluation.replace(interval=0, mean_model=True),
        tensorboard=config.tensorboard.replace(enabled=False),
        wandb=config.wandb.replace(enabled=False),
    )


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
