"""`python -m megatron_noloco config`: what may stand in a file, and whether one is right."""

import argparse
import sys

from megatron_noloco.config.explain import explain
from megatron_noloco.config.load import load_config
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.config.summary import describe
from megatron_noloco.config.wording import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--explain", action="store_true", help="every field: type, bounds, default, meaning")
    action.add_argument("--check", metavar="FILE", help="check a file; the data it names need not exist")
    parser.add_argument("--world-size", type=int, metavar="N", help="with --check: also check for N ranks")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 2 when the file is wrong (the lines go to stderr)."""
    if args.explain:
        sys.stdout.write(explain())
        return 0
    try:
        config = load_config(args.check)
        banner = _banner(config, args.world_size)
    except ConfigError as error:
        sys.stderr.write("".join(f"{_named(args.check, problem)}\n" for problem in error.problems))
        return 2
    sys.stdout.write("\n".join([f"{args.check}: ok", *banner]) + "\n")
    return 0


def _named(path: str, problem: str) -> str:
    """Topology problems come without the file's name."""
    return problem if problem.startswith(f"{path}: ") else f"{path}: {problem}"


def _banner(config: RunConfig, world_size: int | None) -> list[str]:
    """Empty while the number of ranks is known neither from the command line nor from the file."""
    parallel = config.parallel
    if world_size is None and parallel.replicas != "auto":
        world_size = (
            parallel.replicas
            * parallel.pipeline_model_parallel_size
            * parallel.data_parallel_size
            * parallel.tensor_model_parallel_size
        )
    return [] if world_size is None else describe(config, config.topology(world_size))
