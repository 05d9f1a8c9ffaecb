"""All commands, and what becomes of their errors: `python -m megatron_noloco COMMAND`."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from megatron_noloco import __version__
from megatron_noloco.cli import config, data, doctor, huggingface, keys, plan, reading, train
from megatron_noloco.cli.errors import report
from megatron_noloco.cli.output import CHECKPOINT, say
from megatron_noloco.job.leaving import INTERRUPTED, abandon_job, leave, usage_error


def run(arguments: list[str] | None = None) -> NoReturn:
    """`main`, then leave the process with its exit code."""
    leave(main(arguments))


def main(arguments: list[str] | None = None) -> int:
    """The exit code of a command; `arguments` are the process's own by default."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        exit_code = INTERRUPTED
    except Exception as error:
        exit_code = report(error)
    abandon_job()
    return exit_code


class _Parser(argparse.ArgumentParser):
    """Wrong arguments are one line, from one rank of the job."""

    def error(self, message: str) -> NoReturn:
        sys.exit(usage_error(ValueError(f"{self.prog}: error: {message}")))


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="megatron_noloco", description="Train language models with NoLoCo."
    )
    parser.add_argument("--version", action="version", version=__version__)
    # `deepspeed` passes it to every process, before `train`; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True)
    train.add_command(commands)
    config.add_command(commands)
    plan.add_command(commands)
    data.add_command(commands)
    keys.add_command(commands)
    inspect = commands.add_parser("inspect", help="what a checkpoint holds, and whether it is complete")
    inspect.add_argument("checkpoint", nargs="+", type=Path, help=CHECKPOINT)
    inspect.set_defaults(run=_inspect)
    reading.add_commands(commands)
    doctor.add_command(commands)
    huggingface.add_commands(commands)
    return parser


def _inspect(args: argparse.Namespace) -> int:
    from megatron_noloco.checkpoint.inspect import inspect

    say(*inspect(args.checkpoint))
    return 0
