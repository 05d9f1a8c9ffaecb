"""Every field in words, made from the blocks themselves, so that `config --explain` cannot be out of date."""

import difflib
import json
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_noloco.config.deepspeed_block import DeepSpeedConfig
from megatron_noloco.config.optimizer_block import OPTIMIZERS, SCHEDULES, OptimizerParams
from megatron_noloco.config.programs import PROGRAMS, names_of_others
from megatron_noloco.config.run_config import BLOCKS, RunConfig
from megatron_noloco.errors import UserError
from megatron_noloco.fields import Path, dotted, expected_value, fields_of, quoted, shown

WIDTH = 100


class Section(NamedTuple):
    """The fields of one block: of each its name, what it takes, and its meaning."""

    path: Path
    title: str
    sentence: str
    fields: list[tuple[str, str, str]]


def explain(only: str = "") -> str:
    """Return a text with every field: dotted name, what it accepts, default, and its meaning.

    Args:
        only: the block ("noloco") or the field ("noloco.local_steps") to explain, or a setting of another program
            ("lr_decay_style"); "": all fields.

    Raises UserError for a name that there is not.
    """
    parts = _explained(_sections(), only) or _explained(_programs(), only)
    if not parts:
        fields = (dotted((*section.path, name)) for section in _sections() for name, *_ in section.fields)
        near = difflib.get_close_matches(only, [*BLOCKS, "optimizer", "scheduler", *fields], 1)
        blocks = f"the blocks are {', '.join(BLOCKS)}, optimizer, scheduler"
        hint = f"did you mean {near[0]}?" if near else blocks
        raise UserError(f"config --explain {only}: there is no such block or field; {hint}")
    return "\n\n".join(parts) + "\n"


def _explained(sections: Iterable[Section], only: str) -> list[str]:
    parts = []
    for section in sections:
        named = [(dotted((*section.path, name)), takes, meaning) for name, takes, meaning in section.fields]
        rows = [row for row in named if not only or f"{row[0]}.".startswith(f"{only}.")]
        if only and not rows:
            continue
        column = max((len(name) for name, _, _ in rows), default=0) + 2
        lines = _wrapped(f"{section.title}: {section.sentence}", "")
        for name, takes, meaning in rows:
            lines.append(f"  {name:<{column}}{takes}")
            lines += _wrapped(meaning, " " * (column + 2))
        parts.append("\n".join(lines))
    return parts


def schema() -> str:
    """Return the JSON schema of a config file; the same fields."""
    found = RunConfig.model_json_schema()
    found["properties"]["$schema"] = {"type": "string", "description": "Where editors find this schema."}
    return json.dumps(found, indent=1) + "\n"


def as_markdown() -> str:
    """Return the same as a page with a table for each block."""
    parts = ["# Configuration", "One JSON object; `megatron-noloco config --explain` prints this page."]
    for section in (*_sections(), *_programs()):
        parts += [f"## {section.title}", section.sentence]
        rows = [
            f"| `{name}` | {_cell(takes)} | {_cell(meaning)} |" for name, takes, meaning in section.fields
        ]
        if rows:
            parts.append("\n".join(["| field | takes | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _sections() -> Iterator[Section]:
    for name, block in BLOCKS.items():
        yield _section((name,), name, block)
    yield _section((), "DeepSpeed's keys", DeepSpeedConfig)
    params = ("optimizer", "params")
    yield _section(params, "optimizer.params of every type", OptimizerParams)
    shared = set(OptimizerParams.model_fields)
    for block in dict.fromkeys(OPTIMIZERS.values()):
        types = quoted([kind for kind, params in OPTIMIZERS.items() if params is block])
        yield _section(params, f"optimizer.params of {types}", block, shared)
    for kind, block in SCHEDULES.items():
        yield _section(("scheduler", "params"), f'scheduler.params of "{kind}"', block)


def _programs() -> Iterator[Section]:
    """Yield the settings of other programs, and what each is here."""
    for program in PROGRAMS:
        others = [(name, here, "") for name, here in names_of_others(program)]
        sentence = (
            "Settings without the same name here, in small letters, * for any text; `convert` reads them."
        )
        yield Section((), f"Names of {program.name}", sentence, others)


def _section(path: Path, title: str, block: type, elsewhere: set[str] = frozenset()) -> Section:  # type: ignore[assignment]
    fields = [_row(name, field) for name, field in fields_of(block) if name not in elsewhere]
    return Section(path, title, " ".join((block.__doc__ or "").split("\n\n")[0].split()), fields)


def _row(name: str, field: FieldInfo) -> tuple[str, str, str]:
    default = "required"
    if field.default is not PydanticUndefined:
        default = f"default {shown(field.default).replace(chr(39), chr(34))}"
    return name, f"{expected_value(field)}; {default}", field.description or ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
