"""Print what a study of learning rates found: best rates by length, and what other choices lose.

    python -m tools.rates runs/texts

Reads OUTPUT/results.jsonl of a study whose runs are named "METHOD @ TEXT, N steps" (tools/studies/texts.json),
also while it is under way. The best rate is the lowest point of a parabola, as in `tune`. The rate that `tune`
would find is computed from the runs of a tenth of the steps. Its loss is interpolated between the long runs, and
given in per cent of perplexity above the best of these. The second table is in docs/evidence-details.md.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_noloco.preflight.search import TOO_HIGH, best_factor
from tools.options import command_line
from tools.simulator.report import Key, as_rows, finite
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
    for (text, method), by_length in by_text(results).items():
        for steps, losses in sorted(by_length.items()):
            best = min(losses, key=losses.__getitem__)
            others = ", ".join(
                f"{rate:g} {loss:.4f}" for rate, loss in sorted(losses.items()) if rate != best
            )
            shown = f"{best_factor(losses):.3g}" if complete(losses) else f"{best:g}?"
            rows.append((text, method, steps, shown, f"{losses[best]:.4f}", others))
    print(f"{as_rows(rows)}\n{over_texts(results)}")


def by_text(results: Mapping[Key, Mapping[str, Any]]) -> ByText:
    """Return the losses of a study, by text and method, then by the number of local steps."""
    found: dict[tuple[str, str], dict[int, Losses]] = defaultdict(lambda: defaultdict(dict))
    for key, result in results.items():
        method, _, group = key.name.partition(" @ ")
        text, _, length = group.removesuffix(" steps").partition(", ")
        found[text, method][int(length)][key.learning_rate] = finite(result["mean_model_loss"])
    return dict(found)


def over_texts(results: Mapping[Key, Mapping[str, Any]]) -> str:
    """Return a table of what each method loses, the worst text first; of texts whose searches have ended."""
    found = by_text(results)
    head = (
        "local steps",
        "method",
        "perplexity above synchronous",
        "best `muon_lr`",
        "lost at the rate of `tune`",
    )
    rows: list[Sequence[object]] = [head]
    for steps in sorted({steps for by_length in found.values() for steps in by_length}, reverse=True):
        for method in dict.fromkeys(method for _, method in found):
            texts = sorted(_on_texts(found, method, steps), reverse=True)
            if texts:
                above = ", ".join(
                    f"{text.above:.1f} % {text.name}" for text in texts if method != "synchronous"
                )
                best = ", ".join(f"{text.rate:.2g} {text.name}" for text in texts)
                tuned = ", ".join(
                    f"{text.tuned:.1f} % {text.name}" for text in texts if text.tuned is not None
                )
                rows.append([steps, method, above, best, tuned])
    return as_rows(rows)


class OnText(NamedTuple):
    """A method on a text, beside synchronous training; perplexity in per cent."""

    above: float
    name: str
    rate: float  # the best `muon_lr`
    tuned: float | None  # above that at the best rate; None: no runs of a tenth of the steps


def _on_texts(found: ByText, method: str, steps: int) -> Iterator[OnText]:
    for text in dict.fromkeys(text for text, _ in found):
        own, synchronous = found.get((text, method), {}), found.get((text, "synchronous"), {})
        losses, least = own.get(steps, {}), synchronous.get(steps, {})
        if complete(losses) and complete(least):
            above = 100 * math.expm1(min(losses.values()) - min(least.values()))
            yield OnText(above, text, best_factor(losses), lost_by_tune(own, steps))


def lost_by_tune(by_length: Mapping[int, Losses], steps: int) -> float | None:
    """Return what the rate that `tune` would take loses, in per cent of perplexity; None: a search is missing."""
    short, losses = by_length.get(steps // 10, {}), by_length[steps]
    if not (complete(short) and complete(losses)):
        return None
    rate = best_factor(short) / TOO_HIGH
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
