"""Print what a study of learning rates found: best rates by length, and what other choices lose.

    python -m tools.rates runs/texts

Reads OUTPUT/results.jsonl of a study whose runs are named "METHOD @ TEXT, N steps" (tools/studies/texts.json),
also while it is under way. The best rate is the lowest point of a parabola, as in `tune`. The rate that `tune`
would find is computed from the runs of a tenth of the steps. Its loss is interpolated between the long runs, and
given in per cent of perplexity above the best of these.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from megatron_noloco.preflight.search import best_factor, too_high
from tools.options import command_line
from tools.simulator.report import BASELINES, finite
from tools.study import read

Losses = dict[float, float]  # of the mean model, by `muon_lr`


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("output", type=Path)
    found: dict[tuple[str, str], dict[int, Losses]] = defaultdict(lambda: defaultdict(dict))
    for key, result in read(parser.parse_args().output / "results.jsonl").items():
        method, _, group = key.name.partition(" @ ")
        text, _, length = group.removesuffix(" steps").partition(", ")
        found[text, method][int(length)][key.learning_rate] = finite(result["mean_model_loss"])
    print(f"| text | method | steps | best `muon_lr` | loss there | others: `muon_lr`, loss |\n{'|---' * 6}|")
    for (text, method), by_length in found.items():
        for steps, losses in sorted(by_length.items()):
            best = min(losses, key=losses.__getitem__)
            others = ", ".join(
                f"{rate:g} {loss:.4f}" for rate, loss in sorted(losses.items()) if rate != best
            )
            shown = f"{best_factor(losses):.3g}" if complete(losses) else f"{best:g}?"
            print(f"| {text} | {method} | {steps} | {shown} | {losses[best]:.4f} | {others} |")
    print("\n| text | method | steps | `tune` would take | best | loses |\n|---|---|---|---|---|---|")
    for (text, method), by_length in found.items():
        for steps, losses in sorted(by_length.items()):
            short = by_length.get(steps // 10, {})
            if short and complete(short) and complete(losses):
                rate = best_factor(short) / too_high(method not in BASELINES, local_steps(method))
                lost = math.expm1(interpolate(losses, rate) - min(losses.values()))
                best = best_factor(losses)
                print(f"| {text} | {method} | {steps} | {rate:.3g} | {best:.3g} | {100 * lost:.1f} % |")


def local_steps(method: str) -> int:
    """Return how often there is a round, by the method's name; 1 where the name has no number."""
    return int((re.findall(r"every (\d+) steps", method) or [1])[0])


def complete(losses: Mapping[float, float]) -> bool:
    """Return whether the best run has a neighbour on both sides."""
    return min(losses) < min(losses, key=losses.__getitem__) < max(losses)


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
