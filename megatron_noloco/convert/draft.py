"""The fields of a config to be, and from which settings of other programs each of them follows."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_noloco.config.deepspeed_block import AUTO
from megatron_noloco.config.programs import DEEPSPEED, HUGGING_FACE, Carried, Facts, Meaningless, NoEqual
from megatron_noloco.convert.given import Setting, Unread
from megatron_noloco.errors import UserError
from megatron_noloco.fields import shown

_MODEL = ("model.", "facts.activation", "facts.normalization", "facts.biases", "facts.position")


class Draft:
    """Collects the fields that settings are, or follow from.

    Attributes:
        fields: values by dotted name; those that begin with "facts." are of `Facts`.
        sources: the settings that a field comes from; a field of a program's default has none.
        defaults: the fields that are a program's defaults, each with the setting there; its file is "".
        why: of settings without a field, the reason why they have no meaning here.
        advice: of settings without an equal, what to do.
    """

    def __init__(self, settings: Mapping[Setting, Any]) -> None:
        self.settings = settings
        self.fields: dict[str, Any] = {}
        self.sources: dict[str, list[Setting]] = {}
        self.defaults: dict[str, Setting] = {}
        self.why: dict[Setting, str] = {}
        self.advice: dict[Setting, str] = {}
        self._becomes: dict[str, list[str]] = {}  # of a field of Facts: the fields that follow from it
        self._left = dict[str, list[str]]()  # by file: settings that the TrainingArguments fill in
        problems = [line for setting, value in settings.items() for line in self._take(setting, value)]
        for file, names in self._left.items():
            problems.append(
                f'{file}: "auto" is filled in from Hugging Face\'s TrainingArguments; give their file as well, or '
                f"values ({', '.join(dict.fromkeys(names))})"
            )
        if problems:
            raise UserError("\n".join(problems))
        self._add_defaults()
        self.facts = self._checked_facts()

    def get(self, field: str, default: Any = None) -> Any:
        return self.fields.get(field, default)

    def put(self, field: str, value: Any, *facts: str) -> None:
        """Set a field that follows from facts, unless a setting gives the field itself."""
        if not self.sources.get(field):
            self.replace(field, value, *facts)

    def replace(self, field: str, value: Any, *facts: str) -> None:
        """Set a field, also where a setting gives it."""
        for fact in facts:
            self._becomes.setdefault(f"facts.{fact}", []).append(field)
        self.fields[field] = value

    def drop(self, prefix: str, why: str) -> None:
        """Leave out the fields of this name or block, which would have no meaning."""
        for field in [name for name in self.fields if name == prefix or name.startswith(f"{prefix}.")]:
            self.why |= dict.fromkeys(self._behind(field), why)
            del self.fields[field]
            self.defaults.pop(field, None)

    def advise(self, field: str, advice: str) -> None:
        """Say of the settings of a field that they have no equal, and what to do."""
        self.advice |= dict.fromkeys(self._behind(field), advice)

    def _behind(self, field: str) -> list[Setting]:
        """Return the settings, or else the default, that a field comes from or follows from."""
        names = [field, *(fact for fact, fields in self._becomes.items() if field in fields)]
        given = [setting for name in names for setting in self.sources.get(name, ())]
        return given or [self.defaults[name] for name in names if name in self.defaults]

    def where(self, field: str) -> str:
        """Return the setting that a field comes from, for the beginning of a line; "" if none gives it."""
        for name in (field, *_blocks_of(field)):
            if name in self.sources:
                return self.sources[name][0].where
            if name in self.defaults:
                return f"{self.defaults[name].program.name}'s default of {self.defaults[name].name}"
        return ""

    def results(self, setting: Setting) -> list[str]:
        """Return the fields that a setting has become."""
        names = [field for field, sources in self.sources.items() if setting in sources]
        names += [field for field, default in self.defaults.items() if setting == default]
        found = [result for name in names for result in (self._becomes.get(name) or [name])]
        return [
            name for name in dict.fromkeys(found) if name in self.fields and not name.startswith("facts.")
        ]

    def _take(self, setting: Setting, value: Any) -> Iterator[str]:
        """Take a setting; yield why it cannot be."""
        row = setting.program.row(setting.name)
        if isinstance(row, Meaningless):
            self.why[setting] = row.why
        elif isinstance(row, NoEqual):
            if row.asks_for_nothing(value):
                self.why[setting] = f"{shown(value)} asks for nothing"
            else:
                self.advice[setting] = row.advice
        elif value is None:
            self.why[setting] = "null asks for nothing"
        elif isinstance(row, Carried):
            values = value if isinstance(value, list) else [value]
            if unread := [one.why for one in values if isinstance(one, Unread)]:
                yield f"{setting.file}: {unread[0]} ({setting.name})"
                return
            try:
                leaves = list(_leaves(row, value))
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
                known = row.values if isinstance(row.values, Mapping) else ()
                equal = f"; known are {', '.join(map(str, known))}" if known else ""
                yield f"{setting.where}: {shown(value)} has no equal here{equal}"
                return
            if not leaves:
                self.why[setting] = f"{shown(value)} asks for nothing"
            for field, found in leaves:
                yield from self._carry(setting, field, found)

    def _carry(self, setting: Setting, field: str, value: Any) -> Iterator[str]:
        if value == AUTO and setting.program is DEEPSPEED:
            if any(other.program is HUGGING_FACE for other in self.settings):
                self.why[setting] = '"auto": the TrainingArguments say it'
            elif field.startswith("zero_optimization."):
                self.why[setting] = '"auto" is the default'
            else:
                self._left.setdefault(setting.file, []).append(setting.name)
            return
        others = self.sources.setdefault(field, [])
        if others and self.fields[field] != value:
            yield (
                f"{setting.where}: {shown(value)}, but {others[0].where} says {shown(self.fields[field])}; both "
                f"are {_without_facts(field)} here, give one of them"
            )
        others.append(setting)
        self.fields[field] = value

    def _add_defaults(self) -> None:
        """Add the defaults of the programs, where they would otherwise be others."""
        for program in dict.fromkeys(setting.program for setting in self.settings):
            for name, value in program.defaults.items():
                row = program.row(name)
                assert isinstance(row, Carried)
                for field, found in _leaves(row, value):
                    if field not in self.fields and self._has_use(field):
                        self.fields[field] = found
                        self.defaults[field] = Setting("", name, program)

    def _has_use(self, field: str) -> bool:
        """Return whether the default of a field counts: not without the model, or the data, that it is about."""
        if field.startswith(_MODEL) and field != "model.seq_length":
            return "model.num_layers" in self.fields
        return field != "data.split" or "data.data_path" in self.fields

    def _checked_facts(self) -> Facts:
        found = {name.partition(".")[2]: v for name, v in self.fields.items() if name.startswith("facts.")}
        try:
            return Facts(**found)
        except UserError as error:
            lines = [line.removeprefix("Facts.") for line in str(error).splitlines()]
        named = ((line, self.where(f"facts.{line.split(':')[0].split(' ')[0]}")) for line in lines)
        raise UserError("\n".join(f"{where}: {line.partition(': ')[2] or line}" for line, where in named))


def _leaves(row: Carried, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a value is, each with its value."""
    if isinstance(row.values, Mapping):
        value = row.values[value]
    elif row.values is not None:
        value = row.values(value)
    if value is not None:
        yield from _below(row.target, value)


def _below(field: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield field, value
        return
    for name, inner in value.items():
        yield from _below(f"{field}.{name}" if field else name, inner)


def _blocks_of(field: str) -> Iterable[str]:
    parts = field.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]


def _without_facts(field: str) -> str:
    return field.removeprefix("facts.")
