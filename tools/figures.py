"""The figures of docs/evidence.md, from the rows of docs/evidence.csv: loss over bytes, and loss over delay.

python -m tools.figures docs
"""

import csv
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import mean, stdev

from tools.options import command_line

_DECAY = "weight decay 0.01"
_ALL = "alpha 0, beta 1"
SYNCHRONOUS = f"synchronous, 0.014 0.016, {_DECAY}"
BYTES = {  # each method at its own learning rates; a replica receives as many bytes as it sends
    "NoLoCo, int8": (
        f"every step, 0.04 0.032, {_DECAY}",
        f"every 2 steps, 0.028 0.032, {_DECAY}",
        f"every 3 steps, 0.02 0.032, {_DECAY}",
        f"every 10 steps, 0.02 0.016, {_DECAY}",
        f"every 30 steps, 0.014 0.016, {_DECAY}",
        f"every 100 steps, 0.014 0.016, {_DECAY}",
    ),
    "DiLoCo, fp32": (
        f"DiLoCo, every step, {_ALL}, 0.04 0.032, {_DECAY}",
        f"DiLoCo, every 3 steps, {_ALL}, 0.04 0.032, {_DECAY}",
        f"DiLoCo, every 10 steps, {_ALL}, 0.028 0.032, {_DECAY}",
    ),
    "DiLoCo, int8": (
        f"all 8 in one group, int8, every 3 steps, 0.028 0.032, {_DECAY}",
        f"all 8 in one group, int8, every 10 steps, 0.028 0.032, {_DECAY}",
    ),
    "NoLoCo, int4": (
        "NoLoCo int4, every step, 0.04 0.032",
        "NoLoCo int4, every 3 steps, 0.02 0.032",
        "NoLoCo int4, every 7 steps, 0.02 0.023",
        "NoLoCo int4, every 14 steps, 0.014 0.016",
        "NoLoCo int4, every 33 steps, 0.014 0.016",
    ),
    "DiLoCo, int4": (
        "DiLoCo int4, every 3 steps, 0.04 0.032",
        "DiLoCo int4, every 9 steps, 0.028 0.032",
        "DiLoCo int4, every 17 steps, 0.02 0.023",
        "DiLoCo int4, every 35 steps, 0.014 0.016",
        "DiLoCo int4, every 83 steps, 0.014 0.016",
    ),
    "SparseLoCo": (
        "SparseLoCo 0.5, every 9 steps, 0.028 0.032",
        "SparseLoCo 0.5, every 17 steps, 0.02 0.023",
        "SparseLoCo 0.5, every 35 steps, 0.02 0.023",
        "SparseLoCo 0.5, every 83 steps, 0.014 0.016",
    ),
}
FIRST_TEXT = ("weight decay", "DiLoCo", "front")  # their studies
STEPS = 2000  # of these rows
DELAYS = {
    0: "fp32",
    1: "delay of 1 step",
    5: "delay of 5 steps",
    10: "delay of 10 steps",
}  # of study "exchange"

Runs = Mapping[tuple[str, str], list[tuple[float, float]]]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="with evidence.csv; the figures go there")
    folder = parser.parse_args().folder
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = read(folder / "evidence.csv")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    weights = 84_816
    left.axhline(_of(runs, SYNCHRONOUS)[1], color="black", linewidth=1, label="synchronous")
    for name, rows in BYTES.items():
        points = [_of(runs, row) for row in rows]
        sent = [one[0] / weights / STEPS for one in points]
        left.errorbar(
            sent, [one[1] for one in points], [one[2] for one in points], marker="o", capsize=3, label=name
        )
    left.set_xscale("log")
    left.set_xlabel("bytes sent per weight and local step")
    left.set_ylabel("loss of the mean model")
    left.legend(frameon=False)
    points = [_of(runs, row, ["exchange"]) for row in DELAYS.values()]
    right.errorbar(
        list(DELAYS), [one[1] for one in points], [one[2] for one in points], marker="o", capsize=3
    )
    right.axhline(_of(runs, "synchronous", ["exchange"])[1], color="black", linewidth=1)
    right.set_xlabel("local steps of delay, a round every 10 (1,000 local steps)")
    figure.savefig(folder / "loss.png", dpi=120)


def read(file: Path) -> Runs:
    """Return sent bytes and loss of each run, by study and method."""
    found = defaultdict(list)
    for row in csv.DictReader(file.read_text().splitlines()):
        found[row["study"], row["method"]].append((float(row["sent_bytes"]), float(row["mean_model_loss"])))
    return found


def _of(runs: Runs, method: str, studies: Collection[str] = FIRST_TEXT) -> tuple[float, float, float]:
    """Return mean bytes and loss over the seeds, and the deviation of losses, 0 for one seed."""
    found = [one for study in studies for one in runs.get((study, method), [])]
    losses = [loss for _, loss in found]
    deviation = stdev(losses) if len(losses) > 1 else 0.0
    return mean(sent for sent, _ in found), mean(losses), deviation


if __name__ == "__main__":
    main()
