"""Defines what the commands share: types and help of their options, and writing their result to stdout."""

import argparse
import math
import re
import sys
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

CHECKPOINT = (
    "a step folder, or a run's output_dir (its latest checkpoint); of a federation the output_dir, or the "
    "folders of several replicas (the newest step that all of them have)"
)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {
    "bandwidth": {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8},
    "time": {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "size": {"": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9},
    "memory": {"": 1.0, "gb": 1.0},
}
_EXAMPLES = {
    "bandwidth": "100Mbit or 1Gbit",
    "time": "25ms, 0.3s, 5min or 7d",
    "size": "500MB or 2GB",
    "memory": "24 or 24GB",
}


def add_command(
    commands: Commands, name: str, does: str, example: str, more: str = ""
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        does: a sentence without its capital and its full stop, for the list of commands and for its own help.
        example: a command line, without the program's name.
        more: what its help says besides.
    """
    description = f"{does[0].upper()}{does[1:]}." + f"\n\n{more}" * bool(more)
    return commands.add_parser(
        name,
        help=does,
        description=description,
        epilog=f"example:\n  megatron-noloco {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_data(command: argparse.ArgumentParser, meaning: str, default: str) -> None:
    """Add `--data`, whose values are pairs: a field of the block `data` ("" if none is named), and a path.

    Args:
        default: the field that is meant if none is named, in words.
    """
    command.add_argument(
        "--data",
        action="append",
        default=[],
        type=_field_and_path,
        metavar="[FIELD=]PATH",
        help=f"{meaning}, such as text=my-texts; FIELD: of the block data (default: {default})",
    )


def _field_and_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    return (name, path) if equals and name.isidentifier() else ("", text)


def say(*lines: str) -> None:
    """Write lines to stdout."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


# Types for argparse. An error that they raise becomes one line with the option's name.


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number of at least 1')
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number from 0 to 2^63 - 1')
    return int(text)


def utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8 text") from None
    return text


def at_least_zero(text: str) -> float:
    number = _number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of at least 0')
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def dtype(text: str) -> str:
    """Return torch's name of a precision, which may be given by the config's."""
    name = _DTYPES.get(text, text)
    if name not in _DTYPES.values():
        raise argparse.ArgumentTypeError(f'"{text}" is not one of {", ".join(_DTYPES)}')
    return name


def bandwidth(text: str) -> float:
    """Return bytes per second."""
    return _quantity(text, "bandwidth")


def duration(text: str) -> float:
    """Return seconds, more than 0."""
    return _quantity(text, "time")


def latency(text: str) -> float:
    """Return seconds, 0 or more."""
    return _quantity(text, "time", zero=True)


def gigabytes(text: str) -> float:
    """Return 10^9 bytes; the unit may be given."""
    return _quantity(text, "memory")


def size(text: str) -> int:
    """Return bytes."""
    return int(_quantity(text, "size"))


def _quantity(text: str, kind: str, zero: bool = False) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?([a-z]*)", text.strip().lower())
    unit = _UNITS[kind].get(match[2]) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f'"{text}" is not a {kind}; write {_EXAMPLES[kind]}')
    if not zero and not float(match[1]):
        raise argparse.ArgumentTypeError(f'"{text}" must be more than 0, such as {_EXAMPLES[kind]}')
    return float(match[1]) * unit
