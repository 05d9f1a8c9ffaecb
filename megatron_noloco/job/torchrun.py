"""Runs torchrun with the exit code of its ranks: `python -m megatron_noloco.job.torchrun TORCHRUN_OPTIONS`.

The ranks divide the cores of their host: torchrun gives each a single thread, and rounds compute on the host.

torchrun itself exits with 1 and a long report, however its ranks ended. Here the exit code is that of the rank
that failed first, which has written the reason. After one SIGTERM, SIGHUP or Ctrl-C the ranks save and leave with
exit code 0.
"""

import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import determine_local_world_size, main, parse_args

from megatron_noloco.job.launcher import spared_by_nohup

_LOOK_SECONDS = 0.2
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(arguments: list[str]) -> int:
    """Run torchrun; return the exit code."""
    for number in _STOP:
        if not spared_by_nohup(number):
            signal.signal(number, _stop)
    signal.signal(signal.SIGQUIT, _kill)
    # In the main thread torchrun would handle signals, and kill its ranks; elsewhere it warns that it does not.
    # A rank that fails has written the reason; one that is killed is named below.
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
    ranks = determine_local_world_size(parse_args(arguments).nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    try:
        with ThreadPoolExecutor(1) as other_thread:
            running = other_thread.submit(main, arguments)
            # A signal may not wake a thread that waits without a limit: it would be handled at the end only.
            while not running.done():
                wait([running], _LOOK_SECONDS)
            running.result()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        sys.stderr.write(f"rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}\n")
        return 128 - failure.exitcode  # as in shells
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    """Ask the ranks, which are this process's children, to save and leave; the next signal kills them."""
    for again in _STOP:
        if not spared_by_nohup(again):
            signal.signal(again, _kill)
    for rank in psutil.Process().children():
        rank.send_signal(signal.SIGUSR1)


def _kill(number: int, frame: FrameType | None) -> None:
    for rank in psutil.Process().children():
        rank.kill()
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
