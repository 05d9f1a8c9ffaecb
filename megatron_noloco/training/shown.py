"""How numbers read in a line: one piece of text for each that is shown.

A piece names its numbers in braces, as in `str.format`. A format may begin with a unit, which converts first: `ms`
(from seconds), `MB` (from bytes), `%` (from a share).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_noloco.metrics.writers import Row

_NOTABLE_DATA_WAIT = 0.01  # of the step's time; less is left out of the line


@dataclass(frozen=True)
class Piece:
    """Text with numbers, shown where `when` holds for the row."""

    text: str
    when: Callable[[Row], bool] = lambda row: True


def _round(row: Row) -> bool:
    return "round/index" in row


def _scaled(row: Row) -> bool:
    return bool(row["train/loss_scale"] != 1)


# Megatron's log line, continued by the round's figures.
LINE = (
    Piece("consumed samples: {train/consumed_samples:.0f}"),
    Piece("elapsed time per iteration (ms): {speed/seconds_per_step:ms.1f}"),
    Piece("tokens per second: {speed/tokens_per_second:.0f}"),
    Piece("learning rate: {train/learning_rate:.3E}"),
    Piece("lm loss: {train/loss:.4f}"),
    Piece("grad norm: {train/grad_norm:.3f}"),
    Piece("loss scale: {train/loss_scale:g}", _scaled),
    Piece("skipped iterations: {train/skipped_steps:.0f}", _scaled),
    Piece(
        "routed: {routing/share:%.0f} % hop wait (ms): {routing/wait_seconds:ms.1f}",
        lambda row: row["routing/share"] > 0,
    ),
    Piece(
        "data wait (ms): {data/wait_seconds:ms.1f}",
        lambda row: row["data/wait_seconds"] > _NOTABLE_DATA_WAIT * row["speed/seconds_per_step"],
    ),
    Piece("round {round/index:.0f} {round/partners}", _round),
    Piece(
        "exchange (ms): {round/exchange_seconds:ms.1f} wait (ms): {round/wait_seconds:ms.1f} "
        "sent (MB): {round/sent_bytes:MB.2f}",
        _round,
    ),
    Piece("spread: {round/spread:.3E}", lambda row: _round(row) and not math.isnan(row["round/spread"])),
    Piece(
        "poisoned elements: {round/poisoned_elements:.0f}",
        lambda row: row.get("round/poisoned_elements", 0) > 0,
    ),
)

# Under the progress bar.
STEP_FIGURES = (
    Piece("loss {train/loss:.3f}"),
    Piece("learning rate {train/learning_rate:.2e}"),
    Piece("{speed/tokens_per_second:.0f} tokens/s"),
)
ROUND_FIGURES = (
    Piece("round {round/index:.0f} {round/partners}"),
    Piece("exchange {round/exchange_seconds:ms.0f} ms (wait {round/wait_seconds:ms.0f})"),
    Piece("sent {total/sent_bytes:MB.0f} MB"),
    Piece("spread {round/spread:.1e}"),
)


def log_line(row: Row, total_steps: int) -> str:
    first = f" iteration {row['step']:{len(str(total_steps))}d}/{total_steps}"
    return " | ".join([first, *texts(LINE, row)]) + " |"


def validation_lines(row: Row, unigram_entropy: float) -> list[str]:
    """Of a row of kind "evaluation": the losses, and a line per dataset of a blend."""
    spread, mean = row["validation/spread"], row["validation/mean_model_loss"]
    parts = [
        f" validation at iteration {row['step']}",
        f"replicas: {_losses(row['validation/replica_losses'])}",
    ]
    if not math.isnan(mean):
        parts.append(f"mean model: {mean:.4f}")
        if not math.isnan(spread):
            parts.append(f"spread: {spread:.3E}")
    lines = [" | ".join([*parts, f"unigram: {unigram_entropy:.4f} |"])]
    of = "validation/replica_losses of "
    return lines + [
        f"   {name.removeprefix(of)} | replicas: {_losses(row[name])} |"
        for name in row
        if name.startswith(of)
    ]


def texts(pieces: Iterable[Piece], row: Row) -> list[str]:
    figures = {name: _Figure(value) for name, value in row.items()}
    return [piece.text.format_map(figures) for piece in pieces if piece.when(row)]


_UNITS: dict[str, Callable[[float], float]] = {
    "ms": lambda seconds: 1000 * seconds,
    "MB": lambda size: size / 1e6,
    "%": lambda share: 100 * share,
}


@dataclass(frozen=True)
class _Figure:
    value: Any

    def __format__(self, spec: str) -> str:
        if isinstance(self.value, list):
            return _partners(self.value)
        for unit, convert in _UNITS.items():
            if spec.startswith(unit):
                return format(convert(self.value), spec.removeprefix(unit))
        return format(self.value, spec)


def _partners(partners: list[int]) -> str:
    if not partners:
        return "bye"
    return ("partner " if len(partners) == 1 else "partners ") + ",".join(map(str, partners))


def _losses(losses: list[float]) -> str:
    return " ".join(f"{loss:.4f}" for loss in losses)
