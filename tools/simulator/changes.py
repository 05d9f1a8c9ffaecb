"""Changes of a run's JSON, as the command line and studies give them."""

import argparse
import json
from typing import Any


def add_option(parser: argparse.ArgumentParser, of: str) -> None:
    """`--set FIELD=VALUE`, as often as wanted; each is for `apply`."""
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
