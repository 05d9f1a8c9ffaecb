"""Numbers about a run: recorded where they arise, reduced inside a replica, written where people look.

`record(name, value, reduction)` is all that a new number needs. Its name ("train/loss") is its key in
`metrics.jsonl` and its tag in TensorBoard. Its reduction says how values combine over the local steps of a log
interval, and over the ranks of a replica.
"""

from megatron_noloco.monitor.metrics import Metrics, Record, timed, unrecorded
from megatron_noloco.monitor.reduction import (
    LAST,
    LAST_MAX,
    LAST_SUM,
    MEAN,
    PER_STEP,
    RMS,
    SLOWEST,
    SUM,
    TOTAL,
    Reduction,
)

__all__ = [
    "LAST",
    "LAST_MAX",
    "LAST_SUM",
    "MEAN",
    "PER_STEP",
    "RMS",
    "SLOWEST",
    "SUM",
    "TOTAL",
    "Metrics",
    "Record",
    "Reduction",
    "timed",
    "unrecorded",
]  # fmt: skip
