"""The command `config`: what may stand in a file, and whether one is right."""

import argparse
import sys

from megatron_noloco.cli.output import say


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    config = commands.add_parser("config", help="explain or check a config file")
    action = config.add_mutually_exclusive_group(required=True)
    action.add_argument("--explain", action="store_true", help="every field: type, bounds, default, meaning")
    action.add_argument("--check", metavar="FILE", help="check a file; the data it names need not exist")
    config.add_argument("--world-size", type=int, metavar="N", help="with --check: also check for N ranks")
    config.set_defaults(run=_config)


def _config(args: argparse.Namespace) -> int:
    from megatron_noloco.config import explain
    from megatron_noloco.config.check import check_file

    if args.explain:
        sys.stdout.write(explain())
    else:
        say(f"{args.check}: ok", *check_file(args.check, args.world_size))
    return 0
