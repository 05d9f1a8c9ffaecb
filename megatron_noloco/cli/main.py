"""All commands, and the handling of their errors: `python -m megatron_noloco COMMAND`."""

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from megatron_noloco import __version__
from megatron_noloco.cli import config, convert, data, huggingface, invite, preflight, reading, train, tune
from megatron_noloco.cli.exit_codes import report
from megatron_noloco.cli.options import CHECKPOINT, add_command, say
from megatron_noloco.errors import UserError
from megatron_noloco.files import writing
from megatron_noloco.job.leaving import INTERRUPTED, abandon_job, leave, usage_error


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run `main`, then leave the process with its exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end silently when the reader of the output has gone
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see __main__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    leave(main(arguments))


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: without the name of the program; None: those of this process.
    """
    try:
        args = _parser().parse_args(arguments)
        exit_code: int = args.run(args)
        sys.stdout.flush()  # a full disk is an error of the command
        return exit_code
    except KeyboardInterrupt:
        exit_code = INTERRUPTED
    except Exception as error:
        exit_code = report(error)
    abandon_job()
    return exit_code


def help_pages() -> Iterator[tuple[str, str]]:
    """Yield the program and each of its commands as they are called, with their `--help`."""
    waiting = [_parser()]
    for parser in waiting:
        yield parser.prog, parser.format_help()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, from one rank of the job."""

    def error(self, message: str) -> NoReturn:
        sys.exit(usage_error(UserError(f"{self.prog}: error: {message}")))


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="megatron-noloco",
        description="Train language models with NoLoCo on machines with slow links.",
        epilog="`COMMAND --help` has an example of each command.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    # The launcher `deepspeed` passes it to every process, before `train`; it is not used.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train.add_commands(commands)
    config.add_commands(commands)
    convert.add_commands(commands)
    preflight.add_commands(commands)
    tune.add_commands(commands)
    data.add_commands(commands)
    keys = add_command(
        commands, "keys", "make the key of a federation, which every replica needs", "keys my-run.key"
    )
    keys.add_argument("file", help="the file to write; it must not exist yet")
    keys.set_defaults(run=_keys)
    invite.add_commands(commands)
    inspect = add_command(
        commands,
        "inspect",
        "print what a checkpoint holds, and whether it is complete",
        "inspect runs/my-run",
    )
    inspect.add_argument("checkpoint", nargs="+", type=Path, help=CHECKPOINT)
    inspect.set_defaults(run=_inspect)
    reading.add_commands(commands)
    huggingface.add_commands(commands)
    return parser


def _keys(args: argparse.Namespace) -> int:
    from megatron_noloco.federation.keys import Keys

    with writing(args.file, "file"):
        Keys.make(Path(args.file))
    say(f"{args.file}: copy it to each replica's host, readable by you alone; federation.key_file names it")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from megatron_noloco.checkpoint.ensemble import inspect

    say(*inspect(args.checkpoint))
    return 0
