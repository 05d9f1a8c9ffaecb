"""How rows of numbers read: one entry for each number that is shown."""

import math
from collections.abc import Callable

from megatron_noloco.monitor.writers import Row

_NOTABLE_DATA_WAIT = 0.01  # of the step's time; less is left out of the line

Piece = Callable[[Row], str]  # empty: nothing to show

# Megatron's log line ...
_STEP: tuple[Piece, ...] = (
    lambda row: f"consumed samples: {row['train/consumed_samples']}",
    lambda row: f"elapsed time per iteration (ms): {1000 * row['speed/seconds_per_step']:.1f}",
    lambda row: f"throughput per GPU (TFLOP/s/GPU): {row['speed/tflops_per_gpu']:.4g}",
    lambda row: f"MFU: {100 * row['speed/mfu']:.1f} %" if "speed/mfu" in row else "",
    lambda row: f"tokens per second: {_tokens_per_second(row)}",
    lambda row: f"peak memory (GB): {row['memory/peak_bytes'] / 1e9:.2f}",
    lambda row: f"learning rate: {row['train/learning_rate']:.3E}",
    lambda row: f"lm loss: {row['train/loss']:.4f}",
    lambda row: f"grad norm: {row['train/grad_norm']:.3f}",
    lambda row: f"loss scale: {row['train/loss_scale']:g}" if row["train/loss_scale"] != 1 else "",
    lambda row: f"skipped iterations: {skipped}" if (skipped := row["train/skipped_steps"]) else "",
    lambda row: f"iterations left out: {left_out}" if (left_out := row.get("total/skipped_ahead")) else "",
    lambda row: _routed(row) if row["routing/share"] else "",
    lambda row: f"data wait (ms): {1000 * row['data/wait_seconds']:.1f}" if _data_is_late(row) else "",
)
# ... continued by the round's figures.
_ROUND: tuple[Piece, ...] = (
    lambda row: _round(row),
    lambda row: (
        f"exchange (ms): {1000 * row['round/exchange_seconds']:.1f} "
        f"wait (ms): {1000 * row['round/wait_seconds']:.1f} sent (MB): {row['round/sent_bytes'] / 1e6:.2f}"
    ),
    lambda row: (
        f"late partner: {row['late/partner']} by (ms): {1000 * row['late/seconds']:.1f}"
        if "late/partner" in row
        else ""
    ),
    lambda row: f"spread: {row['round/spread']:.3E}" if not math.isnan(row["round/spread"]) else "",
    lambda row: f"payload error: {error:.1E}" if (error := row["round/payload_error"]) > 0 else "",
    lambda row: f"poisoned elements: {bad}" if (bad := row["round/poisoned_elements"]) else "",
)


def log_line(row: Row, total_steps: int) -> str:
    """Of a row of kind "step"."""
    first = f" iteration {row['step']:{len(str(total_steps))}d}/{total_steps}"
    pieces = [piece(row) for piece in _STEP + (_ROUND if "round/index" in row else ())]
    return " | ".join([first, *filter(None, pieces)]) + " |"


def step_figures(row: Row) -> str:
    """Under the progress bar, as the next."""
    return (
        f"loss {row['train/loss']:.3f}  learning rate {row['train/learning_rate']:.2e}  "
        f"{row['speed/tokens_per_second']:.0f} tokens/s"
    )


def round_figures(row: Row) -> str:
    """Of a row with a round."""
    return (
        f"{_round(row)}  exchange {1000 * row['round/exchange_seconds']:.0f} ms "
        f"(wait {1000 * row['round/wait_seconds']:.0f})  sent {row['total/sent_bytes'] / 1e6:.0f} MB  "
        f"spread {row['round/spread']:.1e}"
    )


def checkpoint_line(row: Row) -> str:
    """Of a row of kind "checkpoint"."""
    return f" checkpoint at iteration {row['step']} | pause (ms): {1000 * row['time/save_seconds']:.1f} |"


def validation_lines(row: Row, unigram_entropy: float) -> list[str]:
    """Of a row of kind "evaluation": the losses, and a line per dataset of a blend."""
    spread, mean = row["validation/spread"], row["validation/mean_model_loss"]
    parts = [f" validation at iteration {row['step']}", _losses(row["validation/replica_losses"])]
    if not math.isnan(mean):
        parts.append(f"mean model: {mean:.4f}")
        if not math.isnan(spread):
            parts.append(f"spread: {spread:.3E}")
    of = "validation/replica_losses of "
    return [
        " | ".join([*parts, f"unigram: {unigram_entropy:.4f} |"]),
        *(f"   {name.removeprefix(of)} | {_losses(row[name])} |" for name in row if name.startswith(of)),
    ]


def _losses(losses: list[float]) -> str:
    return "replicas: " + " ".join(f"{loss:.4f}" for loss in losses)


def _tokens_per_second(row: Row) -> str:
    own, of_all = row["speed/tokens_per_second"], row["speed/tokens_per_second_of_all"]
    return f"{own:.0f}" + (f" (all replicas: {of_all:.0f})" if of_all > own else "")


def _round(row: Row) -> str:
    others = row["round/partners"]
    partners = ("partner " if len(others) == 1 else "partners ") + ",".join(map(str, others))
    fragment = f"fragment {row['round/fragment']} " if "round/fragment" in row else ""
    return f"round {row['round/index']} {fragment}{partners if others else 'bye'}"


def _routed(row: Row) -> str:
    wait = 1000 * row["routing/wait_seconds"]
    return f"routed: {100 * row['routing/share']:.0f} % hop wait (ms): {wait:.1f}"


def _data_is_late(row: Row) -> bool:
    return bool(row["data/wait_seconds"] > _NOTABLE_DATA_WAIT * row["speed/seconds_per_step"])
