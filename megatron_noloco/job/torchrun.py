"""Run torchrun, but exit with the code of its ranks: `python -m megatron_noloco.job.torchrun TORCHRUN_OPTIONS`.

torchrun itself exits with 1 and a page about itself, however its ranks ended. Here the exit code is that of
the rank that failed first, which has said why. One SIGTERM or Ctrl-C lets the ranks save and leave, with exit
code 0.
"""

import os
import signal
import sys
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

_STOP = (signal.SIGTERM, signal.SIGINT)


def run(arguments: list[str]) -> int:
    """Run torchrun; return the exit code."""
    for number in _STOP:
        signal.signal(number, _stop)
    try:
        main(["--signals-to-handle", "SIGHUP,SIGQUIT", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        sys.stderr.write(f"rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}\n")
        return 128 - failure.exitcode  # as shells have it
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    """Ask the ranks, all of them children of this process, to save and leave; the next signal ends them."""
    ranks = psutil.Process().children()
    for rank in ranks:
        rank.send_signal(signal.SIGUSR1)
    for again in _STOP:
        signal.signal(again, lambda *_: _end(ranks))


def _end(ranks: list[psutil.Process]) -> None:
    for rank in ranks:
        if rank.is_running():
            rank.kill()
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
