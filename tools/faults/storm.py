"""How much of the work of a federation counts where its replicas are killed all the time.

    nice python -m tools.faults storm --output runs/storm --replicas 8 --every 52 --restart 5 --minutes 15

Every `--every` seconds one, drawn at random, is killed (SIGKILL), and started again `--restart` seconds later.
With `--notice` it is told to leave (SIGTERM) so many seconds before, and is killed if it is still there then. Each
local step takes at least `--step-seconds`, so that replicas that run do not gain what those that do not run leave
of the processor. Before, the same replicas run undisturbed for two minutes.

`tools.efficiency` says which local steps count; those that as many replicas would have taken follow from the
median time of a step in the undisturbed run.
"""

import argparse
import random
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tools.efficiency import steps_that_count
from tools.processes import Federation, base_config

_LOOK_SECONDS = 0.1
_CALM_SECONDS = 120.0
_STEPS = 10**6  # more than there is time for


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="a folder; it is emptied")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--every", type=float, default=52.0, help="seconds between two kills")
    parser.add_argument("--restart", type=float, default=5.0, help="seconds from a kill to the new start")
    parser.add_argument("--notice", type=float, help="seconds; without it there is none")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--step-seconds", type=float, default=1.0, help="pause at each local step")
    parser.add_argument("--local-steps", type=int, default=5, help="from round to round")
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the federation without kills, then with them."""
    shutil.rmtree(options.output, ignore_errors=True)
    calm = Storm(options, options.output / "calm")
    calm.run(_CALM_SECONDS, kills=False)
    storm = Storm(options, options.output / "storm")
    storm.run(60 * options.minutes, kills=True)
    seconds_per_step = calm.seconds_per_step()
    return {
        "replicas": options.replicas,
        "kills": storm.kills,
        "kills_per_hour": round(3600 * storm.kills / storm.seconds, 1),
        "seconds": round(storm.seconds, 1),
        "seconds_per_step": round(seconds_per_step, 4),
        "steps_that_count": storm.count,
        "step_efficiency": round(storm.count * seconds_per_step / (options.replicas * storm.seconds), 4),
        "killed_all_the_same": storm.overdue,
        "missed_rounds": sum(storm.federation.total(one, "missed_rounds") for one in range(options.replicas)),
        "exit_codes": storm.exit_codes,
    }


class Storm:
    """A run of a federation, with or without kills.

    Attributes:
        seconds: since all replicas trained.
        count: local steps in this time that count.
        kills, overdue: replicas that were killed or told to leave; told, and killed as they did not.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        base = base_config(_STEPS)
        base["evaluation"] = {"iters": 0}
        base["noloco"]["local_steps"] = base["training"]["log_interval"] = options.local_steps
        settings = {"slots": options.replicas, "start_with": options.replicas}
        self.federation = Federation(folder, base, settings)
        self.kills = self.overdue = self.count = 0
        self.seconds = 0.0
        self.exit_codes: list[int] = []
        self._draws = random.Random(options.seed)

    def run(self, seconds: float, kills: bool) -> None:
        """Run until so many seconds have passed since all replicas trained."""
        replicas, coming = range(self.options.replicas), dict[int, float]()
        with self.federation as federation:
            for replica in replicas:
                self._start(replica)
            while not all(federation.rows(replica) for replica in replicas):
                self._check()
                time.sleep(_LOOK_SECONDS)
            before, started = self._counted(), time.monotonic()
            next_kill = started + self.options.every
            while (now := time.monotonic()) < started + seconds:
                for replica in [one for one, when in coming.items() if when <= now]:
                    del coming[replica]
                    self._start(replica)
                if kills and now >= next_kill:
                    next_kill += self.options.every
                    victim = self._draws.choice([one for one in replicas if one not in coming])
                    self._remove(victim)
                    self.kills += 1
                    coming[victim] = time.monotonic() + self.options.restart
                if not coming:
                    self._check()
                time.sleep(_LOOK_SECONDS)
            self.seconds, self.count = time.monotonic() - started, self._counted() - before
            self.exit_codes = [code for code in federation.exit_codes().values() if code is not None]

    def seconds_per_step(self) -> float:
        """Return the median over the rows of all replicas."""
        rows = [row for replica in range(self.options.replicas) for row in self.federation.rows(replica)]
        return statistics.median(row["speed/seconds_per_step"] for row in rows if row["kind"] == "step")

    def _counted(self) -> int:
        return sum(steps_that_count(self.federation.rows(one)) for one in range(self.options.replicas))

    def _start(self, replica: int) -> None:
        self.federation.start(replica, "tools.faults.replica", str(self.options.step_seconds))

    def _remove(self, replica: int) -> None:
        """Kill a replica, after a notice if there is one."""
        if self.options.notice is not None:
            self.federation.signal(replica, signal.SIGTERM)
            until = time.monotonic() + self.options.notice
            while self.federation.exit_codes()[replica] is None and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
            self.overdue += self.federation.exit_codes()[replica] is None
        self.federation.kill(replica)

    def _check(self) -> None:
        """End this process where a replica has ended by itself."""
        codes = self.federation.exit_codes()
        ended = {one: code for one, code in codes.items() if code is not None}
        if ended:
            sys.exit(f"storm: replicas have ended, with exit codes {ended}: see {self.federation.folder}")
