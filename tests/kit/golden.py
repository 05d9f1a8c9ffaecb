"""What commands say and what draws come to, in files that are reviewed: `make golden` writes what commands say."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kit.configs import MISSING

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


def refusals(calls: Mapping[str, Callable[[], object]], error: type[Exception]) -> Iterator[tuple[str, str]]:
    """Yield the name of each call, and the error that it raises, which is one line."""
    for name, call in calls.items():
        with pytest.raises(error) as caught:
            call()
        assert "\n" not in str(caught.value)
        yield name, str(caught.value)


def recorded(name: str, now: Any) -> Any:
    """Return what tests/golden/NAME.json holds; with GOLDEN=write it is first `now`, its numbers in 7 digits."""
    path = FOLDER / f"{name}.json"
    if os.environ.get("GOLDEN") == "write":
        text = json.dumps(now).replace("NaN", "null")
        rounded = json.loads(text, parse_float=lambda number: float(f"{float(number):.7g}"))
        path.write_text(json.dumps(rounded, indent=1) + "\n")
    return json.loads(path.read_text().replace("null", "NaN"))


def _in_words(edits: Mapping[str, Any] | str) -> str:
    if isinstance(edits, str):
        return edits
    left_out = [name for name, value in edits.items() if value is MISSING]
    values = {name: value for name, value in edits.items() if value is not MISSING}
    words = [json.dumps(values)] * bool(values) + [f"without {name}" for name in left_out]
    return ", ".join(words)[:200] or "no change"


def _indented(text: str) -> str:
    return "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
