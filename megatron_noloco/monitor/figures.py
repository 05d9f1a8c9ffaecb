"""Formats a number the same way in the log, the closing table, `watch` and `report`."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_noloco.monitor.writers import Row

_NOTABLE_DATA_WAIT = 0.01  # share of the step's time from which the log line has it

whole: Callable[[float], str] = "{:.0f}".format
loss: Callable[[float], str] = "{:.4f}".format  # nats per token
scientific: Callable[[float], str] = "{:.3E}".format  # learning rates, spreads


def losses(nats_per_token: Sequence[float]) -> str:
    return " ".join(map(loss, nats_per_token))


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def megabytes(size: float) -> str:
    """Return `size` bytes in units of 10^6 bytes: below 10 with two decimals, else with one."""
    return f"{size / 1e6:.{1 if size >= 1e7 else 2}f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def partners(replicas: Sequence[int]) -> str:
    return ",".join(map(str, replicas)) or "none"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes}min"
    return f"{minutes}min" if minutes >= 10 else f"{60 * minutes + rest}s"


def cell(row: Row, name: str, formatted: Callable[[Any], str] = str) -> str:
    """Format a number for a table: "" where the row has none, "nan" where it is null, as in metrics.jsonl."""
    if name not in row:
        return ""
    return "nan" if row[name] is None else formatted(row[name])


def log_line(row: Row, total_steps: int) -> str:
    """Return the log line of a row of kind "step": Megatron's, and then the numbers of the last round."""
    first = f" iteration {row['step']:{len(str(total_steps))}d}/{total_steps}"
    return " | ".join([first, *step_parts(row), *round_parts(row)]) + " |"


def step_parts(row: Row) -> Iterator[str]:
    """Yield the parts of a log line about local steps."""
    yield f"consumed samples: {row['train/consumed_samples']}"
    yield f"elapsed time per iteration (ms): {milliseconds(row['speed/seconds_per_step'])}"
    yield f"throughput per GPU (TFLOP/s/GPU): {row['speed/tflops_per_gpu']:.4g}"
    if "speed/mfu" in row:
        yield f"MFU: {percent(row['speed/mfu'])}"
    own = row["speed/tokens_per_second"]
    every = row.get("speed/tokens_per_second_of_all", own)
    yield f"tokens per second: {whole(own)}" + (f" (all replicas: {whole(every)})" if every > own else "")
    yield f"peak memory (GB): {row['memory/peak_bytes'] / 1e9:.2f}"
    yield f"learning rate: {scientific(row['train/learning_rate'])}"
    yield f"lm loss: {loss(row['train/loss'])}"
    yield f"grad norm: {row['train/grad_norm']:.3f}"
    if row["train/loss_scale"] != 1:
        yield f"loss scale: {row['train/loss_scale']:g}"
    if skipped := row["train/skipped_steps"]:
        yield f"skipped iterations: {skipped}"
    if left_out := row.get("total/skipped_ahead"):
        yield f"iterations left out: {left_out}"
    if share := row["routing/share"]:
        yield f"routed: {percent(share)} hop wait (ms): {milliseconds(row['routing/wait_seconds'])}"
    if row["data/wait_seconds"] > _NOTABLE_DATA_WAIT * row["speed/seconds_per_step"]:
        yield f"data wait (ms): {milliseconds(row['data/wait_seconds'])}"


def round_parts(row: Row) -> Iterator[str]:
    """Yield the parts of a log line about the last round; none where the row has no round."""
    if "round/index" not in row:
        return
    replicas = row["round/partners"]
    fragment = f"fragment {row['round/fragment']} " if "round/fragment" in row else ""
    others = f"partner{'s' * (len(replicas) > 1)} {partners(replicas)}" if replicas else "skipped"
    yield f"round {row['round/index']} {fragment}{others}"
    yield (
        f"exchange (ms): {milliseconds(row['round/exchange_seconds'])} "
        f"wait (ms): {milliseconds(row['round/wait_seconds'])} sent (MB): {megabytes(row['round/sent_bytes'])}"
    )
    if not math.isnan(row["round/spread"]):
        yield f"spread: {scientific(row['round/spread'])}"
    if (error := row["round/payload_error"]) > 0:
        yield f"payload error: {error:.1E}"
    if poisoned := row["round/poisoned_elements"]:
        yield f"poisoned elements: {poisoned}"


def checkpoint_line(row: Row) -> str:
    """Return the log line of a row of kind "checkpoint"."""
    return f" checkpoint at iteration {row['step']} | pause (ms): {milliseconds(row['time/save_seconds'])} |"


def validation_lines(row: Row, unigram_entropy: float) -> list[str]:
    """Return the log lines of a row of kind "evaluation": one line, and one for each dataset of a blend."""
    spread, mean = row["validation/spread"], row["validation/mean_model_loss"]
    parts = [
        f" validation at iteration {row['step']}",
        f"replicas: {losses(row['validation/replica_losses'])}",
    ]
    if not math.isnan(mean):
        parts.append(f"mean model: {loss(mean)}")
        if not math.isnan(spread):
            parts.append(f"spread: {scientific(spread)}")
    prefix = "validation/replica_losses of "
    datasets = [name.removeprefix(prefix) for name in row if name.startswith(prefix)]
    return [
        " | ".join([*parts, f"unigram: {loss(unigram_entropy)} |"]),
        *(f"   {name} | replicas: {losses(row[prefix + name])} |" for name in datasets),
    ]
