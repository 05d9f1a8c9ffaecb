"""What searches of learning rates found: best rates by text and length, and what other choices lose.

Runs are named "METHOD @ TEXT, N steps" (tools/studies/texts.json). The best rate is the lowest point of a
parabola, as in `tune`. The rate that `tune` would find is computed from the runs of a tenth of the steps; another
is the best one on the first text. Their losses are interpolated between the long runs.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron_noloco.preflight.search import SHORT_RUN_RATE_RATIO, best_factor

Losses = dict[float, float]  # of the mean model, by `muon_lr`
ByText = dict[tuple[str, str], dict[int, Losses]]  # text and method; number of local steps


def as_rows(rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown; the first row is its head."""
    head, *others = [f"| {' | '.join(map(str, row))} |\n" for row in rows]
    return f"{head}{'|---' * (head.count(' | ') + 1)}|\n{''.join(others)}"


def by_text(runs: Iterable[tuple[str, float, int, float]]) -> ByText:
    """Return the losses of a study's first seed, by text and method, then by the number of local steps.

    Args:
        runs: name, learning rate, seed and loss of each.
    """
    runs = list(runs)
    first = min((seed for _, _, seed, _ in runs), default=0)
    found: dict[tuple[str, str], dict[int, Losses]] = defaultdict(lambda: defaultdict(dict))
    for name, rate, seed, loss in runs:
        if seed != first:
            continue
        method, _, group = name.partition(" @ ")
        text, _, length = group.removesuffix(" steps").partition(", ")
        found[text, method][int(length)][rate] = loss
    return dict(found)


def over_texts(found: ByText) -> str:
    """Return a table of what each method loses on each text, and at which rate; of searches that have ended."""
    texts, methods = _sides(found)
    rows: list[Sequence[object]] = [("local steps", "method", *texts)]
    for steps in sorted({steps for by_length in found.values() for steps in by_length}, reverse=True):
        for method in methods:
            if on := {text.name: text for text in on_texts(found, method, steps)}:
                cells = (
                    f"{on[text].above:.1f} % ({on[text].rate:.2g})" if text in on else "" for text in texts
                )
                rows.append([f"{steps:,}", method, *cells])
    return as_rows(rows)


def over_choices(found: ByText) -> str:
    """Return a table of what each method loses at rates that were chosen in three ways; of the longest runs."""
    texts, methods = _sides(found)
    longest = max(steps for by_length in found.values() for steps in by_length)
    rows: list[Sequence[object]] = [("method", "learning rates", *texts)]
    for method in methods:
        on = {text.name: text for text in on_texts(found, method, longest)}
        for choice, label in CHOICES.items():
            found_on = {
                name: lost for name, text in on.items() if (lost := getattr(text, choice)) is not None
            }
            cells = (f"{found_on[text]:.1f} %" if text in found_on else "" for text in texts)
            rows += [[method, label.format(texts[0]), *cells]] * bool(found_on)
    return as_rows(rows)


def _sides(found: ByText) -> tuple[list[str], list[str]]:
    """Return the texts and the methods, in the order of the study."""
    return [*dict.fromkeys(text for text, _ in found)], [*dict.fromkeys(method for _, method in found)]


class OnText(NamedTuple):
    """A method on a text, in per cent of perplexity above synchronous training at its best rate.

    None: runs are missing.
    """

    above: float  # at the best rate
    name: str
    rate: float  # the best `muon_lr`
    tuned: float | None  # at the rate that `tune` would take
    of_first: float | None  # at the best rate of the first text; None there


CHOICES = {"of_first": "best on {}", "tuned": "of `tune`", "above": "searched"}


def on_texts(found: ByText, method: str, steps: int) -> list[OnText]:
    """Return the method on all texts whose searches have ended."""
    texts, _ = _sides(found)
    there = found.get((texts[0], method), {}).get(steps, {})
    rate_of_first = best_factor(there) if complete(there) else None
    on = []
    for text in texts:
        own, synchronous = found.get((text, method), {}), found.get((text, "synchronous"), {})
        losses, others = own.get(steps, {}), synchronous.get(steps, {})
        if complete(losses) and complete(others):
            short, best, least = own.get(steps // 10, {}), min(losses.values()), min(others.values())
            rates = (
                best_factor(short) / SHORT_RUN_RATE_RATIO if complete(short) else None,
                rate_of_first if text != texts[0] else None,
            )
            # Between two runs the parabola may be below both.
            at = [None if rate is None else max(best, interpolate(losses, rate)) for rate in rates]
            tuned, of_first = (None if loss is None else above(loss, least) for loss in at)
            on.append(OnText(above(best, least), text, best_factor(losses), tuned, of_first))
    return on


def above(loss: float, least: float) -> float:
    """Return by how much the perplexity is higher, in per cent."""
    return 100 * math.expm1(loss - least)


def complete(losses: Mapping[float, float]) -> bool:
    """Return whether the best run has a neighbour on both sides."""
    return bool(losses) and min(losses) < min(losses, key=losses.__getitem__) < max(losses)


def interpolate(losses: Mapping[float, float], rate: float) -> float:
    """Return the loss at a rate by the parabola through the nearest three runs, over log(rate)."""
    near = sorted(losses, key=lambda tried: abs(math.log(tried / rate)))[:3]
    parabola = np.polyfit(np.log(near) - math.log(rate), [losses[one] for one in near], len(near) - 1)
    return float(parabola[-1])
