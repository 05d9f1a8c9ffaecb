"""What settings of other programs are here: tables for messages about unknown names, and for `convert`."""

from collections.abc import Iterable, Iterator

from megatron_noloco.config.programs.deepspeed import DEEPSPEED
from megatron_noloco.config.programs.facts import Facts
from megatron_noloco.config.programs.megatron import MEGATRON
from megatron_noloco.config.programs.others import OTHERS
from megatron_noloco.config.programs.row import Carried, Meaningless, NoEqual, Program, Row
from megatron_noloco.config.programs.torchtitan import TORCHTITAN, titan_model
from megatron_noloco.config.programs.training_arguments import HUGGING_FACE
from megatron_noloco.fields import Path, dotted, nearest

__all__ = [
    "DEEPSPEED",
    "HUGGING_FACE",
    "MEGATRON",
    "OTHERS",
    "PROGRAMS",
    "TORCHTITAN",
    "Carried",
    "Facts",
    "Meaningless",
    "NoEqual",
    "Program",
    "Row",
    "hint_of",
    "names_of_others",
    "titan_model",
]

PROGRAMS = (OTHERS, DEEPSPEED, MEGATRON, HUGGING_FACE, TORCHTITAN)


def hint_of(path: Path, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """Return what is probably meant by an unknown key or type; "" if nothing is known of it.

    Args:
        known: the keys of the same block, or the types.
        elsewhere: dotted names of the fields of all blocks.
    """
    for name in (dotted(path), path[-1]):
        for program in PROGRAMS:
            if (row := program.words.get(name.lower())) and (hint := _in_words(row)):
                return f"did you mean {hint}?" if hint == getattr(row, "target", "") else hint
    meant = _at_another_place(path[-1].lower(), elsewhere)
    return f"did you mean {meant}?" if meant else nearest(path, known)


def names_of_others(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the settings of a program without the same name here, each with the field here or a sentence."""
    for name, row in program.words.items():
        if (here := _in_words(row)) and here.rpartition(".")[2] != name:
            yield name, here


def _in_words(row: Row) -> str:
    """Return the field that a setting is here, or a sentence about it; "" where it has no place of its own."""
    if isinstance(row, NoEqual):
        return f"not supported: {row.advice}"
    if isinstance(row, Meaningless):
        return row.why
    block, _, name = row.target.partition(".")
    if block == "facts":
        return Facts.model_fields[name].description or "" if name else ""
    return row.target


def _at_another_place(name: str, elsewhere: Iterable[str]) -> str:
    """Return fields of this name, or with block and field read as one: eval_iters is evaluation.iters."""
    words = name.split("_")

    def is_meant(key: str) -> bool:
        if key.rpartition(".")[2] == name:
            return True
        theirs = key.replace(".", "_").split("_")
        return 1 < len(words) == len(theirs) and all(map(str.startswith, theirs, words))

    return " or ".join(list(filter(is_meant, elsewhere))[:2])
