"""The command line: `python -m megatron_noloco train|config|data|inspect|export|import|generate|evaluate`."""

import argparse
import os
import sys
import traceback
from typing import NoReturn

from megatron_noloco import __version__
from megatron_noloco.extras import require_trainer

require_trainer()  # before what needs it is imported

from megatron_noloco.config import RunConfig, load_config
from megatron_noloco.config import cli as config_cli
from megatron_noloco.data import cli as data_cli
from megatron_noloco.huggingface import cli as publish_cli
from megatron_noloco.job.leaving import FAILURE, abandon_job, leave, usage_error
from megatron_noloco.spec.architecture import Architecture


def run(arguments: list[str] | None = None) -> NoReturn:
    """`main`, then leave the process with its exit code."""
    leave(main(arguments))


def main(arguments: list[str] | None = None) -> int:
    """The exit code of a command; `arguments` are the process's own by default."""
    parser = argparse.ArgumentParser(prog="megatron_noloco", description="Train Llamas with NoLoCo.")
    parser.add_argument("--version", action="version", version=__version__)
    # `deepspeed` passes it to every process, before `train`; the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train from one JSON file")
    train.add_argument("--config", required=True, help="the run's JSON")
    train.add_argument(
        "--progress", choices=("auto", "bar", "lines"), default="auto", help="auto: a bar on a terminal"
    )
    config_cli.add_arguments(commands.add_parser("config", help="explain or check a config file"))
    inspect = commands.add_parser("inspect", help="what a checkpoint holds, and whether it is whole")
    inspect.add_argument("checkpoint", help="a step folder, or a run's output_dir (its latest checkpoint)")
    data_cli.add_arguments(commands.add_parser("data", help="what a Megatron dataset holds"))
    publish_cli.add_commands(commands)
    parsed = parser.parse_args(arguments)
    match parsed.command:
        case "train":
            return _train(parsed)
        case "config":
            return config_cli.run(parsed, _check_start)
        case "data":
            return data_cli.run(parsed)
        case "inspect":
            from megatron_noloco.checkpoint import inspect as inspection  # imports torch

            return inspection.run(parsed.checkpoint)
    try:
        return parsed.run(parsed)
    except (ValueError, OSError) as error:  # a file that cannot be read or written
        return usage_error(error)


def _check_start(config: RunConfig) -> Architecture:
    from megatron_noloco.training.preflight import check_start  # imports torch: only for a sound config

    return check_start(config)[1]


def _train(parsed: argparse.Namespace) -> int:
    try:
        config = load_config(parsed.config)
        from megatron_noloco.training import run  # imports torch: only for a sound config

        prepared = run.prepare(config, os.environ)
    except (ValueError, OSError) as error:  # a ConfigError is one; a file that cannot be read
        return usage_error(error)
    code = FAILURE
    try:
        joined = run.join_job(prepared)
    except (ValueError, OSError) as error:
        code = usage_error(error)
    except Exception:
        traceback.print_exc()
    else:
        try:
            return 0 if run.train(prepared, *joined, parsed.progress) else FAILURE
        except run.PartnerTimeoutError as error:
            sys.stderr.write(f"{error}\n")
        except Exception:
            traceback.print_exc()
    abandon_job(code)
    return code


if __name__ == "__main__":
    run()
