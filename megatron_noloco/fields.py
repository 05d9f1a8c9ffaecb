"""Fields of settings: types with bounds, what they accept in words, and one line for each mistake.

The settings of the library (`settings.py`) and the blocks of the JSON file (`config/`) are made of these fields.
"""

import difflib
import json
import os
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

import annotated_types
import numpy as np
import pydantic.dataclasses
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)
from pydantic.fields import FieldInfo

from megatron_noloco.errors import UserError

Path = tuple[str, ...]
_Class = TypeVar("_Class")
_NEAR = 0.8  # of difflib: that of a misspelling, and of no key of DeepSpeed that does nothing here


def _checked_path(path: str) -> str:
    """Return a path with a "~" at its beginning replaced by the home folder."""
    if "\0" in path:
        raise UserError("has a NUL character (\\u0000), which no file's name can have; remove it")
    return os.path.expanduser(path)


# Strict: "10" is not 10 and true is not 1, because a guess that is wrong costs days of training.
Positive = Annotated[StrictInt, Field(ge=1)]
NonNegative = Annotated[StrictInt, Field(ge=0)]
Size = Annotated[StrictFloat, Field(ge=0)]
AboveZero = Annotated[StrictFloat, Field(gt=0)]
Text = Annotated[StrictStr, Field(min_length=1)]
FilePath = Annotated[Text, AfterValidator(_checked_path)]  # or a word that stands for one, such as "auto"


class Also(NamedTuple):
    """Annotates a field that takes a word besides, which is replaced before the field is checked."""

    word: str


def field(default: Any, meaning: str, **bounds: Any) -> Any:
    """Return a field; a default of ... means that it is required."""
    return Field(default=default, description=meaning, **bounds)


def refusing(**reasons: str) -> BeforeValidator:
    """Return an annotation that refuses values which users try, each with the reason against it."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value in reasons:
            raise UserError(f'"{value}" {reasons[value]}')
        return value

    return BeforeValidator(check)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings_class(cls: type[_Class]) -> type[_Class]:
    """Make a frozen dataclass of a class of fields. All its arguments are keywords.

    The class raises UserError, with a line for each problem, for a value of another type or out of its bounds,
    and for what its `__post_init__` raises. Numbers of numpy become those of Python, as JSON needs them.
    """
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    made: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls)
    checked = made.__init__

    def __init__(self: Any, **given: Any) -> None:
        given = {name: v.item() if isinstance(v, np.generic) else v for name, v in given.items()}
        try:
            checked(self, **given)
        except ValidationError as error:
            raise UserError("\n".join(problems_of(error, made, (made.__name__,)))) from None

    made.__init__ = __init__
    return made


def dotted(path: Iterable[str]) -> str:
    return ".".join(path)


def fields_in(block: type) -> dict[str, FieldInfo]:
    """Return the definitions of the fields of a block, or of a class of settings."""
    found: dict[str, FieldInfo] = getattr(block, "model_fields", None) or vars(block)["__pydantic_fields__"]
    return found


def fields_of(block: type, path: Path = ()) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the definition of every field of a block, inner blocks included."""
    for name, definition in fields_in(block).items():
        inner = _inner_block(definition)
        if inner is not None:
            yield from fields_of(inner, (*path, name))
        else:
            yield dotted((*path, name)), definition


def shown(value: Any) -> str:
    """Return a value as the user wrote it, cut when long; text in quotes, so that 'ten' is seen to be text."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def expected_value(definition: FieldInfo) -> str:
    """Return what a field accepts, from its annotation: `an integer >= 1 or "auto"`."""
    return _expected(definition.annotation, definition.metadata)


def _expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        inherited = [entry for extra in extras for entry in getattr(extra, "metadata", [extra])]
        return _expected(inner, [*inherited, *metadata])
    if origin is Literal:
        choices = [json.dumps(choice) for choice in get_args(annotation)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if origin is list:
        inner = " or ".join(map(_expected, get_args(annotation)))
        lengths = [entry.max_length for entry in metadata if isinstance(entry, annotated_types.MaxLen)]
        return f"a list of {lengths[0]}, each {inner}" if lengths else f"a list of {inner}"
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(option, metadata) for option in get_args(annotation))
    if _is_block(annotation):
        definitions = fields_in(annotation)
        required = [name for name, entry in definitions.items() if entry.is_required()]
        names = required or list(definitions)
        return "an object with " + (", ".join(names) if len(names) <= 5 else f"{', '.join(names[:4])}, ...")
    kinds = {
        list: "a list",
        dict: "an object",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    entries = list(metadata)
    bounds = " and ".join(filter(None, map(_bound, entries)))
    words = "".join(f' or "{entry.word}"' for entry in entries if isinstance(entry, Also))
    return f"{kinds[origin or annotation]} {bounds}".rstrip() + words


def _bound(entry: Any) -> str:
    """Return a bound in words; "" for what is no bound."""
    if isinstance(entry, annotated_types.MinLen):
        return "that is not empty"
    words = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "divisible by"}
    return next(
        (f"{text} {getattr(entry, name)}" for name, text in words.items() if hasattr(entry, name)), ""
    )


def unknown_field(path: Path, known: Iterable[str]) -> str:
    """Return the line for a key that is not among the `known` keys of its block, with the nearest of them."""
    meant = nearest(path, known)
    return f"{dotted(path)} is not a known key; " + (f"did you mean {meant}?" if meant else "leave it out")


def nearest(path: Path, known: Iterable[str]) -> str:
    """Return the key in `known` that is nearest to the last name of a path, with the path; "" if none is."""
    spellings = {key.lower(): key for key in known}
    near = difflib.get_close_matches(path[-1].lower(), spellings, n=1, cutoff=_NEAR)
    return dotted((*path[:-1], spellings[near[0]])) if near else ""


def problems_of(
    error: ValidationError,
    block: type,
    path: Path = (),
    unknown: Callable[[Path, Iterable[str]], str] = unknown_field,
) -> list[str]:
    """Return pydantic's errors as our lines, which begin with the field; a union gives one line, not one a branch.

    Args:
        block: what was checked.
        path: its place in the file.
        unknown: returns the line for a key that is not in its block.
    """
    entries = error.errors(include_url=False)
    return list(dict.fromkeys(line for entry in entries for line in _lines(entry, block, path, unknown)))


def _lines(
    entry: Any, block: type, path: Path, unknown: Callable[[Path, Iterable[str]], str]
) -> Iterator[str]:
    owner: type | None = block
    definition = None
    for name in map(str, entry["loc"]):
        definitions = fields_in(owner) if owner is not None else {}
        if name not in definitions:
            if entry["type"] in ("extra_forbidden", "unexpected_keyword_argument") and owner is not None:
                yield unknown((*path, name), definitions)
                return
            break  # the branch of a union: the field is what the user knows
        definition, path = definitions[name], (*path, name)
        owner = _inner_block(definition)
    if entry["type"] in ("value_error", "assertion_error"):
        mark = ": " if owner is None else "."  # of a field, or between fields
        yield from (f"{dotted(path)}{mark}{line}" for line in str(entry["ctx"]["error"]).splitlines())
        return
    assert definition is not None  # `block` is checked against objects only
    yield f"{dotted(path)}{_wrong(entry, definition)}"


def _wrong(entry: Any, definition: FieldInfo) -> str:
    """Return what is wrong with the value of a field."""
    if entry["type"] == "missing":
        meaning = f": {definition.description}" if definition.description else ""
        return f" is missing ({expected_value(definition)}{meaning})"
    if entry["input"] == "auto":
        return f': "auto" has no meaning here; give {expected_value(definition)}'
    return f": must be {expected_value(definition)}, got {shown(entry['input'])}"


def _is_block(annotation: Any) -> bool:
    is_class = isinstance(annotation, type)
    return is_class and (issubclass(annotation, BaseModel) or is_dataclass(annotation))


def _inner_block(definition: FieldInfo) -> type | None:
    """Return the block of a field that holds one, which may be optional."""
    annotations = (definition.annotation, *get_args(definition.annotation))
    return next((annotation for annotation in annotations if _is_block(annotation)), None)
