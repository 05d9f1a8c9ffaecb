"""The figures of docs/evidence.md, from docs/evidence.csv: loss over bytes, perplexity over replicas and texts.

python -m tools.figures docs
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import exp
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from tools.evidence import STEPS, WEIGHTS, Run, read
from tools.options import command_line
from tools.rates import by_text, on_texts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        "NoLoCo int4, every 7 steps, 0.028 0.032",
        "NoLoCo int4, every 14 steps, 0.014 0.016",
        "NoLoCo int4, every 33 steps, 0.014 0.016",
    ),
    "DiLoCo, int4": (
        "NoLoCo int4, groups of 8, every step, 0.056 0.045",  # of all
        "DiLoCo int4, every 2 steps, 0.04 0.032",
        "DiLoCo int4, every 3 steps, 0.04 0.032",
        "DiLoCo int4, every 9 steps, 0.028 0.032",
        "DiLoCo int4, every 17 steps, 0.02 0.023",
        "DiLoCo int4, every 35 steps, 0.014 0.016",
        "DiLoCo int4, every 83 steps, 0.014 0.016",
    ),
    "DiLoCo, int4, Nesterov 0.7 and 0.9": (
        "DiLoCo int4, Nesterov 0.7 0.9, every 35 steps, 0.028 0.032",
        "DiLoCo int4, Nesterov 0.7 0.9, every 83 steps, 0.028 0.032",
    ),
    "NoLoCo, int4, Nesterov 0.7 and 0.8": (
        "NoLoCo int4, Nesterov 0.7 0.8, every 14 steps, 0.02 0.023",
        "NoLoCo int4, Nesterov 0.7 0.8, every 33 steps, 0.014 0.016",
    ),
    "SparseLoCo": (
        "SparseLoCo 0.5, every 9 steps, 0.028 0.032",
        "SparseLoCo 0.5, every 17 steps, 0.02 0.023",
        "SparseLoCo 0.5, every 35 steps, 0.02 0.023",
        "SparseLoCo 0.5, every 83 steps, 0.01 0.011",
    ),
}
REPLICAS = {  # of each method, the number of replicas, its row and that of synchronous training
    "pairs, int8": (
        (
            4,
            f"every step, 0.028 0.023 @ 4 replicas, {_DECAY}",
            f"synchronous, 0.01 0.016 @ 4 replicas, {_DECAY}",
        ),
        (8, f"every step, 0.04 0.032, {_DECAY}", SYNCHRONOUS),
        (
            16,
            f"every step, 0.04 0.032 @ 16 replicas, {_DECAY}",
            f"synchronous, 0.02 0.032 @ 16 replicas, {_DECAY}",
        ),
        (32, "pairs in cycles, int8 @ 32 replicas", "synchronous @ 32 replicas"),
    ),
    "groups of 8, from 32 replicas on of 16, int4": (
        (
            16,
            "NoLoCo int4, groups of 8, every step, 0.08 0.064 @ 16 replicas",
            f"synchronous, 0.02 0.032 @ 16 replicas, {_DECAY}",
        ),
        (32, "random groups of 16, int4 @ 32 replicas", "synchronous @ 32 replicas"),
        (64, "random groups of 16, int4 @ 64 replicas", "synchronous @ 64 replicas"),
    ),
}
LENGTHS, EVERY = (200, 500, 2000), ("step", "3 steps", "10 steps")  # of the study "texts"
STUDIES = (
    "weight decay",
    "DiLoCo",
    "front",
    "replicas",
)  # of this text, with 512 tokens per replica and step
Runs = Mapping[str, list[Run]]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="with evidence.csv; the figures go there")
    folder = parser.parse_args().folder
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = read(folder / "evidence.csv")
    for name, draw in {"bytes": draw_bytes, "replicas": draw_replicas, "texts": draw_texts}.items():
        figure, axes = pyplot.subplots(figsize=(6.5, 3.6), layout="constrained")
        draw(axes, runs)
        axes.legend(frameon=False, title="open circles: one seed", fontsize="small", title_fontsize="small")
        figure.savefig(folder / f"{name}.png", dpi=120)


def draw_bytes(axes: "Axes", rows: Iterable[Run]) -> None:
    runs = methods(rows)
    axes.axhline(mean(run.loss for run in runs[SYNCHRONOUS]), color="black", linewidth=1, label="synchronous")
    for name, shown in BYTES.items():
        sent = [mean(run.sent for run in runs[row]) / WEIGHTS / STEPS for row in shown]
        losses = [[run.loss for run in runs[row]] for row in shown]
        _line(axes, name, sent, losses)
    axes.set_xscale("log")
    axes.set_xlabel("bytes sent per weight and local step")
    axes.set_ylabel("loss of the mean model")


def draw_replicas(axes: "Axes", rows: Iterable[Run]) -> None:
    runs = methods(rows)
    axes.axhline(0, color="black", linewidth=1, label="synchronous")
    for name, shown in REPLICAS.items():
        lost = []
        for _, method, synchronous in shown:
            least = {run.seed: run.loss for run in runs[synchronous]}
            lost.append([100 * (exp(run.loss - least[run.seed]) - 1) for run in runs[method]])
        _line(axes, name, [row[0] for row in shown], lost)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := [4, 8, 16, 32, 64], [str(tick) for tick in ticks])
    axes.set_xlabel("replicas of 512 tokens per step, a round every step")
    axes.set_ylabel("% of perplexity lost")


def draw_texts(axes: "Axes", runs: Iterable[Run]) -> None:
    """Draw what each length of runs loses: a circle for each text, at its own best rates, and their range."""
    runs = [run for run in runs if run.study == "texts"]
    found = by_text((run.method, run.learning_rate, run.seed, run.loss) for run in runs)
    axes.axhline(0, color="black", linewidth=1, label="synchronous")
    places = {}  # of the longest runs
    for place, steps in enumerate(LENGTHS):
        label: str | None = f"{steps:,} steps"
        for every in EVERY:
            name = f"a round every {every}"
            sent = mean(
                run.sent / WEIGHTS / steps
                for run in runs
                if run.method.startswith(f"{name} @ ") and run.method.endswith(f", {steps} steps")
            )
            lost = sorted(text.above for text in on_texts(found, name, steps))
            if steps == LENGTHS[-1]:
                places[sent] = every
            across = [sent * 1.06 ** (place - 1)] * len(lost)
            axes.plot(across, lost, marker="o", markerfacecolor="white", color=f"C{place}", label=label)
            label = None
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks([*places], [f"{sent:.2g}\nevery {every}" for sent, every in places.items()])
    axes.set_xlabel("bytes sent per weight and local step, in rounds")
    axes.set_ylabel("% of perplexity lost")


def _line(axes: "Axes", name: str, places: list[float], found: list[list[float]]) -> None:
    """Draw means over seeds, with deviations; a point of one seed is open."""
    means = [mean(values) for values in found]
    (line,) = axes.plot(places, means, marker="o", markerfacecolor="white", label=name)
    several = [
        (x, y, stdev(values)) for x, y, values in zip(places, means, found, strict=True) if len(values) > 1
    ]
    for x, y, deviation in several:
        axes.errorbar(x, y, deviation, marker="o", capsize=3, color=line.get_color())


def methods(runs: Iterable[Run]) -> Runs:
    """Return the runs of each method of `STUDIES`."""
    found = defaultdict(list)
    for run in runs:
        if run.study in STUDIES:
            found[run.method].append(run)
    return found


if __name__ == "__main__":
    main()
