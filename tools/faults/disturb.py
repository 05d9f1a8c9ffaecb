"""Faults of replicas, at moments of a run."""

import math
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tools.processes import Federation

_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Fault:
    """One disturbance, `seconds` after the federation has made `step` local steps."""

    step: int
    seconds: float
    what: str  # "kill", "return", "return empty", "freeze", "join"
    replica: int
    lasts_seconds: float = math.inf  # "freeze"


def disturb(
    federation: Federation, faults: Sequence[Fault], limit: float, untouched: Sequence[int] = ()
) -> dict[int, int | None]:
    """Inflict the faults in turn, and wait until the replicas have ended.

    Args:
        limit: seconds.
        untouched: do not wait for others; none: wait for all.

    Returns:
        The exit code of every replica's last process; None where it had not ended at the limit.
    """
    deadline = time.monotonic() + limit
    coming, ends = list(faults), list[tuple[float, Fault]]()
    while time.monotonic() < deadline:
        running = set(federation.running())
        over = not (running & set(untouched) if untouched else coming or ends or running)
        if over:
            break
        for when, fault in [end for end in ends if end[0] <= time.monotonic()]:
            federation.signal(fault.replica, signal.SIGCONT)
            ends.remove((when, fault))
        if coming and (federation.furthest_step() >= coming[0].step or not running):
            fault = coming.pop(0)
            time.sleep(fault.seconds)
            _inflict(fault, federation)
            if fault.lasts_seconds < math.inf:
                ends.append((time.monotonic() + fault.lasts_seconds, fault))
        time.sleep(_LOOK_SECONDS)
    return federation.exit_codes()


def _inflict(fault: Fault, federation: Federation) -> None:
    match fault.what:
        case "kill":
            federation.kill(fault.replica)
        case "freeze":
            federation.signal(fault.replica, signal.SIGSTOP)
        case "return empty":
            shutil.rmtree(federation.host(fault.replica))
            federation.start(fault.replica)
        case _:
            federation.start(fault.replica)
