"""How fields and mistakes are put into words, once, for error lines and for `config --explain`."""

import difflib
import json
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

Path = tuple[str, ...]


class ConfigError(ValueError):
    """What is wrong with a configuration: one line per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Problem:
    """One line for the user, and the place in the file that it is sorted by."""

    path: Path
    text: str


def dotted(path: Iterable[str]) -> str:
    return ".".join(path)


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `4 microbatches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def unknown_key(path: Path, known: Iterable[str], hint: str = "") -> Problem:
    """A misspelt key, with the nearest known one of the same block."""
    spellings = {key.lower(): key for key in known}
    near = difflib.get_close_matches(path[-1].lower(), spellings, n=1)
    if near:
        hint = f"did you mean {dotted((*path[:-1], spellings[near[0]]))}?"
    return Problem(path, f"{dotted(path)} is not a known key" + (f"; {hint}" if hint else ""))


def wrong_value(path: Path, expected: str, value: Any) -> Problem:
    return Problem(path, f"{dotted(path)}: must be {expected}, got {shown(value)}")


def shown(value: Any) -> str:
    """A value as the user wrote it, cut when long; text in quotes, so that 'ten' is seen to be text."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def expected_value(field: FieldInfo) -> str:
    """What a field accepts, from its annotation: `an integer >= 1 or "auto"`."""
    return _expected(field.annotation, field.metadata)


def _expected(annotation: Any, metadata: Iterable[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        inherited = [entry for extra in extras for entry in getattr(extra, "metadata", [extra])]
        return _expected(inner, [*inherited, *metadata])
    if origin is Literal:
        choices = [json.dumps(choice) for choice in get_args(annotation)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if origin is list:
        return f"a list of {' or '.join(_expected(option, ()) for option in get_args(annotation))}"
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(option, metadata) for option in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "an object with " + ", ".join(annotation.model_fields)
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    bounds = " and ".join(filter(None, map(_bound, metadata)))
    return f"{names[annotation]} {bounds}".rstrip()


def _bound(entry: Any) -> str:
    match entry:
        case annotated_types.Ge(ge=bound):
            return f">= {bound}"
        case annotated_types.Gt(gt=bound):
            return f"> {bound}"
        case annotated_types.Le(le=bound):
            return f"<= {bound}"
        case annotated_types.Lt(lt=bound):
            return f"< {bound}"
        case annotated_types.MinLen():
            return "that is not empty"
    return ""


def problems_of(error: ValidationError, model: type[BaseModel], block: str, raw: Any) -> list[Problem]:
    """pydantic's errors about one block as our lines; the branches of a union give one line, not one each."""
    found: dict[tuple[Path, str], Problem] = {}
    for entry in error.errors(include_url=False):
        problem = _problem(entry, model, block, raw)
        found.setdefault((problem.path, problem.text), problem)
    return list(found.values())


def _problem(entry: Any, model: type[BaseModel], block: str, raw: Any) -> Problem:
    path: Path = (block,)
    owner, field = model, None
    for name in map(str, entry["loc"]):
        if name not in owner.model_fields:
            if entry["type"] == "extra_forbidden":
                return unknown_key((*path, name), [*owner.model_fields, *getattr(owner, "ALIASES", {})])
            break  # the branch of a union: the field is what the user knows
        field = owner.model_fields[name]
        path = (*path, _as_written(owner, name, raw) if len(path) == 1 else name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            owner = field.annotation
    if entry["type"] == "value_error":
        return Problem(path, f"{dotted(path)}: {entry['ctx']['error']}")
    if field is None:
        return wrong_value(path, "an object with " + ", ".join(model.model_fields), entry["input"])
    if entry["type"] == "missing":
        return Problem(path, f"{dotted(path)} is missing ({expected_value(field)}: {field.description})")
    return wrong_value(path, expected_value(field), entry["input"])


def _as_written(owner: type[BaseModel], name: str, raw: Any) -> str:
    """The alias under which the user gave a field, so that the line shows a key that is in the file."""
    for alias, target in getattr(owner, "ALIASES", {}).items():
        if target == name and isinstance(raw, dict) and alias in raw:
            return str(alias)
    return name
