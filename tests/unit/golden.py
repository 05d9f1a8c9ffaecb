"""What commands say, in files that are reviewed as text: `make golden` writes them."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.unit.configs import MISSING

FOLDER = Path(__file__).parents[1] / "golden"


def check(name: str, cases: Iterable[tuple[Mapping[str, Any] | str, str]]) -> None:
    """Compare tests/golden/NAME.txt with commands, or edits of a good config, and what is said of each.

    With GOLDEN=write in the environment the file is written first: review the difference.
    """
    text = "\n".join(f"{_in_words(case)}\n{_indented(said)}" for case, said in cases)
    path = FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def _in_words(edits: Mapping[str, Any] | str) -> str:
    if isinstance(edits, str):
        return edits
    left_out = [name for name, value in edits.items() if value is MISSING]
    values = {name: value for name, value in edits.items() if value is not MISSING}
    words = [json.dumps(values)] * bool(values) + [f"without {name}" for name in left_out]
    return ", ".join(words)[:200] or "no change"


def _indented(text: str) -> str:
    return "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
