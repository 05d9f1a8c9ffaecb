"""The table of docs/watching.md: every number of a run, of `monitor/numbers.py`.

    python -m tools.number_table

writes it there, between two comments.
"""

from pathlib import Path

from megatron_noloco.monitor.numbers import TABLE, Number
from tools.options import write_between

PAGE = Path(__file__).parents[1] / "docs" / "watching.md"
BEGIN, END = "<!-- tools/number_table.py -->\n", "<!-- end -->"


def main() -> None:
    write_between(PAGE, BEGIN, END, table())


def table() -> str:
    return "| name | in the log | meaning |\n|---|---|---|\n" + "".join(map(_row, TABLE.values()))


def _row(number: Number) -> str:
    words = "" if number.reduction is None else number.reduction.words
    line = number.name.split("/")[1] if callable(number.line) else number.line
    said = line.split("{}")[0].lstrip(" (").rstrip(" :")
    meaning = "; ".join(filter(None, (number.meaning, words)))
    return f"| `{number.name}` | {f'`{said}`' * bool(said)} | {meaning} |\n"


if __name__ == "__main__":
    main()
