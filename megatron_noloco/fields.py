"""Fields of settings: types with bounds, what they accept in words, and one line for each mistake.

The settings of the library (`settings.py`) and the blocks of the JSON file (`config/`) are made of these fields.
"""

import difflib
import json
import os
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin

import annotated_types
import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from megatron_noloco.errors import UserError

Path = tuple[str, ...]
_TYPO_SIMILARITY = (
    0.8  # ratio of difflib: misspellings reach it, keys of DeepSpeed that do nothing here do not
)


def _checked_path(path: str) -> str:
    """Return a path with a "~" at its beginning replaced by the home folder."""
    if "\0" in path:
        raise UserError("has a NUL character (\\u0000), which no file's name can have; remove it")
    return os.path.expanduser(path)


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Size = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]
FilePath = Annotated[Text, AfterValidator(_checked_path)]  # or a word that stands for one, such as "auto"


class Scope(Enum):
    """Who decides a field where replicas are separate jobs."""

    OWN = "each machine: the field may hold a path, an address or a command"
    OFFERED = "a newcomer copies it from the job that invites; jobs may differ"
    SHARED = "a newcomer copies it; jobs that differ refuse each other"
    COMPARED = "no newcomer copies it; ranks and jobs that differ refuse each other"

    def __call__(self, schema: dict[str, Any]) -> None:
        """Do nothing: pydantic stores a callable that is given as `json_schema_extra`, and so keeps the scope."""


class Also(NamedTuple):
    """Annotates a field that takes a word besides, which is replaced before the field is checked."""

    word: str

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"const": self.word}]}


def field(default: Any, meaning: str, scope: Scope | None = None, **bounds: Any) -> Any:
    """Return a field; a default of ... means that it is required; `scope`: None: that of its block."""
    return Field(default=default, description=meaning, json_schema_extra=scope, **bounds)


own_field, offered_field, shared_field, compared_field = (partial(field, scope=scope) for scope in Scope)


NO_RULES = "no rules"  # context of a validation that accepts what `Settings.rules` refuse


class Settings(BaseModel):
    """A block of settings: frozen, and checked when it is made; all arguments are keywords.

    A rule between the fields of a block is a line that `rules` yields. Strict: "10" is not 10 and true is not 1,
    because a guess that is wrong costs days of training. Raises UserError, with a line for each problem. Numbers
    of numpy become those of Python, as JSON needs them.

    Attributes:
        scope: of fields that have none of their own.
    """

    scope: ClassVar[Scope] = Scope.OWN

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, /, **given: Any) -> None:
        given = {name: v.item() if isinstance(v, np.generic) else v for name, v in given.items()}
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise UserError("\n".join(self._problems_of(error, given))) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # so inside another block pydantic's is used

    @classmethod
    def _problems_of(cls, error: ValidationError, given: dict[str, Any]) -> list[str]:
        return problems_of(error, cls, (cls.__name__,))

    @classmethod
    def left_out(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the values of fields that are left out, or given by a word, where other fields decide them."""
        return {}

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in(cls, given: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        """Make the settings; fields that `left_out` would give again do not count as given."""
        if not isinstance(given, dict) or not (values := cls.left_out(given)):
            return make(given)
        made = make({**given, **values})
        if cls.left_out({name: value for name, value in given.items() if name not in values}) == values:
            made.model_fields_set.difference_update(values)
        return made

    @model_validator(mode="after")
    def _keeps_the_rules(self, info: ValidationInfo) -> Self:
        if info.context != NO_RULES and (problems := list(self.rules())):
            raise UserError("\n".join(problems))
        return self

    def rules(self) -> Iterator[str]:
        """Yield what is wrong between the fields, each line with the name of a field at its beginning."""
        yield from ()

    def shared(self) -> dict[str, Any]:
        """Return the fields in which jobs must not differ."""
        scopes = {name: scope_of(type(self), (name,)) for name in type(self).model_fields}
        compared = (name for name, scope in scopes.items() if scope in (Scope.SHARED, Scope.COMPARED))
        return {name: getattr(self, name) for name in compared}

    def replace(self, **changes: Any) -> Self:
        """Return these settings with others in place of some, checked anew. Raises UserError.

        A field that was left out stays so: a rule or a recipe may give it another value.
        """
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | changes)


def dotted(path: Iterable[str]) -> str:
    return ".".join(path)


def fields_of(block: type[BaseModel], path: Path = ()) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the definition of every field of a block, inner blocks included."""
    for name, definition in block.model_fields.items():
        inner = _inner_blocks(definition)
        if len(inner) == 1:
            yield from fields_of(inner[0], (*path, name))
        else:
            yield dotted((*path, name)), definition


def scope_of(block: type[BaseModel], path: Path) -> Scope:
    """Return the scope of a field, by its path in a block; OWN of what is no field, or a whole block."""
    blocks, scope = [block], Scope.OWN
    for name in path:
        there = [owner for owner in blocks if name in owner.model_fields]
        if not there:
            return Scope.OWN
        definition = there[0].model_fields[name]
        own, default = definition.json_schema_extra, getattr(there[0], "scope", Scope.OWN)
        scope = own if isinstance(own, Scope) else default
        blocks = [inner for owner in there for inner in _inner_blocks(owner.model_fields[name])]
    return Scope.OWN if blocks else scope


def shown(value: Any) -> str:
    """Return a value as the user wrote it, cut when long; text in quotes, so that 'ten' is seen to be text."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`, `4 microbatches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def quoted(names: Sequence[str]) -> str:
    """Return names as a list in words: `"a", "b" and "c"`."""
    *others, last = (f'"{name}"' for name in names)
    return f"{', '.join(others)} and {last}" if others else last


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
        definitions = annotation.model_fields
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


Hint = Callable[[Path, Iterable[str]], str]
"""Returns what is probably meant by an unknown name, of a key with its path, among known names; "": unknown."""


def nearest(path: Path, known: Iterable[str]) -> str:
    """Return the question for the known name that is nearest to the last one of a path; "" if none is."""
    spellings = {key.lower(): key for key in known}
    near = difflib.get_close_matches(path[-1].lower(), spellings, n=1, cutoff=_TYPO_SIMILARITY)
    return f"did you mean {dotted((*path[:-1], spellings[near[0]]))}?" if near else ""


def problems_of(
    error: ValidationError, block: type[BaseModel], path: Path = (), hint: Hint = nearest
) -> list[str]:
    """Return pydantic's errors as our lines, which begin with the field; a union gives one line, not one a branch.

    Args:
        block: what was checked.
        path: its place in the file.
        hint: says what is meant by a key that is not in its block.
    """
    entries = error.errors(include_url=False)
    return list(dict.fromkeys(line for entry in entries for line in _lines(entry, block, path, hint)))


def _lines(entry: Any, block: type[BaseModel], path: Path, hint: Hint) -> Iterator[str]:
    owners: list[type[BaseModel]] = [block]  # several: blocks of which the next name is the type
    definition = None
    for name in map(str, entry["loc"]):
        if len(owners) > 1:
            owners = [owner for owner in owners if name in get_args(owner.model_fields["type"].annotation)]
            continue
        definitions = owners[0].model_fields if owners else {}
        if name not in definitions:
            if entry["type"] == "extra_forbidden" and owners:
                path = (*path, name)
                yield f"{dotted(path)} is not a known key; {hint(path, definitions) or 'leave it out'}"
                return
            break  # the branch of a union: the field is what the user knows
        definition, path = definitions[name], (*path, name)
        owners = _inner_blocks(definition)
    if entry["type"] == "value_error":
        mark = "" if not path else "." if owners else ": "  # between fields, or of a field
        yield from (f"{dotted(path)}{mark}{line}" for line in str(entry["ctx"]["error"]).splitlines())
    elif entry["type"] in ("union_tag_invalid", "union_tag_not_found"):
        types = [kind for owner in owners for kind in get_args(owner.model_fields["type"].annotation)]
        known = f"known are {', '.join(types)}"
        if (tag := entry["ctx"].get("tag")) is None:
            yield f"{dotted(path)}.type is missing; {known}"
        else:
            yield f"{dotted(path)}.type: {shown(tag)} is not a known {path[-1]}; {hint((tag,), types) or known}"
    else:
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
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _inner_blocks(definition: FieldInfo) -> list[type[BaseModel]]:
    """Return the blocks that a field may hold: of several, "type" says which."""

    def found(annotation: Any) -> Iterator[type[BaseModel]]:
        if _is_block(annotation):
            yield annotation
        elif get_origin(annotation) in (Annotated, Union, types.UnionType):
            for inner in get_args(annotation):
                yield from found(inner)

    return [*found(definition.annotation)]
