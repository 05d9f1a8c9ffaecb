"""From a file to a RunConfig, or to one line per problem."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.errors import UserError
from megatron_noloco.fields import NO_RULES, problems_of, shown
from megatron_noloco.files import json_object, utf_8_problem, without_mark

_COMMENTS = ("//", "/*", "#")
_MOST_DIGITS = 20
_SIZES = {name for name, info in ModelConfig.model_fields.items() if info.is_required()}


def load_config(path: str | Path, model: Mapping[str, Any] | None = None) -> RunConfig:
    """Read and check one JSON file; raises UserError, every line of which begins with the file's name.

    Args:
        model: fields of the block `model`, for a file that lacks one of its sizes.
    """
    try:
        content = read_content(Path(path))
        given = content.get("model", {})
        if model and isinstance(given, dict) and not given.keys() >= _SIZES:
            content["model"] = {**model, **given}
        return RunConfig(**content)
    except RecursionError:
        problems = ["objects or lists are nested too deeply"]
    except UserError as error:
        problems = str(error).splitlines()
    raise UserError("\n".join(f"{path}: {problem}" for problem in problems))


def saved_config(run: Mapping[str, Any]) -> RunConfig:
    """Return the config that a checkpoint keeps, which may be that of another version of this program.

    Fields that this version lacks are left out, fields that are new have their defaults, and no rule counts: the
    run has trained. Raises UserError for a value that no run of this version can have.
    """
    try:
        return RunConfig.model_validate(run, extra="ignore", context=NO_RULES)
    except ValidationError as error:
        problems = problems_of(error, RunConfig)
    raise UserError("\n".join(f"the checkpoint's config, of another version: {line}" for line in problems))


def read_content(path: Path) -> dict[str, Any]:
    """Return the object in a file, unchecked; raises UserError, with a line for each problem."""
    try:
        written = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from None
    if problem := utf_8_problem([written]):
        raise UserError(problem)
    text = without_mark(written).decode()
    try:
        content = json.loads(text, object_pairs_hook=json_object, parse_int=_whole)
    except json.JSONDecodeError as error:
        comment = text[error.pos :].lstrip().startswith(_COMMENTS)
        reason = "JSON has no comments; delete it" if comment else error.msg
        raise UserError(f"not valid JSON: line {error.lineno}, column {error.colno}: {reason}") from None
    if not isinstance(content, dict):
        raise UserError(f"must hold a JSON object, got {shown(content)}")
    return content


def _whole(digits: str) -> int:
    """Return a whole number; raises UserError where products of such numbers would not fit into a float."""
    if len(digits) > _MOST_DIGITS:
        raise UserError(
            f"{digits[:9]}... has {len(digits)} digits; no setting takes more than {_MOST_DIGITS}"
        )
    return int(digits)
