"""The command `train`."""

import argparse
import os

from megatron_noloco.cli.errors import StoppedError
from megatron_noloco.job.leaving import FAILURE


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    train = commands.add_parser("train", help="train from one JSON file")
    train.add_argument("--config", required=True, help="the run's JSON")
    train.add_argument(
        "--progress", choices=("auto", "bar", "lines"), default="auto", help="auto: a bar on a terminal"
    )
    train.add_argument(
        "--replica", type=int, metavar="I", help="in a federation: which one this job is, from 0"
    )
    train.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from megatron_noloco.config import load_config

    config = load_config(args.config)

    from megatron_noloco.training.prepare import join_job, prepare  # import torch: only for a sound config

    prepared = prepare(config, os.environ, args.replica)
    joined = join_job(prepared)

    # Imports Megatron-core and DeepSpeed, which takes seconds: only for a run that can start.
    from megatron_noloco.federation.keeping_up import UntrainedError
    from megatron_noloco.outer import PartnerTimeoutError
    from megatron_noloco.training.build import build
    from megatron_noloco.training.health import NotFiniteError

    try:
        return 0 if build(prepared, *joined, args.progress).train() else FAILURE
    except (PartnerTimeoutError, UntrainedError, NotFiniteError) as error:
        raise StoppedError(str(error)) from None
    except (ValueError, OSError) as error:  # input was checked before: this needs a traceback
        raise RuntimeError("training failed") from error
