"""Stopping early, at the same step on every rank, without a collective.

SIGTERM, SIGUSR1 (Slurm's warning), one Ctrl-C or `exit_duration_minutes` ask for it; one rank that is asked is
enough. The ranks then agree through the job's key-value store:

1. Whoever is asked writes a request; the others look for one once a second, between steps.
2. A rank that knows of the request writes how many steps it has done, and waits until every rank has.
3. All stop after the largest of these numbers.

Nobody waits for ever: a rank that has done s steps (with their rounds, log lines, evaluations and checkpoints)
has also done its part in everybody else's first s steps, so the ranks that are behind can always reach the
number they have to write, and then the largest one. A rank that reaches the end writes that.
"""

import signal
import time
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_LOOK_SECONDS = 1.0
_PATIENCE = timedelta(minutes=10)  # a rank must first finish the step it is in
_REQUEST = "stop/request"


class Stopping:
    """One rank's view of whether, why and when the run stops early."""

    def __init__(self, exit_duration_minutes: float | None) -> None:
        self.reason: str | None = None
        self._deadline = time.monotonic() + 60 * exit_duration_minutes if exit_duration_minutes else None
        self._asked: str | None = None
        self._last_step: int | None = None
        self._looked = time.monotonic()
        self._store = dist.distributed_c10d._get_default_store()
        self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C
        self._asked = signal.Signals(number).name

    def before_step(self, done: int) -> bool:
        """Whether the run stops here; every rank calls it before each step, with the steps done so far."""
        if self._last_step is None:
            self._look()
            if self.reason is not None:
                self._last_step = self._agree(done)
        return self._last_step is not None and done >= self._last_step

    def _look(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline and self._asked is None:
            self._asked = "exit_duration_minutes"
        if self._asked is not None:
            # The first request stands, so that all ranks tell the same reason.
            self.reason = self._store.compare_set(_REQUEST, "", self._asked).decode()
        elif now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            if self._store.check([_REQUEST]):
                self.reason = self._store.get(_REQUEST).decode()

    def _agree(self, done: int) -> int:
        self._tell(done)
        names = [f"stop/done/{rank}" for rank in range(dist.get_world_size())]
        self._store.wait(names, _PATIENCE)
        return max(int(self._store.get(name)) for name in names)

    def _tell(self, done: int) -> None:
        self._store.set(f"stop/done/{dist.get_rank()}", str(done))

    def close(self, done: int) -> None:
        """At the end of the run, early or not; the rank that serves the store leaves last."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._last_step is None:
            self._tell(done)
        self._store.add("stop/left", 1)
        while dist.get_rank() == 0 and self._store.add("stop/left", 0) < dist.get_world_size():
            time.sleep(0.05)
