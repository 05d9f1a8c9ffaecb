"""The command `config`: what a config file may hold, and whether a run can start from one."""

import argparse
import sys
from typing import TYPE_CHECKING

from megatron_noloco.cli.errors import naming
from megatron_noloco.cli.options import Commands, say
from megatron_noloco.job.start_up import importing

if TYPE_CHECKING:
    from megatron_noloco.config import RunConfig


def add_command(commands: Commands) -> None:
    config = commands.add_parser("config", help="explain or check a config file")
    action = config.add_mutually_exclusive_group()
    action.add_argument("--explain", action="store_true", help="every field: type, bounds, default, meaning")
    action.add_argument(
        "--check", metavar="FILE", help="check a file, and that what it names is there; starts nothing"
    )
    action.add_argument(
        "--restarts",
        metavar="FILE",
        help="for scripts that start a run again: its output_dir; on stderr, why a new start would not continue",
    )
    config.add_argument("--world-size", type=int, metavar="N", help="with --check: also check for N ranks")
    config.set_defaults(run=_config)


def _config(args: argparse.Namespace) -> int:
    from megatron_noloco.config import explain, load_config

    if args.explain:
        sys.stdout.write(explain())
    elif args.restarts:
        config = load_config(args.restarts)
        reason = _why_it_repeats(config)
        if reason:
            sys.stderr.write(f"{args.restarts}: {reason}\n")
        say(config.training.output_dir)
    elif args.check:
        with naming(args.check):
            _check(args.check, args.world_size)
    else:
        raise ValueError("megatron_noloco config: give one of --explain, --check FILE or --restarts FILE")
    return 0


def _why_it_repeats(config: "RunConfig") -> str:
    """Return why a new start after a failure repeats all local steps; empty where it continues from a save."""
    checkpoint = config.checkpoint
    if checkpoint.load == "none":
        return (
            'checkpoint.load "none": every new start begins with step 0; "auto" continues from the last save'
        )
    if checkpoint.load != "auto":
        return (
            f'checkpoint.load "{checkpoint.load}": every new start begins there; "auto" continues from the last '
            "save in training.output_dir"
        )
    if not checkpoint.save_interval:
        return "checkpoint.save_interval 0: nothing is saved before a failure, so every new start begins anew"
    return ""


def _check(path: str, world_size: int | None) -> None:
    """Write the banner of a run; raises ValueError when the file is wrong, or a run could not start from it.

    When only the start would fail the banner is written all the same: on another machine it may succeed.
    """
    from megatron_noloco.config import describe, load_config

    config = load_config(path)
    world_size = config.world_size if world_size is None else world_size
    topology = None if world_size is None else config.topology(world_size)

    with importing():  # torch: only for a sound config
        from megatron_noloco.preflight.fit import shortage_of_all
        from megatron_noloco.training.prepare import check_start

    architecture = config.architecture() if config.model.vocab_size is not None else None
    problem = None
    try:
        architecture = check_start(config)[1]
        say(f"{path}: ok")
    except ValueError as error:
        problem = error
    if topology is not None:
        say(*describe(config, topology, architecture))
        short = None if architecture is None else shortage_of_all(config, architecture, topology)
        if short is not None:
            say(f"all on this machine: {short}")
    if problem is not None:
        raise problem
