"""Step efficiency: the local steps that count in the end, over those of as many replicas without a fault.

    python -m tools.efficiency RUN

A local step counts if a row of its replica's log covers it when the run has ended. With a row after each round
(`training.log_interval` equal to `noloco.local_steps`) others have by then what it has learned. So those are lost
that follow the last row before a kill, and those that are left out; and one that is taken again, after a
checkpoint, counts once.
"""

import statistics
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from megatron_noloco.monitor.numbers import Row
from megatron_noloco.monitor.run_log import RunLog
from tools.options import command_line


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("run", type=Path, help="training.output_dir of replicas that have ended")
    try:
        logs = RunLog(parser.parse_args().run).replicas
    except ValueError as error:
        sys.exit(str(error))
    count = sum(steps_that_count(log.rows) for log in logs)
    possible = len(logs) * max(row["step"] for log in logs for row in log.rows)
    share = f"{100 * count / possible:.1f} %"
    print(f"step efficiency: {count} of the {possible} local steps of a run without faults, {share}")


def steps_that_count(rows: Iterable[Row]) -> int:
    """Return how many local steps the rows of one replica cover."""
    at = [(0, 0)]
    for row in rows:
        if row["kind"] == "step":  # a row without the total has that of the one before
            at.append((row["step"], row.get("total/skipped_ahead", at[-1][1])))
    interval = statistics.mode(after - before for (before, _), (after, _) in pairwise(at)) if at[1:] else 0
    count = 0
    for (before, left_out_before), (step, left_out) in pairwise(at):
        again = left_out < left_out_before  # in a job that was started again it counts from 0
        taken = step - before - left_out + (0 if again else left_out_before)
        count += max(0, min(taken, interval))  # a longer gap is that of a job that was away
    return count


if __name__ == "__main__":
    main()
