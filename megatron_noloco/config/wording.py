"""How fields and mistakes are put into words, once, for error lines and for `config --explain`."""

import difflib
import enum
import json
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megatron_noloco.config import aliases

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


def fields_of(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The dotted name and the definition of every field of a block, those of inner blocks included."""
    for name, field in model.model_fields.items():
        inner = _inner_model(field)
        if inner is not None:
            yield from fields_of(f"{prefix}.{name}", inner)
        else:
            yield f"{prefix}.{name}", field


def unknown_key(path: Path, known: Iterable[str], elsewhere: Iterable[str] = ()) -> Problem:
    """A misspelt key, with the one that is meant: of the same block, or of another.

    Args:
        known: the keys of the same block.
        elsewhere: dotted names of other blocks.
    """
    hint = aliases.hint(dotted(path))
    if not hint:
        meant = _at_another_place(path[-1].lower(), elsewhere) or nearest(path, known)
        hint = f"did you mean {meant}?" if meant else ""
    return Problem(path, f"{dotted(path)} is not a known key" + f"; {hint}" * bool(hint))


def nearest(path: Path, known: Iterable[str]) -> str:
    """The spelling in `known` that is nearest to the last name of a path, with the path; "" if none is near."""
    spellings = {key.lower(): key for key in known}
    near = difflib.get_close_matches(path[-1].lower(), spellings, n=1)
    return dotted((*path[:-1], spellings[near[0]])) if near else ""


def _at_another_place(name: str, elsewhere: Iterable[str]) -> str:
    """Fields of this very name, or of this name with block and field read as one: eval_iters, evaluation.iters."""
    words = name.split("_")

    def is_meant(key: str) -> bool:
        if key.rpartition(".")[2] == name:
            return True
        theirs = key.replace(".", "_").split("_")
        return len(theirs) == len(words) and all(map(str.startswith, theirs, words))

    return " or ".join(list(filter(is_meant, elsewhere))[:2])


def wrong_value(path: Path, expected: str, value: Any) -> Problem:
    return Problem(path, f"{dotted(path)}: must be {expected}, got {shown(value)}")


def value_problems(path: Path, annotation: Any, value: Any) -> Iterator[Problem]:
    """Where a value is not of the type and bounds of an annotation, which is as strict as a block's."""
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    try:
        TypeAdapter(annotation, config=strict).validate_python(value)
    except ValidationError:
        yield wrong_value(path, expected(annotation), value)


def is_size(value: Any) -> bool:
    """Whether a value from the file is a finite number >= 0."""
    return type(value) in (int, float) and 0 <= value < float("inf")


def shown(value: Any) -> str:
    """A value as the user wrote it, cut when long; text in quotes, so that 'ten' is seen to be text."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def expected_value(field: FieldInfo) -> str:
    """What a field accepts, from its annotation: `an integer >= 1 or "auto"`."""
    return expected(field.annotation, field.metadata)


def expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What an annotation accepts."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        inherited = [entry for extra in extras for entry in getattr(extra, "metadata", [extra])]
        return expected(inner, [*inherited, *metadata])
    if origin is Literal:
        choices = [json.dumps(choice) for choice in get_args(annotation)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if origin is list:
        return f"a list of {' or '.join(expected(option) for option in get_args(annotation))}"
    if origin in (Union, types.UnionType):
        return " or ".join(expected(option, metadata) for option in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "an object with " + ", ".join(annotation.model_fields)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(json.dumps(member.value) for member in annotation)
    names = {
        list: "a list",
        dict: "an object",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
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


def problems_of(
    error: ValidationError, model: type[BaseModel], block: str, elsewhere: Iterable[str] = ()
) -> list[Problem]:
    """pydantic's errors about one block as our lines; the branches of a union give one line, not one each.

    Args:
        elsewhere: dotted names of other blocks, one of which may be meant by an unknown key.
    """
    found: dict[tuple[Path, str], Problem] = {}
    for entry in error.errors(include_url=False):
        problem = _problem(entry, model, block, list(elsewhere))
        found.setdefault((problem.path, problem.text), problem)
    return list(found.values())


def _problem(entry: Any, model: type[BaseModel], block: str, elsewhere: list[str]) -> Problem:
    path: Path = (block,)
    owner: type[BaseModel] | None = model
    field = None
    for name in map(str, entry["loc"]):
        fields = _by_name_and_alias(owner) if owner is not None else {}
        if entry["type"] == "extra_forbidden" and name == str(entry["loc"][-1]) and owner is not None:
            return _extra((*path, name), owner, fields, elsewhere)
        if name not in fields:
            break  # the branch of a union: the field is what the user knows
        field, path = fields[name], (*path, name)
        owner = _inner_model(field)
    if entry["type"] in ("value_error", "assertion_error"):
        return Problem(path, f"{dotted(path)}: {entry['ctx']['error']}")
    if field is None:
        return wrong_value(path, "an object with " + ", ".join(model.model_fields), entry["input"])
    if entry["type"] == "missing":
        return Problem(path, f"{dotted(path)} is missing ({expected_value(field)}: {field.description})")
    return wrong_value(path, expected_value(field), entry["input"])


def _extra(path: Path, owner: type[BaseModel], fields: Iterable[str], elsewhere: list[str]) -> Problem:
    reason = getattr(owner, "NOT_HERE", {}).get(path[-1])
    if reason is not None:
        return Problem(path, f"{dotted(path)} has no effect here: {reason}")
    if path[-1] in fields:
        return Problem(path, f"{dotted(path)} is given twice, also under its other name")
    return unknown_key(path, fields, elsewhere)


def _by_name_and_alias(owner: type[BaseModel]) -> dict[str, FieldInfo]:
    return owner.model_fields | {f.alias: f for f in owner.model_fields.values() if f.alias is not None}


def _inner_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that holds one, which may be optional."""
    for annotation in (field.annotation, *get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None
