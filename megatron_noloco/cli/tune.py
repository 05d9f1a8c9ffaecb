"""The command `tune`: learning rates, from short runs."""

import argparse
import json
from pathlib import Path

from megatron_noloco.cli.exit_codes import StoppedError
from megatron_noloco.cli.options import Commands, add_command, say
from megatron_noloco.errors import UserError, prefix_errors_with
from megatron_noloco.files import writing

_MORE = """\
Trains with the model, the data and the rounds of the file, but a tenth as long. Learning rates are doubled and
halved until the best rates lie between worse rates; for the longer run they are lowered by a rule that was
measured. All rates of an optimizer are multiplied by the same factor. The command after "--" starts the trainer;
the path of a config is appended to it:

  tune my-run.json -- launch/mpirun.sh 8
  tune my-run.json -- torchrun --nproc-per-node 8 -m megatron_noloco train

A run of one rank needs no such command. A search that was stopped continues when `tune` is called again."""


def add_commands(commands: Commands) -> None:
    tune = add_command(
        commands,
        "tune",
        "find learning rates by short runs, and print the block to paste",
        "tune my-run.json -- launch/mpirun.sh 8",
        _MORE,
    )
    tune.add_argument("config", help="the run's JSON")
    launcher = "the command that starts the trainer's ranks"
    tune.add_argument("launcher", nargs="*", metavar="-- LAUNCHER", help=launcher)
    output = "folder of the short runs (default: training.output_dir with -tune at its end)"
    tune.add_argument("--output", type=Path, metavar="FOLDER", help=output)
    tune.set_defaults(run=_tune)


def _tune(args: argparse.Namespace) -> int:
    from megatron_noloco.config import load_config
    from megatron_noloco.job.launcher import trainer
    from megatron_noloco.preflight.trials import Trials

    config = load_config(args.config)
    if config.world_size != 1 and not args.launcher:
        ranks = "as many ranks as there are" if config.world_size is None else f"{config.world_size} ranks"
        raise UserError(
            f'{args.config}: {ranks} need a launcher; give it after "--", as in tune {args.config} -- '
            f"launch/mpirun.sh {config.world_size or 'N'}"
        )
    command = args.launcher or trainer()
    folder = args.output or Path(f"{Path(config.training.output_dir)}-tune")  # without a slash at its end
    with prefix_errors_with(args.config):
        trials = Trials(config, command, folder, say)
    with writing(folder, "--output"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        factor = trials.search()
    except RuntimeError as error:
        raise StoppedError(str(error)) from None
    say("", f"for {config.training.train_iters:,} local steps:", json.dumps(trials.block(factor)))
    return 0
