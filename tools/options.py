"""Command lines of the tools, and changes of a run's JSON."""

import argparse
import copy
import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def command_line(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a tool, as it is written."""
    return argparse.ArgumentParser(
        prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def run_case(package: str, doc: str | None, cases: Sequence[str]) -> None:
    """Run the case that the command line names, a module of the package, and print the JSON of its report.

    A module has `add_options(parser)` and `run(options)`, which returns the report; None: there is none to print.
    A report whose "well" is False gives exit code 1.
    """
    parser = command_line(doc, f"python -m {package}")
    parser.add_argument("case", choices=cases)
    name = parser.parse_args(sys.argv[1:2]).case
    case = importlib.import_module(f"{package}.{name}")  # alone: some set environment variables
    parser = command_line(case.__doc__, f"{parser.prog} {name}")
    case.add_options(parser)
    with suppress(KeyboardInterrupt):
        report = case.run(parser.parse_args(sys.argv[2:]))
        if report is not None:  # the first rank has it
            print(json.dumps(report, indent=1), flush=True)
            sys.exit(report.get("well") is False)


def add_changes(parser: argparse.ArgumentParser, of: str) -> None:
    """Add `--set FIELD=VALUE`, which may be repeated; `apply` takes each value."""
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=f"a change of {of}")


def apply(raw: dict[str, Any], change: str) -> None:
    """Set one field of a run's JSON, "block.field=value", in place; a value that is no JSON is text."""
    path, _, text = change.partition("=")
    *blocks, name = path.split(".")
    for block in blocks:
        raw = raw.setdefault(block, {})
    try:
        raw[name] = json.loads(text)
    except json.JSONDecodeError:
        raw[name] = text


def configure(
    study: dict[str, Any], name: str, learning_rate: float | None = None, seed: int = 0
) -> dict[str, Any]:
    """Return the JSON of a run of a study. A learning rate scales those of all parameters."""
    raw = copy.deepcopy(study["base"])
    raw["training"]["seed"] = seed
    for change in study["runs"][name]:
        apply(raw, change)
    params = raw["optimizer"]["params"]
    if learning_rate is not None:
        factor = learning_rate / params["lr"]
        rates = ("lr", "muon_lr", "adam_lr")
        params |= {field: params[field] * factor for field in rates if field in params}
    return raw
