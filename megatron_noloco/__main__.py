"""The command line: `python -m megatron_noloco train|config|data|inspect|export|import|generate|evaluate`."""

import argparse
import atexit
import os
import signal
import sys
import time
import traceback
from typing import NoReturn

from megatron_noloco import __version__
from megatron_noloco.config import RunConfig, load_config
from megatron_noloco.config import cli as config_cli
from megatron_noloco.data import cli as data_cli
from megatron_noloco.huggingface import cli as publish_cli
from megatron_noloco.spec.architecture import Architecture

USAGE_ERROR = 2
FAILURE = 1
_LATE_RANK_0_SECONDS = 10.0


def run(arguments: list[str] | None = None) -> NoReturn:
    """`main`, then leave the process as at any exit, but without tearing the interpreter down.

    Gloo's threads outlive their groups, and one may still be freeing the tensors of its last collective. To ask
    an interpreter that is being torn down for its lock ends that thread inside a C++ destructor, and so the
    process, with SIGABRT, after all has gone well.
    """
    code = main(arguments)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
        return _usage_error(error)


def _check_start(config: RunConfig) -> Architecture:
    from megatron_noloco.training.preflight import check_start  # imports torch: only for a sound config

    return check_start(config)[1]


def _train(parsed: argparse.Namespace) -> int:
    try:
        config = load_config(parsed.config)
        from megatron_noloco.training import run  # imports torch: only for a sound config

        prepared = run.prepare(config, os.environ)
    except (ValueError, OSError) as error:  # a ConfigError is one; a file that cannot be read
        return _usage_error(error)
    code = FAILURE
    try:
        joined = run.join_job(prepared)
    except (ValueError, OSError) as error:
        code = _usage_error(error)
    except Exception:
        traceback.print_exc()
    else:
        try:
            return 0 if run.train(prepared, *joined, parsed.progress) else FAILURE
        except run.PartnerTimeoutError as error:
            sys.stderr.write(f"{error}\n")
        except Exception:
            traceback.print_exc()
    run.abandon_job(code)
    return code


def _usage_error(error: ValueError | OSError) -> int:
    """One clear line per problem, from one rank of the job.

    Launchers end the job when a first rank leaves. So the others let rank 0 speak, which has seen the same in all
    likelihood; who is still there afterwards has seen it alone. Who is ended meanwhile leaves with the same exit
    code, since launchers report the largest.
    """
    rank_variables = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    if any(os.environ.get(name, "0") != "0" for name in rank_variables):
        before = signal.signal(signal.SIGTERM, lambda *_: os._exit(USAGE_ERROR))
        time.sleep(_LATE_RANK_0_SECONDS)
        signal.signal(signal.SIGTERM, before)
    sys.stderr.write(f"{error}\n")
    return USAGE_ERROR


if __name__ == "__main__":
    run()
