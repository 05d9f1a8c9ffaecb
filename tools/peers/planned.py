"""What `plan` says of rounds on a network, against rounds in the network lab."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from megatron_noloco.config.noloco_block import TrainerSettings
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import RankParameters
from megatron_noloco.preflight.schemes import Network, scheme_of
from tests.netlab.lab import lab
from tests.netlab.network import Link
from tools.peers.processes import Replicas
from tools.peers.replica import Work

STEP_SECONDS = 0.5  # of sleep in a local step, so that ranks which share processors take equal steps
_ROUNDS = 12
_LEFT_OUT = 3  # rounds at the beginning, in which connections are opened


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        megabits: rate of each host's link, per second.
        milliseconds: from host to host.
        hidden: width of the model; 64: 134,016 weights.
        way: "diloco" or "groups", over gloo in one job, or "noloco", separate jobs.
        overlap: local steps of delay; 0: none.
    """

    megabits: float
    milliseconds: float
    replicas: int
    hidden: int = 64
    way: str = "groups"
    payload: Literal["fp32", "int8", "int4"] = "fp32"
    local_steps: int = 4
    group_size: int = 2
    overlap: int = 0


POINTS = (
    Point(10, 25, 2),
    Point(10, 25, 8, payload="int8"),
    Point(10, 100, 4, hidden=128, payload="int8"),
    Point(10, 25, 4, payload="int4", way="noloco"),
    Point(10, 25, 4, group_size=4),
    Point(10, 25, 4, way="diloco"),
    Point(10, 25, 4, overlap=2),
    Point(100, 5, 2, hidden=128),
    Point(100, 50, 4, hidden=128, way="noloco"),
    Point(100, 5, 8, hidden=128, way="diloco", payload="int8"),
    Point(100, 25, 8, hidden=128),
    Point(100, 100, 4, hidden=128, payload="int8", overlap=1),
)


def measure(folder: Path, point: Point) -> dict[str, Any]:
    """Train on hosts of the lab; returns seconds of an exchange and share of time lost, planned and measured."""
    work = Work(
        steps=_ROUNDS * point.local_steps,
        local_steps=point.local_steps,
        outer_momentum=0.5,
        nesterov=False,
        group_size=point.group_size,
        payload=point.payload,
        overlap_steps=point.overlap,
        deadline_seconds=120,
        pause=STEP_SECONDS,
        hidden=point.hidden,
        length=16,
        batch=1,
    )
    link = Link(point.megabits * 1e6, point.milliseconds / 1e3)
    where = folder / f"plan-{POINTS.index(point)}"
    with (
        lab([link] * point.replicas) as there,
        Replicas(where, point.way, point.replicas, work, there) as replicas,
    ):
        replicas.wait()
        rows = [replicas.counted(replica)[_LEFT_OUT:] for replica in range(point.replicas)]
        weights = replicas.events(0, event="process")[0]["weights"]
    # A member that comes late lets the others wait; the exchange itself is the shortest of a round.
    exchange = median(min(row["exchange_seconds"] for row in members) for members in zip(*rows, strict=False))
    pause = median(row["pause_seconds"] for members in rows for row in members)
    planned = scheme_of(
        "",
        TrainerSettings(
            method="diloco" if point.way == "diloco" else "noloco",
            local_steps=point.local_steps,
            payload=point.payload,
            group_size=point.group_size,
            overlap_steps=point.overlap,
        ),
        RankParameters(0, weights, weights, 0, 0),
        Topology(1, 1, 1, 1, separate_jobs=True)
        if point.way == "noloco"
        else Topology(point.replicas, 1, 1, 1),
        Network(link.rate / 8, link.delay, 1),
        STEP_SECONDS,
    )
    return {
        "point": vars(point),
        "weights": weights,
        "seconds": {"planned": planned.seconds_per_exchange, "measured": exchange},
        "share of time lost": {
            "planned": planned.share_lost(STEP_SECONDS),
            "measured": pause / (pause + point.local_steps * STEP_SECONDS),
        },
    }


def errors(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median and the worst error: relative for seconds, absolute for the share of the time lost.

    With overlap an exchange is seen to have ended at the end of a local step, so only its share is compared.
    """
    waited = [one["seconds"] for one in found if not one["point"]["overlap"]]
    wrong = [abs(math.log(one["planned"] / one["measured"])) for one in waited]
    shares = [abs(one["planned"] - one["measured"]) for one in (each["share of time lost"] for each in found)]
    return {
        "seconds, median": math.expm1(median(wrong)),
        "seconds, worst": math.expm1(max(wrong)),
        "share, median": median(shares),
        "share, worst": max(shares),
    }
