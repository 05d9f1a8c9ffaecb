"""Reads files of other programs: which program it is, and its settings by name."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_noloco.config.programs import DEEPSPEED, HUGGING_FACE, MEGATRON, TORCHTITAN, Program
from megatron_noloco.convert.shell import Script, options
from megatron_noloco.errors import UserError
from megatron_noloco.fields import dotted, nearest, quoted, shown
from megatron_noloco.files import json_object, utf_8_problem, without_mark

_BY_ENDING = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML", ".sh": "arguments"}
_READ = {
    "JSON": (DEEPSPEED, HUGGING_FACE),
    "TOML": (TORCHTITAN,),
    "YAML": (HUGGING_FACE, MEGATRON),
    "arguments": (MEGATRON, HUGGING_FACE),
}
_MEGATRON_BLOCKS = (
    "language_model",
    "model_parallel",
)  # of the YAML that Megatron-LM reads in place of arguments
_OWN_BLOCKS = ("training", "parallel", "noloco", "federation")
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # a number, which YAML 1.1 reads as text


class Unread(NamedTuple):
    """A value that only a shell knows."""

    why: str


class Setting(NamedTuple):
    """A setting of a file; two are the same where file and name are."""

    file: str
    name: str
    program: Program

    @property
    def where(self) -> str:
        return f"{self.file}: {self.name}"


def read(path: Path) -> dict[Setting, Any]:
    """Return the settings of a file, each with its value; raises UserError, a line per problem."""
    try:
        content = path.read_bytes()
        if problem := utf_8_problem([content]):
            raise UserError(problem)
        program, values = _settings(path, without_mark(content).decode())
        problems = [_unknown(program, name) for name in values if program.row(name) is None]
        if problems:
            raise UserError("\n".join(problems))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{path}: objects or lists are nested too deeply") from None
    except UserError as error:
        raise UserError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None
    return {Setting(str(path), name, program): value for name, value in values.items()}


def _settings(path: Path, text: str) -> tuple[Program, dict[str, Any]]:
    if not text.strip():
        raise UserError("is empty")
    form = _BY_ENDING.get(path.suffix.lower()) or ("JSON" if text.lstrip().startswith("{") else "arguments")
    if form == "arguments":
        values = _arguments(text)
    else:
        found = {"JSON": _json, "TOML": _toml, "YAML": _yaml}[form](text)
        if not isinstance(found, dict):
            raise UserError(f"must hold names and values, got {shown(found)}")
        if form == "JSON" and any(isinstance(found.get(name), dict) for name in _OWN_BLOCKS):
            raise UserError(
                "is a config of this program already; give it with --config, for what the others lack"
            )
        if form == "YAML":
            found = _without_megatron_blocks(found)
        values = found
    readings = [(program, dict(_flat(program, values))) for program in _READ[form]]
    program, flat = max(readings, key=lambda reading: _known(*reading))
    if 2 * _known(program, flat) < len(flat) or not flat:
        names = quoted([program.name for program in _READ[form]])
        first = ", ".join(list(flat)[:3]) or "it has none"
        raise UserError(f"does not hold settings of {names} ({first}); docs/running.md says what is read")
    return program, flat


def _known(program: Program, flat: Mapping[str, Any]) -> int:
    return sum(program.row(name) is not None for name in flat)


def _unknown(program: Program, name: str) -> str:
    *block, last = name.split(".")
    known = (word.rpartition(".")[2] for word in program.words if word.rpartition(".")[0] == dotted(block))
    hint = nearest((*block, last), known) or "leave it out, or write what it is here into the config"
    return f"{name} is not a known setting of {program.name}; {hint}"


def _flat(program: Program, values: Mapping[str, Any], block: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with the names of their blocks before them, as far as the program has rows for them."""
    for name, value in values.items():
        path = f"{block}.{name}" if block else str(name)
        if isinstance(value, dict) and program.has_block(path):
            yield from _flat(program, value, path)
        else:
            yield path, value


# Forms of files


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=json_object)
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None


def _toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}") from None


def _yaml(text: str) -> Any:
    from yaml import MappingNode, SafeLoader, YAMLError  # only where a file is YAML: transformers brings it

    class Loader(SafeLoader):
        """Refuses a name that is there twice, of which YAML itself would keep the last."""

        def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key for key, _ in node.value if not key.tag.endswith(":merge")]
            json_object([(str(self.construct_object(key, deep=True)), None) for key in keys])
            return super().construct_mapping(node, deep)

    try:
        loader = Loader(text)
        return _with_exponents(loader.get_single_data())
    except YAMLError as error:
        raise UserError(f"not valid YAML: {' '.join(str(error).split())}") from None


def _with_exponents(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_exponents(inner) for name, inner in value.items()}
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _without_megatron_blocks(values: dict[str, Any]) -> dict[str, Any]:
    blocks = [values[name] for name in _MEGATRON_BLOCKS if isinstance(values.get(name), dict)]
    rest = {
        name: value for name, value in values.items() if not (name in _MEGATRON_BLOCKS and value in blocks)
    }
    return json_object([pair for block in (rest, *blocks) for pair in block.items()])


def _arguments(text: str) -> dict[str, Any]:
    script = Script(text)
    words = script.arguments()
    if not words:
        raise UserError("has no command that starts a Python program with options, and no options")
    pairs = []
    for name, given in options(words):
        values = [Unread(why) if (why := script.why_unread(word)) else literal(word) for word in given]
        pairs.append((name, values[0] if len(values) == 1 else values or True))
    return json_object(pairs)


def literal(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(word.lower(), word)
