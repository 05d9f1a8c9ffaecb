"""From a file to a RunConfig, or to one line per problem."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.config.wording import ConfigError
from megatron_noloco.fields import shown
from megatron_noloco.files import check_utf_8, without_mark

_COMMENTS = ("//", "/*", "#")
_MOST_DIGITS = 20


class _Object(dict[str, Any]):
    """A JSON object that remembers keys given twice; json itself keeps the last one in silence."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.repeated = sorted({name for name in names if names.count(name) > 1}, key=names.index)


def load_config(path: str | Path) -> RunConfig:
    """Read and check one JSON file; raises ConfigError, every line of which begins with the file's name."""
    try:
        return RunConfig.from_dict(_read(Path(path)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {problem}" for problem in error.problems) from None
    except RecursionError:
        raise ConfigError([f"{path}: objects or lists are nested too deeply"]) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        written = path.read_bytes()
        check_utf_8(written)
        text = without_mark(written).decode()
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"]
        ) from None
    except ValueError as error:
        raise ConfigError([f"is {error}"]) from None
    try:
        content = json.loads(text, object_pairs_hook=_Object, parse_int=_whole)
    except json.JSONDecodeError as error:
        comment = text[error.pos :].lstrip().startswith(_COMMENTS)
        reason = "JSON has no comments; delete it" if comment else error.msg
        raise ConfigError(
            [f"is not valid JSON: line {error.lineno}, column {error.colno}: {reason}"]
        ) from None
    if not isinstance(content, _Object):
        raise ConfigError([f"must hold a JSON object, got {shown(content)}"])
    problems = list(_problems(content, ""))
    if problems:
        raise ConfigError(problems)
    return _plain(content)


def _whole(digits: str) -> int:
    """Return a whole number; raises ConfigError where products of such numbers would not fit into a float."""
    if len(digits) > _MOST_DIGITS:
        raise ConfigError(
            [f"{digits[:9]}... has {len(digits)} digits; no setting takes more than {_MOST_DIGITS}"]
        )
    return int(digits)


def _problems(value: Any, name: str) -> Iterator[str]:
    """Yield a line for each key given twice, at any depth below `name`."""
    if isinstance(value, _Object):
        prefix = f"{name}." if name else ""
        yield from (f"{prefix}{key} is given more than once" for key in value.repeated)
        for key, inner in value.items():
            yield from _problems(inner, prefix + key)
    elif isinstance(value, list):
        for inner in value:
            yield from _problems(inner, name)


def _plain(value: Any) -> Any:
    """Return plain dicts: DeepSpeed and pydantic need not know ours."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
