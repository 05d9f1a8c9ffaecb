"""Print what a study of learning rates found: best rates by length, and what other choices lose.

    python -m tools.rates runs/texts

Reads OUTPUT/results.jsonl of a study whose runs are named "METHOD @ TEXT, N steps" (tools/studies/texts.json),
also while it is under way. The best rate is the lowest point of a parabola, as in `tune`. The rate that `tune`
would find is computed from the runs of a tenth of the steps; another is the best one on Python. Their losses are
interpolated between the long runs, and given in per cent of perplexity above the best of these. The second table
is in docs/evidence-details.md.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_noloco.preflight.search import TOO_HIGH, best_factor
from tools.options import command_line
from tools.simulator.report import as_rows, finite
from tools.study import read

Losses = dict[float, float]  # of the mean model, by `muon_lr`
ByText = dict[tuple[str, str], dict[int, Losses]]  # text and method; number of local steps


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("output", type=Path)
    results = read(parser.parse_args().output / "results.jsonl")
    rows: list[Sequence[object]] = [
        ("text", "method", "steps", "best `muon_lr`", "loss there", "others: `muon_lr`, loss")
    ]
    found = by_text(
        (key.name, key.learning_rate, finite(result["mean_model_loss"])) for key, result in results.items()
    )
    for (text, method), by_length in found.items():
        for steps, losses in sorted(by_length.items()):
            best = min(losses, key=losses.__getitem__)
            others = ", ".join(
                f"{rate:g} {loss:.4f}" for rate, loss in sorted(losses.items()) if rate != best
            )
            shown = f"{best_factor(losses):.3g}" if complete(losses) else f"{best:g}?"
            rows.append((text, method, steps, shown, f"{losses[best]:.4f}", others))
    print(f"{as_rows(rows)}\n{over_texts(found)}")


def by_text(runs: Iterable[tuple[str, float, float]]) -> ByText:
    """Return the losses of a study, by text and method, then by the number of local steps.

    Args:
        runs: name, learning rate and loss of each.
    """
    found: dict[tuple[str, str], dict[int, Losses]] = defaultdict(lambda: defaultdict(dict))
    for name, rate, loss in runs:
        method, _, group = name.partition(" @ ")
        text, _, length = group.removesuffix(" steps").partition(", ")
        found[text, method][int(length)][rate] = loss
    return dict(found)


def over_texts(found: ByText) -> str:
    """Return a table of what each method loses, the worst text first; of texts whose searches have ended."""
    head = (
        "local steps",
        "method",
        "perplexity above synchronous",
        "best `muon_lr`",
        "lost at Python's best rate",
        "lost at the rate of `tune`",
    )
    rows: list[Sequence[object]] = [head]
    for steps in sorted({steps for by_length in found.values() for steps in by_length}, reverse=True):
        for method in dict.fromkeys(method for _, method in found):
            if texts := on_texts(found, method, steps):
                above = {text.name: text.above for text in texts if method != "synchronous"}
                best = ", ".join(f"{text.rate:.2g} {text.name}" for text in texts)
                lost = (
                    {text.name: text.of_first for text in texts},
                    {text.name: text.tuned for text in texts},
                )
                rows.append([steps, method, _per_cent(above), best, *map(_per_cent, lost)])
    return as_rows(rows)


def _per_cent(by_text: Mapping[str, float | None]) -> str:
    return ", ".join(f"{value:.1f} % {text}" for text, value in by_text.items() if value is not None)


class OnText(NamedTuple):
    """A method on a text, beside synchronous training; perplexity in per cent. None: runs are missing."""

    above: float
    name: str
    rate: float  # the best `muon_lr`
    of_first: float | None  # above that at the best rate, at the best rate of the first text; None there
    tuned: float | None  # above that at the best rate, at the rate that `tune` would take


def on_texts(found: ByText, method: str, steps: int) -> list[OnText]:
    """Return the method on all texts whose searches have ended, the worst first."""
    first, *others = dict.fromkeys(text for text, _ in found)
    there = found.get((first, method), {}).get(steps, {})
    rate_of_first = best_factor(there) if complete(there) else None
    texts = []
    for text in (first, *others):
        own, synchronous = found.get((text, method), {}), found.get((text, "synchronous"), {})
        losses, least = own.get(steps, {}), synchronous.get(steps, {})
        if complete(losses) and complete(least):
            above = 100 * math.expm1(min(losses.values()) - min(least.values()))
            of_first = lost_at(rate_of_first, losses) if rate_of_first and text != first else None
            texts.append(OnText(above, text, best_factor(losses), of_first, lost_by_tune(own, steps)))
    return sorted(texts, reverse=True)


def lost_by_tune(by_length: Mapping[int, Losses], steps: int) -> float | None:
    """Return what the rate that `tune` would take loses, in per cent of perplexity; None: a search is missing."""
    short, losses = by_length.get(steps // 10, {}), by_length[steps]
    if not (complete(short) and complete(losses)):
        return None
    return lost_at(best_factor(short) / TOO_HIGH, losses)


def lost_at(rate: float, losses: Losses) -> float:
    """Return what a rate loses against the best of the runs, in per cent of perplexity."""
    above = 100 * math.expm1(interpolate(losses, rate) - min(losses.values()))
    return max(above, 0.0)  # between two runs the parabola may be below both


def complete(losses: Mapping[float, float]) -> bool:
    """Return whether the best run has a neighbour on both sides."""
    return bool(losses) and min(losses) < min(losses, key=losses.__getitem__) < max(losses)


def interpolate(losses: Mapping[float, float], rate: float) -> float:
    """Return the loss at a rate by the parabola through the nearest three runs, over log(rate)."""
    near = sorted(losses, key=lambda tried: abs(math.log(tried / rate)))[:3]
    total = 0.0
    for one in near:
        others = [other for other in near if other != one]
        total += losses[one] * math.prod(math.log(rate / other) / math.log(one / other) for other in others)
    return total


if __name__ == "__main__":
    main()
