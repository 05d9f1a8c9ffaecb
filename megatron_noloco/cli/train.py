"""The command `train`."""

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING

from megatron_noloco.cli.exit_codes import LostError, StoppedError
from megatron_noloco.cli.options import Commands, add_command, say
from megatron_noloco.job import activity
from megatron_noloco.job.lasting_output import lasting_output
from megatron_noloco.job.launcher import may_be_first, read_world, trainer
from megatron_noloco.job.leaving import FAILURE, lost_connection
from megatron_noloco.job.run_folder import FolderLostError
from megatron_noloco.job.start_up import importing

if TYPE_CHECKING:
    from megatron_noloco.config import RunConfig

_LOST = (
    "{who}; the connection was lost: another process of the job was killed, or its host is gone. "
    "The launcher, the scheduler or the kernel's log (out of memory) may say which, and why"
)


_LAUNCHERS = """\
A job of a federation on one machine needs no launcher: the command starts a process for each GPU of its layout.
Otherwise this command is one process of a run, and a launcher starts all N of them; N is replicas x pipeline x
tensor x data parallel sizes:

  launch/mpirun.sh N my-run.json        mpirun --bind-to none -n N python -m megatron_noloco train my-run.json
  launch/torchrun.sh N my-run.json      torchrun --nproc-per-node N -m megatron_noloco train my-run.json
  launch/deepspeed.sh N my-run.json     deepspeed --num_gpus N --no_local_rank --module megatron_noloco train ...
  sbatch launch/slurm.sh my-run.json    srun --mpi=pmix python -m megatron_noloco train my-run.json

Open MPI binds each of one or two processes to one core without --bind-to none (MPICH has no such option). It needs
--oversubscribe for more processes than cores, and as root --allow-run-as-root; launch/mpirun.sh adds both."""


def add_commands(commands: Commands) -> None:
    train = add_command(
        commands, "train", "train, or continue a run that was stopped", "train my-run.json", _LAUNCHERS
    )
    config = train.add_mutually_exclusive_group(required=True)
    config.add_argument("config", nargs="?", help="the run's JSON")
    config.add_argument("--config", dest="named", help=argparse.SUPPRESS)  # as DeepSpeed's scripts have it
    progress = "auto: a bar on a terminal, lines elsewhere"
    train.add_argument("--progress", choices=("auto", "bar", "lines"), default="auto", help=progress)
    replica = (
        "in a federation: number of this job's replica, from 0 (default after `join`: that of the invitation)"
    )
    train.add_argument("--replica", type=int, metavar="I", help=replica)
    train.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from megatron_noloco.config import load_config

    config = load_config(args.config or args.named)
    _start_ranks(config, args)

    with importing():  # torch: only for a sound config
        from megatron_noloco.federation.catch_up import UntrainedError
        from megatron_noloco.job.watchdog import Watchdog
        from megatron_noloco.outer import PartnerTimeoutError
        from megatron_noloco.outer.health import NotFiniteError
        from megatron_noloco.training.separate_jobs import StoppedAtStartError
        from megatron_noloco.training.start import start

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a lost connection is an error, which is reported
    # The launchers under launch/deepspeed.sh ignore it, and so do the processes that they start.
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with lasting_output(), Watchdog(config.training.watchdog_seconds):
        try:
            run = start(config, os.environ, args.replica, args.progress)
            return 0 if run.train() else FAILURE
        except StoppedAtStartError as why:
            if may_be_first(os.environ):
                say(str(why))
            return 0
        except (FolderLostError, PartnerTimeoutError, UntrainedError, NotFiniteError) as error:
            raise StoppedError(str(error)) from None
        except Exception as error:
            lost = lost_connection(error)
            if lost is None:
                raise
            raise LostError(_LOST.format(who=activity.note_of(lost))) from None


def _start_ranks(config: "RunConfig", args: argparse.Namespace) -> None:
    """Replace this process by torchrun with the ranks of a replica in a federation, unless a launcher runs.

    A replica that needs more GPUs than this machine has needs a launcher: nothing is started.
    """
    ranks = config.parallel.replica_size
    if not config.federation.exists or ranks == 1 or read_world(os.environ).launcher != "single":
        return
    with importing():
        import torch
    if 0 < torch.cuda.device_count() < ranks:
        return
    command = [*trainer(ranks), args.config or args.named, "--progress", args.progress]
    if args.replica is not None:
        command += ["--replica", str(args.replica)]
    sys.stdout.flush()
    os.execv(command[0], command)
