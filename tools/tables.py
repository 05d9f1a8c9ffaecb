"""Write the tables of docs/ that come from docs/evidence.csv.

    python -m tools.tables

Such a table stands between two comments. The first names studies, the measures to show (`MEASURES` of
tools/evidence.py), and the methods, as the CSV names them:

    <!-- table of front + replicas: rates loss perplexity
    [8 replicas]
    synchronous
    **pairs, int4** = NoLoCo int4, every step
    -->
    <!-- end -->

A line has a label and a method. A method that has other names in other studies stands with all of them, with " + "
between. The runs of a method at several learning rates are one row: that of the lowest loss of the first seed,
unless the line names rates. The others of a [group] are compared with its rows "synchronous" and "alone". A line
that begins with "|" makes columns of methods, where {} stands for a row's method or label:

    <!-- table of tokens: loss perplexity
    | tokens per step | synchronous = synchronous @ {} | pairs = pairs in cycles, int8 @ {}
    64 = 64 tokens
    -->
    <!-- end -->

`<!-- table over texts -->` is that of `tools.rates`. `make docs` fails where a table is not that of the CSV.
"""

import re
from collections.abc import Iterable, Iterator

from tools.evidence import EVIDENCE, MEASURES, ROOT, Found, Methods, Run, found, methods_of, read
from tools.options import command_line
from tools.rates import over_texts
from tools.simulator.report import BASELINES, Key, as_rows

_TABLE = re.compile(r"(<!-- table (of|over) ([^>]*?)-->\n)((?:\|.*\n)*)(<!-- end -->\n?)")


class TableError(ValueError):
    """A table cannot be made as its comment says, or is not that of the CSV. The message says which."""


def main() -> None:
    command_line(__doc__).parse_args()
    runs = read(EVIDENCE)
    for page in sorted((ROOT / "docs").glob("*.md")):
        page.write_text(written(page.read_text(), runs))


def written(page: str, runs: Iterable[Run]) -> str:
    """Return the page with its tables as the runs have them. Raises TableError."""
    runs = list(runs)

    def table(match: re.Match[str]) -> str:
        head, *lines = match[3].strip().splitlines()
        try:
            made = _over_texts(head, runs) if match[2] == "over" else _table(head, lines, runs)
        except TableError as error:
            raise TableError(f"table {match[2]} {head}: {error}") from None
        return match[1] + made + match[5]

    new, count = _TABLE.subn(table, page)
    if count < page.count("<!-- table"):
        raise TableError('a comment "<!-- table of ..." or its "<!-- end -->" is not in a line of its own')
    return new


def check(page: str, runs: Iterable[Run]) -> None:
    """Raise TableError where a table of the page is not that of the runs."""
    for there, made in zip(page.splitlines(), written(page, runs).splitlines(), strict=False):
        if there != made:
            raise TableError(f'"{there}" is "{made}" by {EVIDENCE.name}; python -m tools.tables writes it')


def without_comments(page: str) -> str:
    return _TABLE.sub(lambda match: match[4], page)


def _over_texts(study: str, runs: Iterable[Run]) -> str:
    results = {
        Key(run.method, run.learning_rate, run.seed): {"mean_model_loss": run.loss}
        for run in runs
        if run.study == study
    }
    return over_texts(results)


def _table(head: str, lines: list[str], runs: Iterable[Run]) -> str:
    studies, _, names = head.partition(": ")
    measures = names.split()
    if unknown := [name for name in measures if name not in MEASURES]:
        raise TableError(f"measures are {' '.join(MEASURES)}, not {' '.join(unknown)}")
    methods = methods_of(run for run in runs if run.study in studies.split(" + "))
    kind = _crossed if lines and lines[0].startswith("|") else _listed
    return as_rows(kind(lines, methods, measures))


def _listed(lines: Iterable[str], methods: Methods, measures: list[str]) -> Iterator[list[str]]:
    """Yield the rows of a table with a row for each method."""
    groups: dict[str, list[tuple[str, Found]]] = {"": []}
    for line in lines:
        if line.startswith("["):
            groups[line[1:-1]] = []
            continue
        label, _, method = line.partition(" = ")
        if (runs := found(method or label, methods)) is None:
            raise TableError(f'{EVIDENCE.name} has no runs of "{method or label}"')
        groups[[*groups][-1]].append((label, runs))
    first = [] if groups[""] else [""]  # a column for the groups
    yield [*first, "method", *(MEASURES[name].title for name in measures)]
    for group, rows in groups.items():
        for place, (label, method_runs) in enumerate(rows):
            cells = (MEASURES[name].show(method_runs, _baselines(rows)) for name in measures)
            yield [*(group if place == 0 else "" for _ in first), label, *cells]


def _crossed(lines: list[str], methods: Methods, measures: list[str]) -> Iterator[list[str]]:
    """Yield the rows of a table with a column for each method; a cell without runs is empty."""
    corner, *columns = (cell.strip() for cell in lines[0][1:].split("|"))
    patterns = dict(column.split(" = ") for column in columns)
    yield [corner, *patterns]
    seen: set[str] = set()
    for line in lines[1:]:
        label, _, value = line.partition(" = ")
        names = {title: pattern.replace("{}", value or label) for title, pattern in patterns.items()}
        row = {title: runs for title, name in names.items() if (runs := found(name, methods))}
        if not row:
            raise TableError(f'{EVIDENCE.name} has no runs of "{line}"')
        seen |= row.keys()
        shown = {
            title: [MEASURES[name].show(runs, _baselines(row.items())) for name in measures]
            for title, runs in row.items()
        }
        yield [label, *("; ".join(filter(None, shown.get(title, []))) for title in patterns)]
    if unseen := patterns.keys() - seen:
        raise TableError(f"{EVIDENCE.name} has no runs of the column {', '.join(sorted(unseen))}")


def _baselines(rows: Iterable[tuple[str, Found]]) -> dict[str, Found]:
    """Return the rows with which the others are compared, by their names."""
    return {name: runs for label, runs in rows for name in BASELINES if label.startswith(name)}


if __name__ == "__main__":
    main()
