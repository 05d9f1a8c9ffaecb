"""The figures of docs/evidence.md, from docs/evidence.csv: loss over bytes, perplexity over replicas and texts.

python -m tools.figures docs
"""

from collections.abc import Iterable, Sequence
from math import expm1
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from tools.evidence import STEPS, WEIGHTS, Run, found, read
from tools.options import command_line
from tools.rates import by_text, on_texts
from tools.tables import TABLES, crossed, definitions, grouped, parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTHS, EVERY = (200, 500, 2000), ("step", "3 steps", "10 steps")  # of the study "texts"


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


def draw_bytes(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draw the columns of the table "bytes", without its rows of 16 replicas."""
    lines, methods = parts(definitions(TABLES.read_text())["bytes"], runs)
    synchronous = found("synchronous, weight decay 0.01", methods)
    assert synchronous is not None
    least = mean(run.loss for run in synchronous.best.values())
    axes.axhline(least, color="black", linewidth=1, label="synchronous")
    columns: dict[str, dict[float, list[float]]] = {}
    for label, row in crossed(lines, methods).items():
        for title, method in row.items() if not label.startswith("16 replicas") else ():
            sent = mean(run.sent for run in method.best.values()) / WEIGHTS / STEPS
            columns.setdefault(title, {})[sent] = [run.loss for run in method.best.values()]
    for title, losses in columns.items():
        _line(axes, title, [*losses], [*losses.values()])
    axes.set_xscale("log")
    axes.set_xlabel("bytes sent per weight and local step")
    axes.set_ylabel("loss of the mean model")


def draw_replicas(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draw pairs, and the largest groups, of each number of replicas in the table "replicas"."""
    table = grouped(*parts(definitions(TABLES.read_text())["replicas"], runs))
    axes.axhline(0, color="black", linewidth=1, label="synchronous")
    lines: dict[str, dict[int, list[float]]] = {"pairs, int8": {}, "the largest groups, int4": {}}
    for group, rows in table.items():
        for label, method in rows[1:]:
            name = label if label in lines else "the largest groups, int4"
            least = {seed: run.loss for seed, run in rows[0][1].best.items()}
            lost = [100 * expm1(run.loss - least[seed]) for seed, run in method.best.items() if seed in least]
            lines[name][int(group.split()[0])] = lost
    for name, losses in lines.items():
        _line(axes, name, [*losses], [*losses.values()])
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := [4, 8, 16, 32, 64], [str(tick) for tick in ticks])
    axes.set_xlabel("replicas of 512 tokens per step, a round every step")
    axes.set_ylabel("% of perplexity lost")


def draw_texts(axes: "Axes", runs: Iterable[Run]) -> None:
    """Draw what each length of runs loses: a circle for each text, at its own best rates, and their range."""
    runs = [run for run in runs if run.study == "texts"]
    losses = by_text((run.method, run.learning_rate, run.seed, run.loss) for run in runs)
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
            lost = sorted(text.above for text in on_texts(losses, name, steps))
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


def _line(axes: "Axes", name: str, places: Sequence[float], values: list[list[float]]) -> None:
    """Draw means over seeds, with deviations; a point of one seed is open."""
    means = [mean(each) for each in values]
    (line,) = axes.plot(places, means, marker="o", markerfacecolor="white", label=name)
    several = [(x, y, stdev(each)) for x, y, each in zip(places, means, values, strict=True) if len(each) > 1]
    for x, y, deviation in several:
        axes.errorbar(x, y, deviation, marker="o", capsize=3, color=line.get_color())


if __name__ == "__main__":
    main()
