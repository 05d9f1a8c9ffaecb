"""What a setting of another program is here: a row of its table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

OFF: tuple[Any, ...] = (None, False, 0, "", "none", "no", "None", [], {})

_MISSPELT = 0.95  # ratio of difflib; no two settings of a program are as near


class Carried(NamedTuple):
    """A setting whose value a config takes.

    Attributes:
        target: the field, with its block; or a field of `Facts`, as `facts.NAME`.
        values: maps their value to ours. An object is several fields below `target`, None is a value that asks for
            nothing. A mapping holds all values that have an equal here.
    """

    target: str
    values: Callable[[Any], Any] | Mapping[Any, Any] | None = None


class Meaningless(NamedTuple):
    """A setting without which a run here is the same."""

    why: str


class NoEqual(NamedTuple):
    """A setting that has no equal here.

    Attributes:
        advice: why there is none, and what to do.
        off: a value, as text, with which the setting asks for nothing, as it does with one of OFF.
    """

    advice: str
    off: str = ""

    def asks_for_nothing(self, value: Any) -> bool:
        return value in OFF or str(value) == self.off


Row: TypeAlias = Carried | Meaningless | NoEqual
Words: TypeAlias = dict[str, Row]


@dataclass(frozen=True, eq=False)
class Program:
    """The settings of a program.

    Attributes:
        words: a row for each setting, by its name in small letters with underscores; blocks are joined by dots.
            A name with * stands for many.
        defaults: of settings that a config here would otherwise have another value of.
    """

    name: str
    words: Words
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def row(self, name: str) -> Row | None:
        """Return the row of a setting; None for a name that the program does not have.

        A name that is almost one without * is a misspelling, and none that a * stands for.
        """
        name = name.lower()
        if name in self.words:
            return self.words[name]
        patterns = [key for key in self.words if "*" in key and fnmatchcase(name, key)]
        exact = [key for key in self.words if "*" not in key]
        is_known = patterns and not get_close_matches(name, exact, 1, _MISSPELT)
        return self.words[patterns[0]] if is_known else None

    def has_block(self, name: str) -> bool:
        """Return whether settings of the block `name` have rows of their own."""
        return any(word.startswith(f"{name.lower()}.") for word in self.words)


def same(block: str, names: str) -> Words:
    """Return rows of settings that have the same names in a block here."""
    return {name: Carried(f"{block}.{name}" if block else name) for name in names.split()}


def table(carried: Words, meaningless: Mapping[str, str], no_equal: Mapping[str, str]) -> Words:
    """Return the rows of a program.

    Args:
        meaningless: names of settings by the reason why they have no meaning here.
        no_equal: names by the advice; `NAME=VALUE` says that the setting asks for nothing with this value.
    """
    words = dict(carried)
    for why, names in meaningless.items():
        words |= dict.fromkeys(names.split(), Meaningless(why))
    for advice, names in no_equal.items():
        for name, _, off in (entry.partition("=") for entry in names.split()):
            words[name] = NoEqual(advice, off)
    return words


def within(block: str, words: Words) -> Words:
    """Return the rows of a block's settings, by their names outside of it."""
    return {f"{block}.{name}": row for name, row in words.items()}


def launcher() -> Words:
    """Return the rows of the options of torchrun, `deepspeed` and `accelerate launch`."""
    why = "it is for the launcher of the other program; docs/launchers.md has those here"
    names = """
        node_rank master_addr master_port rdzv_* standalone max_restarts tee log_dir hostfile include exclude
        launcher no_python module user force_multi config_file machine_rank main_process_* multi_gpu
        num_cpu_threads_per_process use_deepspeed
    """
    counts = {
        "facts.ranks_per_node": "nproc_per_node num_gpus",
        "facts.nodes": "nnodes num_nodes num_machines",
        "facts.ranks": "num_processes",
    }
    return table(
        {name: Carried(fact) for fact, words in counts.items() for name in words.split()}, {why: names}, {}
    )
