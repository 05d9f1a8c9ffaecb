"""How long methods train on a slow network until they reach a given loss: whole trainings in the network lab.

    python -m tools.time_to_loss tools/studies/time_to_loss.json --rate 10Mbit --delay 25ms --output runs/time

For root, as `python -m tests.netlab` is, whose options of links it takes. The study has "base" (the trainer's
JSON), "target" (nats per token) and "runs": a name for each method with its changes of the base, as `--set` of
the simulator takes them. Each is one training under Open MPI, with every rank on a host of its own.

The time is that of the local steps and rounds on the slowest replica; evaluations and the start are left out. The
validation losses are joined by straight lines. A learning rate that stays where it is after its warm-up lets every
moment of a run be compared.

All ranks share the processors of this machine, so a local step takes longer than on hosts of their own.

Prints one JSON object; OUTPUT has the runs' folders, the object, and a figure of the loss over time. A run that is
there is not repeated, and refused if its settings or its link were others.
"""

import copy
import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megatron_noloco.monitor.run_log import RunLog
from tests.netlab.__main__ import quantity
from tests.netlab.lab import LabUnavailableError, lab
from tests.netlab.network import Link
from tools.options import add_changes, apply, command_line

LIMIT_SECONDS = 3600.0  # of one training


class Moment(NamedTuple):
    """One evaluation."""

    step: int
    seconds: float  # of training before it
    loss: float  # of the mean model; of replica 0 where there are no rounds


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--rate", default="10Mbit", help="of each link, in both directions")
    parser.add_argument("--delay", default="25ms", help="each way")
    parser.add_argument("--output", type=Path, required=True)
    add_changes(parser, "the base")
    options = parser.parse_args()
    study = json.loads(options.study.read_text())
    for change in options.set:
        apply(study["base"], change)
    try:
        link = Link(quantity("rate", options.rate), quantity("delay", options.delay))
        curves = {
            name: train(study["base"], changes, options.output / str(number), link)
            for number, (name, changes) in enumerate(study["runs"].items())
        }
    except (ValueError, LabUnavailableError) as error:
        print(f"time_to_loss: {error}", file=sys.stderr)
        sys.exit(2)
    found = {
        "rate": options.rate,
        "delay": options.delay,
        "target": study["target"],
        "runs": {name: summary(curve, study["target"]) for name, curve in curves.items()},
    }
    (options.output / "found.json").write_text(json.dumps(found))
    plot(curves, study["target"], f"{options.rate}/s, {options.delay} each way", options.output / "loss.png")
    print(json.dumps(found))


def train(base: dict[str, Any], changes: list[str], folder: Path, link: Link) -> list[Moment]:
    """Train in the lab, unless that is done; raises LabUnavailableError, and what `Lab.mpirun` raises."""
    raw = copy.deepcopy(base)
    for change in [*changes, f"training.output_dir={folder}"]:
        apply(raw, change)
    done, wanted = folder / "done", json.dumps([raw, asdict(link)], sort_keys=True)
    if done.exists() and done.read_text() != wanted:
        raise ValueError(f"{folder}: is a run of other settings or on another link; give another --output")
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.json"
        config.write_text(json.dumps(raw, indent=2))
        parallel = raw["parallel"]
        ranks = parallel["replicas"] * parallel.get("data_parallel_size", 1)
        with lab([link] * ranks) as there:
            there.mpirun((), "megatron_noloco", "train", "--config", str(config), seconds=LIMIT_SECONDS)
        done.write_text(wanted)
    return curve(folder, raw["noloco"].get("enabled", True))


def curve(run: Path, rounds: bool) -> list[Moment]:
    """Return the evaluations of a run from its replicas' metrics; raises ValueError where there is none."""
    replicas = RunLog(run).replicas
    moments = [
        Moment(
            row["step"],
            max(log.seconds_so_far()[row["step"]] for log in replicas),
            row["validation/mean_model_loss"] if rounds else row["validation/replica_losses"][0],
        )
        for row in replicas[0].rows_of("evaluation")
    ]
    if not moments:
        raise ValueError(f"{run}: there was no evaluation; give evaluation.interval and evaluation.iters")
    return moments


def summary(moments: list[Moment], target: float) -> dict[str, float | None]:
    last = moments[-1]
    return {
        "seconds_per_step": last.seconds / last.step,
        "steps": last.step,
        "loss": last.loss,
        "seconds_to_target": seconds_to(moments, target),
    }


def seconds_to(moments: list[Moment], target: float) -> float | None:
    """Return the seconds to a loss, interpolated; None where it was not reached."""
    for before, after in pairwise(moments):
        if after.loss <= target < before.loss:
            share = (before.loss - target) / (before.loss - after.loss)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def plot(curves: dict[str, list[Moment]], target: float, network: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, moments in curves.items():
        _, seconds, losses = zip(*moments, strict=True)
        axes.plot(seconds, losses, marker=".", label=name)
    axes.axhline(target, color="black", linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel(f"seconds of training, {network}")
    axes.set_ylabel("validation loss of the mean model, nats per token")
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
