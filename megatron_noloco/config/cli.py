"""`python -m megatron_noloco config`: what may stand in a file, and whether a run can start from one."""

import argparse
import sys
from collections.abc import Callable

from megatron_noloco.config.explain import explain
from megatron_noloco.config.load import load_config
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.config.summary import describe
from megatron_noloco.config.wording import ConfigError
from megatron_noloco.spec.architecture import Architecture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--explain", action="store_true", help="every field: type, bounds, default, meaning")
    action.add_argument(
        "--check", metavar="FILE", help="check a file, and that what it names is there; starts nothing"
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="with --check: also check for N ranks")


def run(args: argparse.Namespace, check_start: Callable[[RunConfig], Architecture]) -> int:
    """The exit code: 0, or 2 when the file is wrong or a run could not start from it (the lines go to stderr).

    The banner goes to stdout also when only the start would fail: on another machine it may not.

    Args:
        check_start: what the start of a run checks without other processes; raises ValueError.
    """
    if args.explain:
        sys.stdout.write(explain())
        return 0
    try:
        config = load_config(args.check)
        world_size = args.world_size if args.world_size is not None else config.parallel.world_size
        topology = None if world_size is None else config.topology(world_size)
    except ConfigError as error:
        return _refused(args.check, error)
    architecture = config.architecture() if config.model.vocab_size is not None else None
    problem = None
    try:
        architecture = check_start(config)
    except ValueError as error:
        problem = error
    banner = [] if topology is None else describe(config, topology, architecture)
    ok = [] if problem else [f"{args.check}: ok"]
    sys.stdout.write("".join(f"{line}\n" for line in [*ok, *banner]))
    return _refused(args.check, problem) if problem else 0


def _refused(path: str, error: ValueError) -> int:
    """One line per problem, each with the file's name."""
    lines = [line if line.startswith(f"{path}: ") else f"{path}: {line}" for line in str(error).splitlines()]
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    return 2
