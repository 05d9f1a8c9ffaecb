"""Every number of a run, declared once: how it is reduced, how and where it is shown, and what it means.

A new number needs an entry in `TABLE`, and one place that reports its value: `record(name, value)` where it arises
(`metrics.Record`). All else follows from the entry: the rows of `metrics.jsonl`, the tags of TensorBoard and of
Weights & Biases, the log line, the columns of `watch`, the charts of `report`, and the table that `make docs`
adds to docs/watching.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_noloco.monitor import figures as f
from megatron_noloco.monitor.reductions import (
    LAST,
    LAST_MAX,
    LAST_SUM,
    MEAN,
    MEAN_SUM,
    PER_STEP,
    RMS,
    SLOWEST,
    SUM,
    SUM_MAX,
    TOTAL,
    TOTAL_MAX,
    Reduction,
)

Row = Mapping[str, Any]  # "kind", "step", "replica", and numbers (or lists of numbers) by name

# The charts of `report` that show numbers of the table; `plots` draws them.
LOSS, SPREAD, TIME, BYTES = "Loss", "Spread", "Where the time goes", "Bytes"
ONE_MODEL = "final/replicas"
_NOTABLE_DATA_WAIT = 0.01  # share of the step's time from which the log line has it


def _always(value: Any, row: Row) -> bool:
    return True


def _positive(value: Any, row: Row) -> bool:
    return bool(value > 0)  # False for nan


def _measured(value: Any, row: Row) -> bool:
    return not math.isnan(value)


def _with_partner(value: Any, row: Row) -> bool:
    return bool(row.get("round/partners"))


# What a value may be that was read from a file

_LARGEST = {int: 2**63, float: 2.0**128}  # as loggers and charts have them


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, or null, which stands for NaN."""
    return value is None or (type(value) in _LARGEST and abs(value) < _LARGEST[type(value)])


def _is_finite(value: Any) -> bool:
    return value is None or (type(value) in _LARGEST and abs(value) < _LARGEST[int] ** 16)


def is_count(value: Any) -> bool:
    """Return whether a value is a number from 0."""
    return value is not None and is_number(value) and bool(value >= 0)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_number, values))


def _are_replicas(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int) and is_count(value) for value in values)


def _partners_in_words(replicas: list[int]) -> str:
    return f" partner{'s' * (len(replicas) > 1)} {f.partners(replicas)}" if replicas else " skipped"


@dataclass(frozen=True)
class Number:
    """A number of a run. TensorBoard and Weights & Biases have every single number, under its name.

    Attributes:
        name: " of N" at its end stands for a replica, a fragment or a dataset ("origin/loss of 3").
        reduction: of rows of local steps; None: in other rows, where a number is the same on all ranks.
        shown: formats a value.
        meaning: for docs/watching.md.
        line: a part of the log line, with the formatted value in the place of {}, or a function of the value. A
            part that begins with a space continues the part before. "": the log line does not have it.
        where: returns whether the log line and `watch` show this value of this row.
        column: heading of its column in `watch`.
        note: what `watch` and `report` call the sum over the log, if there is any: "3 skipped steps".
        chart: the chart of `report` that has it.
        label: its name in the chart; "": that of the replica.
        of_all: whether it is about all replicas, and alike in their rows.
        part_of: in a chart of parts: the number that contains it.
        holds: returns whether a value read from a file is one of this number.
    """

    name: str
    reduction: Reduction | None
    shown: Callable[[Any], str]
    meaning: str
    line: str | Callable[[Any], str] = ""
    where: Callable[[Any, Row], bool] = _always
    column: str = ""
    note: str = ""
    chart: str = ""
    label: str = ""
    of_all: bool = False
    part_of: str = ""
    holds: Callable[[Any], bool] = is_number


# fmt: off
_NUMBERS = (  # in the order of the log line, of `watch` and of the documentation
    Number("train/consumed_samples", LAST, str, "by all replicas so far", "consumed samples: {}"),
    Number("speed/seconds_per_step", MEAN, f.milliseconds, "see [Time](#time)",
           "elapsed time per iteration (ms): {}", chart=TIME, label="everything else"),
    Number("speed/tflops_per_gpu", MEAN, "{:.4g}".format, "see [Throughput](#throughput)",
           "throughput per GPU (TFLOP/s/GPU): {}"),
    Number("train/learning_rate", LAST, f.scientific, "of the last step", "learning rate: {}"),
    Number("train/loss", MEAN, f.loss, "over the microbatches, nats per token",
           "lm loss: {}", column="loss", chart=LOSS),
    Number("train/grad_norm", LAST, "{:.3f}".format, "of the last step, before clipping", "grad norm: {}"),
    Number("speed/tokens_per_second", MEAN, f.whole, "tokens of this replica",
           "tokens per second: {}", column="tokens/s"),
    Number("speed/tokens_per_second_of_all", MEAN, f.whole,
           "the same times the number of replicas, as if all were as fast; not in a federation",
           " (all replicas: {})",
           where=lambda value, row: value > row["speed/tokens_per_second"]),
    Number("speed/mfu", MEAN, f.percent, "see [Throughput](#throughput)", "MFU: {}", column="MFU"),
    Number("memory/peak_bytes", LAST_MAX, f.gigabytes,
           "the most since the start; on GPUs GPU memory without that of NCCL and CUDA",
           "peak memory (GB): {}"),
    Number("train/loss_scale", LAST, "{:g}".format, "of the last step, with fp16",
           "loss scale: {}", where=lambda value, row: value != 1),
    Number("train/skipped_steps", SUM_MAX, str,
           "[skipped](optimizers.md#gradients-that-are-not-finite) local steps",
           "skipped iterations: {}", where=_positive, note="skipped steps"),
    Number("train/load_balancing_loss", MEAN_SUM, f.loss,
           "[with experts](families.md#a-mixture-of-experts): 1 if all have equal shares"),
    Number("origin/loss of N", MEAN, f.loss,
           "with [routing](routing.md#labels-and-losses): of the data of replica N"),
    Number("origin/microbatches of N", SUM, str, "with routing: microbatches of the data of replica N"),
    Number("total/skipped_ahead", TOTAL_MAX, "{:.0f}".format, "in a federation: local steps left out",
           "iterations left out: {}", where=_positive, holds=is_count),
    Number("routing/share", MEAN, f.percent, "microbatches that came from another replica",
           "routed: {}", where=_positive),
    Number("routing/wait_seconds", MEAN, f.milliseconds,
           "per local step, waiting for activations and gradients; near 0 with NCCL, where the GPU waits",
           " hop wait (ms): {}",
           where=lambda value, row: row["routing/share"] > 0,
           chart=TIME, label="waiting for other stages", part_of="time/forward_backward_seconds"),
    Number("data/wait_seconds", SLOWEST, f.milliseconds, "waiting for microbatches to be read",
           "data wait (ms): {}",
           where=lambda value, row: value > _NOTABLE_DATA_WAIT * row["speed/seconds_per_step"],
           chart=TIME, label="waiting for data", part_of="time/forward_backward_seconds"),
    Number("time/forward_backward_seconds", PER_STEP, f.milliseconds, "see [Time](#time)",
           chart=TIME, label="forward and backward", part_of="speed/seconds_per_step"),
    Number("time/optimizer_seconds", PER_STEP, f.milliseconds, "see [Time](#time)",
           chart=TIME, label="inner optimizer", part_of="speed/seconds_per_step"),
    Number("time/exchange_seconds", PER_STEP, f.milliseconds, "see [Time](#time)",
           chart=TIME, label="exchanges", part_of="speed/seconds_per_step"),
    Number("round/index", LAST, str, "the last round, if there was one", "round {}", column="round"),
    Number("round/fragment", LAST, str, "its [fragment](exchange.md#fragments) where there are several",
           " fragment {}"),
    Number("round/partners", LAST, f.partners, "replicas that it averaged with",
           _partners_in_words, column="with", holds=_are_replicas),
    Number("round/exchange_seconds", LAST_MAX, f.milliseconds, "duration of the exchange", "exchange (ms): {}"),
    Number("round/wait_seconds", LAST_MAX, f.milliseconds,
           "its wait for messages ([late partners](#late-partners))", " wait (ms): {}"),
    Number("round/pause_seconds", LAST_MAX, f.milliseconds, "how long it stopped training",
           column="pause ms"),
    Number("round/sent_bytes", LAST_SUM, f.megabytes, "sent in the exchange", " sent (MB): {}"),
    Number("round/spread", RMS, f.scientific,
           "standard deviation of the fast weights over the group before the round; in int4 groups of more than 2 "
           "with [kept errors](exchange.md#payload)",
           "spread: {}", where=_with_partner, column="spread", chart=SPREAD),
    Number("fragment/spread of N", RMS, f.scientific, "the same of the last round of fragment N"),
    Number("round/payload_error", RMS, "{:.1E}".format, "relative quantization error of (group mean - own vector)",
           "payload error: {}", where=_positive),
    Number("round/poisoned_elements", LAST_SUM, str,
           "elements in pieces where the mean lacks a member, which had NaN or infinity",
           "poisoned elements: {}", where=_positive, note="poisoned elements"),
    Number("round/resent_elements", LAST_SUM, str,
           "elements in blocks that did not fit the integers, and were sent with more bits"),
    Number("round/missed", LAST, str, "why the round was skipped", holds=is_text),
    Number("round/deadline_seconds", LAST, f.whole, "in a federation: how long a partner would be waited for"),
    Number(ONE_MODEL, LAST, f.partners, "in a federation: the replicas that have the final model",
           holds=_are_replicas),
    Number("handover/giver", LAST, str, "in a federation: the replica whose state was taken over"),
    Number("total/sent_bytes", TOTAL, f.megabytes, "sent in exchanges", chart=BYTES, label="exchanges"),
    Number("total/routed_bytes", TOTAL, f.megabytes, "sent along routes", chart=BYTES, label="routed activations"),
    Number("total/pause_seconds", TOTAL_MAX, f.duration, "how long rounds stopped training"),
    Number("total/rounds", TOTAL_MAX, str, "rounds with a partner"),
    Number("total/missed_rounds", TOTAL_MAX, str, "in a federation: rounds skipped though the plan had a partner",
           holds=is_count),
    Number("total/rounds_in_doubt", TOTAL_MAX, str,
           "of these the rounds that the partner may have counted"),
    Number("validation/loss", None, f.loss, "of this replica, nats per token", column="valid.", chart=LOSS,
           label="validation"),
    Number("validation/perplexity", None, "{:.2f}".format, "of this replica", holds=_is_finite),
    Number("validation/replica_losses", None, f.losses, "of all replicas of the job", "replicas: {}",
           holds=_are_numbers),
    Number("validation/mean_model_loss", None, f.loss, "of the mean of all replicas; null in a federation",
           "mean model: {}", where=_measured, chart=LOSS, label="mean model, validation", of_all=True),
    Number("validation/spread", None, f.scientific,
           "standard deviation of the slow weights over all replicas; null in a federation",
           "spread: {}", where=_measured),
    Number("validation/loss of N", None, f.loss, "of a blend: on dataset N"),
    Number("validation/replica_losses of N", None, f.losses, "of a blend: on dataset N", holds=_are_numbers),
    Number("validation/mean_model_loss of N", None, f.loss, "of a blend: on dataset N"),
    Number("time/evaluation_seconds", None, f.duration, "of the evaluation"),
    Number("time/save_seconds", None, f.milliseconds, "for which saving a checkpoint stopped training",
           "pause (ms): {}"),
)
# fmt: on
TABLE = {number.name: number for number in _NUMBERS}


def find_number(name: str) -> Number | None:
    """Return the entry of a number; None for a name that is not in the table."""
    return TABLE.get(name) or TABLE.get(f"{name.partition(' of ')[0]} of N")


@cache
def number_of(name: str) -> Number:
    """Return the entry of a number. Raises ValueError for a name that is not in the table."""
    number = find_number(name)
    if number is None:
        raise ValueError(f"the number {name!r} is not declared in megatron_noloco/monitor/numbers.py")
    return number


def numbers_in(chart: str) -> list[Number]:
    """Return the numbers of a chart, in the order of the table."""
    return [number for number in TABLE.values() if number.chart == chart]


def shown(row: Row, name: str) -> str:
    """Format a number of a row: "" where the row has none or does not show it, "nan" where that is null."""
    if name not in row:
        return ""
    value, number = row[name], TABLE[name]
    is_null = value is None
    if not number.where(math.nan if is_null else value, row):
        return ""
    return "nan" if is_null else number.shown(value)


def line_parts(row: Row, of_round: bool | None = None) -> list[str]:
    """Return the parts of a row's log line: of its round, without its round, or (None) all of them."""
    parts = list[str]()
    for number in TABLE.values():
        if (
            not number.line
            or number.name not in row
            or of_round not in (None, number.name.startswith("round/"))
        ):
            continue
        if number.where(value := row[number.name], row):
            line = number.line
            text = line(value) if callable(line) else line.format(number.shown(value))
            if parts and text.startswith(" "):
                parts[-1] += text
            else:
                parts.append(text.strip())
    return parts
