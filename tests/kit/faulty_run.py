"""The command line, with a fault on one rank, which the variable FAULT names: its kind, a rank, a local step.

The kind is "raise" (in the model's code) or the name of a signal that the rank sends itself. It happens in the
middle of the local step, counted from 1.
"""

import os
import signal
import sys
from typing import Any

from megatron_noloco.cli.main import run
from megatron_noloco.job.start_up import before_engines


def plant(kind: str, rank: int, step: int) -> None:
    """When the rank has computed its first microbatch of the step, which the next stage waits for."""
    before_engines()
    from megatron_noloco.pipeline.communicator import RoutedCommunicator

    original, begin, passes = RoutedCommunicator._communicate, RoutedCommunicator.begin, 0

    def begun(communicator: Any, *args: Any) -> None:
        nonlocal passes
        passes += 1
        begin(communicator, *args)

    def communicate(communicator: Any, **options: Any) -> Any:
        nonlocal passes
        at = communicator.groups.topology.rank(communicator.groups.position)
        if (at, passes) == (rank, step) and options["tensor_send_next"] is not None:
            passes += 1  # once
            if kind == "raise":
                raise ZeroDivisionError("a mistake in the model")
            os.kill(os.getpid(), signal.Signals[kind])
        return original(communicator, **options)

    RoutedCommunicator.begin, RoutedCommunicator._communicate = begun, communicate  # type: ignore[method-assign]


if __name__ == "__main__":
    if "train" in sys.argv:
        kind, rank, step = os.environ["FAULT"].split()
        plant(kind, int(rank), int(step))
    run()
