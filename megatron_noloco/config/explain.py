"""Every field in words, from the models themselves: what `config --explain` shows cannot grow stale."""

import dataclasses
import textwrap

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_noloco.config.blocks import Block
from megatron_noloco.config.deepspeed_keys import DISABLED, NOT_HERE, TOP_LEVEL
from megatron_noloco.config.run_config import BLOCKS
from megatron_noloco.config.wording import expected_value, fields_of, shown
from megatron_noloco.engine.schedules import SCHEDULES

WIDTH = 100

_BLOCK_SENTENCES = {
    "noloco": "The method: rounds between replicas, and routing.",
    "model": "The model, in Megatron's words.",
    "parallel": "The parallel layout: ranks = replicas x pipeline x data x tensor parallel sizes.",
    "federation": "Replicas as separate jobs, which may come and go.",
    "data": "What is read.",
    "training": "The run.",
    "checkpoint": "What is saved, and where a run continues. Replaces DeepSpeed's block of the same name.",
    "evaluation": "Loss on the validation split.",
    "tensorboard": "Replaces DeepSpeed's block of the same name.",
    "wandb": "Replaces DeepSpeed's block of the same name.",
}

_DEEPSPEED = """\
All other top-level keys are DeepSpeed's own, with DeepSpeed's meaning and defaults. A replica is a whole
DeepSpeed world, so train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x
parallel.data_parallel_size counts the samples of ONE replica; any one of the three may be missing or "auto".
gradient_clipping "auto" is 1.0, scheduler.params.total_num_steps "auto" is training.train_iters, every other
"auto" is DeepSpeed's default. optimizer is required. zero_optimization.stage is 0 or 1 (0 is run as 1: the
same numbers). At most one of bf16 and fp16 may be enabled; with neither the run is fp32. optimizer.params takes,
besides DeepSpeed's, decoupled_lr (of embedding and output layer) and, in place of weight_decay,
start_weight_decay, end_weight_decay, weight_decay_incr_style ("linear" or "cosine") and
weight_decay_incr_steps (by default training.train_iters). scheduler.type is one of DeepSpeed's, or one of
ours:"""


def explain() -> str:
    """Every field of every block: dotted name, default, what it accepts, and its sentence."""
    parts = []
    for name, model in BLOCKS.items():
        rows = _rows(name, model)
        column = max(len(dotted) for dotted, _, _ in rows) + 2
        lines = [f"{name}: {_BLOCK_SENTENCES[name]}"]
        for dotted, default, sentence in rows:
            lines.append(f"  {dotted:<{column}}{default}")
            lines += _wrapped(sentence, " " * (column + 2))
        parts.append("\n".join(lines))
    parts.append(
        "\n".join(
            [
                "DeepSpeed's keys:",
                *_wrapped(_DEEPSPEED, "  "),
                *(line for schedule in _schedules() for line in _wrapped(schedule, "    ")),
                *_wrapped(_known_keys(), "  "),
            ]
        )
    )
    return "\n\n".join(parts) + "\n"


def as_markdown() -> str:
    """The same as a page with a table for each block."""
    parts = [
        "# Configuration",
        "One JSON object; `python -m megatron_noloco config --explain` prints this page.",
    ]
    for name, model in BLOCKS.items():
        prefix = f"{name}."
        parts += [f"## {name}", _BLOCK_SENTENCES[name]]
        rows = [
            f"| `{dotted.removeprefix(prefix)}` | {_cell(takes)} | {_cell(sentence)} |"
            for dotted, takes, sentence in _rows(name, model)
        ]
        parts.append("\n".join(["| field | takes | meaning |", "|---|---|---|", *rows]))
    parts += ["## DeepSpeed's keys", _DEEPSPEED, *(f"- {line}" for line in _schedules()), _known_keys()]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _schedules() -> list[str]:
    return [
        f"{name}: {', '.join(field.name for field in dataclasses.fields(schedule))}; "
        + " ".join((schedule.__doc__ or "").split("\n\n")[0].split())
        for name, schedule in SCHEDULES.items()
    ]


def _known_keys() -> str:
    known = TOP_LEVEL - NOT_HERE.keys() - DISABLED.keys() - BLOCKS.keys()
    return f"Known keys: {', '.join(sorted(known))}."


def _rows(name: str, model: type[Block]) -> list[tuple[str, str, str]]:
    return [_row(dotted, field) for dotted, field in fields_of(name, model)]


def _row(dotted: str, field: FieldInfo) -> tuple[str, str, str]:
    default = "required"
    if field.default is not PydanticUndefined:
        default = f"default {shown(field.default).replace(chr(39), chr(34))}"
    return dotted, f"{expected_value(field)}; {default}", field.description or ""


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
