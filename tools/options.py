"""Command lines of the tools."""

import argparse
import json
from pathlib import Path
from typing import Any


def command_line(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a tool, as it is written."""
    return argparse.ArgumentParser(
        prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Write a text into a page, between two comments that are there."""
    before, rest = page.read_text().split(begin)
    page.write_text(before + begin + text + end + rest.split(end)[1])


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
