"""What `plan` says of rounds on a network, against rounds in the network lab."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

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
        way: "diloco" or "groups", over gloo in one job, or "noloco", separate jobs.
    """

    megabits: float
    milliseconds: float
    replicas: int
    way: str
    work: Work


def _work(hidden: int = 64, **changes: Any) -> Work:
    """Return work for a model of this width; 64: 134,016 weights."""
    same = Work(
        _ROUNDS * 4, 4, outer_momentum=0.5, nesterov=False, deadline_seconds=120, pause=STEP_SECONDS,
        hidden=hidden, length=16, batch=1,
    )  # fmt: skip
    return replace(same, **changes)


POINTS = (
    Point(10, 25, 2, "groups", _work()),
    Point(10, 25, 8, "groups", _work(payload="int8")),
    Point(10, 100, 4, "groups", _work(128, payload="int8")),
    Point(10, 25, 4, "noloco", _work(payload="int4")),
    Point(10, 25, 4, "groups", _work(group_size=4)),
    Point(10, 25, 4, "diloco", _work()),
    Point(10, 25, 4, "groups", _work(overlap_steps=2)),
    Point(100, 5, 2, "groups", _work(128)),
    Point(100, 50, 4, "noloco", _work(128)),
    Point(100, 5, 8, "diloco", _work(128, payload="int8")),
    Point(100, 25, 8, "groups", _work(128)),
    Point(100, 100, 4, "groups", _work(128, payload="int8", overlap_steps=1)),
)


def measure(folder: Path, point: Point) -> dict[str, Any]:
    """Train on hosts of the lab; returns seconds of an exchange and share of time lost, planned and measured."""
    work = point.work
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
            local_steps=work.local_steps,
            payload=work.payload,
            group_size=work.group_size,
            overlap_steps=work.overlap_steps,
        ),
        RankParameters(0, weights, weights, 0, 0),
        Topology(1, 1, 1, 1, separate_jobs=True)
        if point.way == "noloco"
        else Topology(point.replicas, 1, 1, 1),
        Network(link.rate / 8, link.delay),
    )
    return {
        "point": asdict(point),
        "weights": weights,
        "seconds": {"planned": planned.seconds_per_exchange, "measured": exchange},
        "share of time lost": {
            "planned": planned.share_lost(STEP_SECONDS),
            "measured": pause / (pause + work.local_steps * STEP_SECONDS),
        },
    }


def errors(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median and the worst error: relative for seconds, absolute for the share of the time lost.

    With overlap an exchange is seen to have ended at the end of a local step, so only its share is compared.
    """
    waited = [one["seconds"] for one in found if not one["point"]["work"]["overlap_steps"]]
    wrong = [abs(math.log(one["planned"] / one["measured"])) for one in waited]
    shares = [abs(one["planned"] - one["measured"]) for one in (each["share of time lost"] for each in found)]
    return {
        "seconds, median": math.expm1(median(wrong)),
        "seconds, worst": math.expm1(max(wrong)),
        "share, median": median(shares),
        "share, worst": max(shares),
    }
