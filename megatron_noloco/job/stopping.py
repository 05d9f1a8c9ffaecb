"""Stops a run early, or has it save after some time, at the same step on every rank, without a collective.

A stop is requested by SIGTERM, SIGUSR1 (Slurm's warning), SIGHUP (a closed terminal), one Ctrl-C,
`exit_duration_minutes`, or the stop file, for which rank 0 looks. A request to one rank is enough. The ranks then
agree through the job's key-value store:

1. The rank that received the request writes it into the store, which the others poll twice a second.
2. A rank that knows of the request writes how many steps it has begun, and begins no more until every rank has
   written its number.
3. All ranks stop after the largest of these numbers.

An evaluation is cut into parts, whose numbers lie between those of two local steps.

A separate thread polls and writes, because the step in progress may need a rank that already waits: a pipeline
stage, or a partner whose round is some steps ahead. So every number is written soon, and then all ranks can
finish every step that one of them has begun. A rank that reaches the end of the run writes its last step.

A rank that does not write its number for half a minute stands still, or its host is lost. Nothing can be saved
without it, so the job ends then.

With `save_seconds` rank 0 asks for a save each time that this time has passed; the ranks agree in the same way.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from megatron_noloco.job import agreement, leaving
from megatron_noloco.job.activity import now
from megatron_noloco.job.launcher import same_command, spared_by_nohup, tell_launch_script
from megatron_noloco.job.run_folder import asks_to_leave, stop_request

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_LEAVE = "the command stop --leave"
_SENT = {"SIGUSR1": "SIGUSR1, which launch scripts send for Ctrl-C and SIGTERM"}
_LEAVING = ("SIGTERM", "SIGUSR1", "SIGHUP", _LEAVE)
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 30.0
_PARTS = 1 << 24  # more than an evaluation has; the numbers of two steps are as far apart
_END = 1 << 62  # after the last step: no save will be agreed on any more
_REQUEST, _UNSAVED = "stop/request", "stop/unsaved"


class _Boundary:
    """The step or part after which all ranks stop or save, as they agree on it.

    Attributes:
        announced: the latest step or part that this rank had begun when it was asked; None before.
        last: the last one before the boundary, the same on all ranks.
        agreed: set when `last` is known, or cannot be.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.announced: int | None = None
        self.last: int | None = None
        self.agreed = threading.Event()

    def announce(self, begun: int) -> None:
        if self.announced is None:
            self.announced = begun
            agreement.announce(self.subject, begun)


class Stopping:
    """Tells one rank whether, why and when the run stops early.

    Args:
        old_request: the content of `output_dir`'s stop file before this job began, which is no request to it.
        save_seconds: between two saves; None: no save is asked for.
    """

    def __init__(
        self,
        exit_duration_minutes: float | None,
        output_dir: Path,
        old_request: str,
        save_seconds: float | None = None,
    ) -> None:
        self._output_dir, self._old_request = output_dir, old_request
        self.reason: str | None = None
        self._deadline = time.monotonic() + 60 * exit_duration_minutes if exit_duration_minutes else None
        self._asked: str | None = None
        self._handled = False  # a signal
        now.signals.clear()
        self._lock = threading.Lock()  # for the numbers below
        self._begun = 0  # of the latest step, or part of an evaluation
        self._stop = _Boundary("stop/begun")
        self._save, self._saves = _Boundary("save/0"), list[int]()  # the next, and `last` of those agreed on
        self._save_seconds, self._saved_at = save_seconds, time.monotonic()
        self._failure: Exception | None = None
        self._poll_now = threading.Event()
        self._closing = False
        self._previous = {
            number: signal.signal(number, self._on_signal)
            for number in _SIGNALS
            if not spared_by_nohup(number)
        }
        tell_launch_script(os.environ)
        self._watcher = threading.Thread(target=self._watch, name="stopping", daemon=True)
        self._watcher.start()
        # Where rank 0 stands still, the store blocks the watcher.
        threading.Thread(target=self._limit, name="stopping in time", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._handled and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C
        self._handled, self._asked = True, self._asked or signal.Signals(number).name

    def is_requested(self) -> bool:
        """Return whether this rank knows of a request to stop; the others do within a second. From any thread."""
        if self._asked is None:
            self._asked = next((signal.Signals(n).name for n in _SIGNALS if n in now.signals), None)
        if self._asked is not None:
            self._poll_now.set()
        return self.request is not None

    @property
    def request(self) -> str | None:
        """What has asked this rank to stop; `reason`, once the ranks have agreed on it."""
        return self.reason or self._asked

    @property
    def leaves(self) -> bool:
        """Whether a job of a federation exchanges once more: not where a person waits for the end of all jobs."""
        return self.reason in _LEAVING

    def before_step(self, done: int) -> bool:
        """Return whether the run stops here; every rank calls it before each step, with the steps done so far."""
        return self._stops_before((done + 1) * _PARTS, done)

    def before_part(self, done: int, part: int) -> bool:
        """Return whether the evaluation after `done` steps stops before its part of this number, from 0.

        Every rank calls it before each part; the last local step was the `done`-th.
        """
        return self._stops_before(done * _PARTS + part + 1, done)

    def saves_before_step(self, done: int) -> bool:
        """Return whether the run saves after these steps, as rank 0 has asked; called after `before_step`."""
        with self._lock:
            before = len(self._saves)
            self._saves = [last for last in self._saves if last >= (done + 1) * _PARTS]
            return len(self._saves) < before

    def _stops_before(self, number: int, done: int) -> bool:
        if self._asked is not None:
            self._poll_now.set()
        while (boundary := self._begin(number)) is not None:
            with now.doing(f"agreeing with the other ranks after local step {done}"):
                now.part("waiting until all ranks have reported how many steps they have begun")
                boundary.agreed.wait()
            if boundary.last is None:
                raise RuntimeError("the ranks could not agree where to stop or save") from self._failure
        return self._stop.last is not None and number > self._stop.last

    def _begin(self, number: int) -> _Boundary | None:
        """Note that this rank begins a step or part; or return what it must wait for before."""
        with self._lock:
            for boundary in (self._stop, self._save):
                if boundary.announced is not None and boundary.last is None and number > boundary.announced:
                    return boundary
            self._begun = max(self._begun, number)
            return None

    def _watch(self) -> None:
        try:
            while not self._look():
                self._look_for_save()
                self._poll_now.wait(_POLL_SECONDS)
                if self._closing or leaving.job_has_failed.is_set():
                    return
            if dist.get_rank() == 0:
                sys.stdout.write(
                    f"stopping after the local step under way ({_SENT.get(str(self.reason), self.reason)})\n"
                )
                sys.stdout.flush()
            self._stop.last = self._agreed_last(self._stop)
        except RuntimeError as error:  # rank 0, which serves the store, has ended, or a rank did not answer
            self._failure = error
        finally:
            self._stop.agreed.set()
            self._save.agreed.set()

    def _look_for_save(self) -> None:
        """Agree on a save, if rank 0 has asked for one; on rank 0 ask for it when it is time."""
        if self._save_seconds is None or self._save.last is not None:
            return
        boundary, asked = self._save, f"{self._save.subject}/asked"
        if dist.get_rank() == 0 and time.monotonic() >= self._saved_at + self._save_seconds:
            agreement.claim(asked, "yes")
        if agreement.claimed(asked):
            last = self._agreed_last(boundary)
            with self._lock:
                boundary.last = last
                self._saves.append(last)
                if last < _END:
                    self._save = _Boundary(f"save/{int(boundary.subject.removeprefix('save/')) + 1}")
            self._saved_at = time.monotonic()
            boundary.agreed.set()

    def _agreed_last(self, boundary: _Boundary) -> int:
        """Announce what this rank has begun; return the largest number of all ranks."""
        with self._lock:
            boundary.announce(self._begun)
        return max(agreement.announced(boundary.subject))

    def _limit(self) -> None:
        """End this process where the ranks do not agree in time; its main thread may wait for one of them."""
        while not (self._closing or self.is_requested()):
            time.sleep(_POLL_SECONDS)
        self._stop.agreed.wait(_PATIENCE_SECONDS)
        if self._stop.last is not None or self._closing:
            return
        exit_code = leaving.fail(
            f"asked to stop ({self._asked or self.reason}), but for {_PATIENCE_SECONDS:.0f} s a rank has not said "
            "how many local steps it has begun: it stands still, or its host is lost, and nothing can be saved "
            f"without it; {same_command(os.environ)} continues from the last checkpoint "
            f"({now.who} was {now.state})",
            leaving.FAILURE,
        )
        leaving.keep_serving_store()
        os._exit(exit_code)

    def _look(self) -> bool:
        if not self.is_requested():
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._asked = "exit_duration_minutes"
            elif dist.get_rank() == 0:
                self._asked = self._asked_of_rank_0()
        if self._asked is not None:
            # The first request counts, so that all ranks have the same reason.
            self.reason = agreement.claim(_REQUEST, self._asked)
        else:
            self.reason = agreement.claimed(_REQUEST) or None
        return self.reason is not None

    def _asked_of_rank_0(self) -> str | None:
        request = stop_request(self._output_dir)
        if request in ("", self._old_request):
            return None
        return _LEAVE if asks_to_leave(request) else "the command stop"

    def close(self, done: int, saved: bool = True) -> int:
        """End the agreement after the last step, early or not; rank 0, which serves the store, returns last.

        Returns to rank 0 how many ranks called it with `saved` false; to the others whether they did themselves.
        """
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        with self._lock:
            self._stop.announce((done + 1) * _PARTS - 1)
            self._save.announce(_END)
        self._closing = True
        self._poll_now.set()
        self._watcher.join()
        self._save.announce(_END)  # of the next one, where the watcher has begun it
        self.reason = self.reason or self._asked
        agreement.announce(_UNSAVED, int(not saved))
        if dist.get_rank() == 0:
            with suppress(RuntimeError):  # a rank does not come to its end
                return sum(agreement.announced(_UNSAVED))
        return int(not saved)
