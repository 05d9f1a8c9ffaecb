"""Write the tables of docs/ that come from docs/evidence.csv, or print others.

    python -m tools.tables
    python -m tools.tables texts sizes     # print these instead; "all": each that there is
    python -m tools.tables texts --csv runs/rates/evidence.csv     # of the runs of a study

Such a table stands below a line `<!-- table NAME -->`; tools/tables.txt says what is in it. `make docs` fails
where a table is not that of the CSV.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

from tools.evidence import BASELINES, EVIDENCE, MEASURES, ROOT, Found, Methods, Run, found, methods_of, read
from tools.options import command_line
from tools.rates import as_rows, by_text, over_choices, over_texts

TABLES = ROOT / "tools" / "tables.txt"
OVER = {"texts": over_texts, "choices": over_choices}
_OF_STUDY = ("rates", "loss", "worst", "perplexity", "benefit", "MB", "others")
_TABLE = re.compile(r"(<!-- table (.*) -->\n)((?:\|.*\n)*)")


class TableError(ValueError):
    """A table cannot be made as it is defined, or is not that of the CSV. The message says which."""


def main() -> None:
    parser, defined = command_line(__doc__), definitions(TABLES.read_text())
    parser.add_argument("names", nargs="*", metavar="NAME", help="a table to print")
    parser.add_argument("--csv", type=Path, default=EVIDENCE, help="runs to print tables of")
    options = parser.parse_args()
    names = options.names
    if unknown := [name for name in names if name not in (*defined, "all")]:
        # not by `choices`: argparse of Python 3.11 then refuses a command line without names
        parser.error(f"there is no table {unknown[0]}; known are {', '.join(defined)}, all")
    try:
        for name in defined if "all" in names else names:
            print(with_caption(defined[name], read(options.csv)))
    except (FileNotFoundError, TableError) as error:
        parser.error(str(error))
    if not names:
        for page in sorted((ROOT / "docs").glob("*.md")):
            page.write_text(written(page.read_text(), read(EVIDENCE), defined))


def definitions(text: str) -> dict[str, str]:
    """Return the paragraphs by the names with which they begin; lines that begin with # are remarks."""
    paragraphs = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip().split("\n\n")
    return {paragraph.split()[0]: paragraph for paragraph in paragraphs}


def with_caption(definition: str, runs: Iterable[Run]) -> str:
    """Return a table below its name and what it shows."""
    head, *lines = definition.splitlines()
    (caption,) = (line for line in lines if line.startswith("> "))
    return f"## {head.split()[0]}\n\n{caption.removeprefix('> ')}\n\n{_made(definition, runs)}"


def written(page: str, runs: Iterable[Run], defined: Mapping[str, str]) -> str:
    """Return the page with its tables as the runs have them. Raises TableError."""
    runs = list(runs)

    def table(match: re.Match[str]) -> str:
        if match[2] not in defined:
            raise TableError(f'{TABLES.name} has no table "{match[2]}"')
        try:
            return match[1] + _made(defined[match[2]], runs)
        except TableError as error:
            raise TableError(f"table {match[2]}: {error}") from None

    new, count = _TABLE.subn(table, page)
    if count < page.count("<!-- table"):
        raise TableError('a comment "<!-- table NAME -->" is not in a line of its own')
    return new


def check(page: str, runs: Iterable[Run], defined: Mapping[str, str]) -> None:
    """Raise TableError where a table of the page is not that of the runs."""
    new = written(page, runs, defined)
    for there, made in zip_longest(page.splitlines(), new.splitlines(), fillvalue=""):
        if there != made:
            raise TableError(f'"{there}" is "{made}" by {EVIDENCE.name}; python -m tools.tables writes it')


def without_comments(page: str) -> str:
    return _TABLE.sub(lambda match: match[3], page)


def of_study(runs: Iterable[Run], names: Iterable[str]) -> str:
    """Return a table of the methods of a study: those of each group, what follows " @ ", with its baselines."""
    groups: dict[str, list[str]] = defaultdict(list, {"": []})
    for name in names:
        groups[name.partition(" @ ")[2]].append(name)
    lines = [line for group, members in groups.items() for line in [*[f"[{group}]"] * bool(group), *members]]
    return as_rows(_listed(lines, methods_of(runs), list(_OF_STUDY)))


def _made(definition: str, runs: Iterable[Run]) -> str:
    _, kind, rest = definition.splitlines()[0].split(" ", 2)
    if kind == "over":
        made, _, study = rest.partition(" of ")
        of_study = (run for run in runs if run.study == study)
        return OVER[made](by_text((run.method, run.learning_rate, run.seed, run.loss) for run in of_study))
    measures = rest.partition(": ")[2].split()
    if unknown := [name for name in measures if name not in MEASURES]:
        raise TableError(f"measures are {' '.join(MEASURES)}, not {' '.join(unknown)}")
    lines, methods = parts(definition, runs)
    kind_of = _crossed if lines and lines[0].startswith("|") else _listed
    return as_rows(kind_of(lines, methods, measures))


def parts(definition: str, runs: Iterable[Run]) -> tuple[list[str], Methods]:
    """Return the lines of a definition that name methods, and the methods of its studies."""
    head, *lines = definition.splitlines()
    studies = head.split(" ", 2)[2].partition(": ")[0].split(" + ")
    return [line for line in lines if not line.startswith("> ")], methods_of(
        run for run in runs if run.study in studies
    )


def grouped(lines: Iterable[str], methods: Methods) -> dict[str, list[tuple[str, Found]]]:
    """Return labels and methods of each group of a table with a row for each method."""
    groups: dict[str, list[tuple[str, Found]]] = {"": []}
    for line in lines:
        if line.startswith("["):
            groups[line[1:-1]] = []
            continue
        label, _, method = line.partition(" = ")
        if (runs := found(method or label, methods)) is None:
            raise TableError(f'{EVIDENCE.name} has no runs of "{method or label}"')
        groups[[*groups][-1]].append((label, runs))
    return groups


def _listed(lines: Iterable[str], methods: Methods, measures: list[str]) -> Iterator[list[str]]:
    """Yield the rows of a table with a row for each method."""
    groups = grouped(lines, methods)
    first = [] if groups[""] else [""]  # a column for the groups
    yield [*first, "method", *(MEASURES[name].title for name in measures)]
    for group, rows in groups.items():
        for place, (label, method_runs) in enumerate(rows):
            cells = (MEASURES[name].show(method_runs, _baselines(rows)) for name in measures)
            yield [*(group if place == 0 else "" for _ in first), label, *cells]


def crossed(lines: Iterable[str], methods: Methods) -> dict[str, dict[str, Found]]:
    """Return by label and title the methods of a table with a column for each; there may be no runs of a cell."""
    head, *others = lines
    patterns = dict(column.strip().split(" = ") for column in head.split("|")[2:])
    table = {}
    for line in others:
        label, _, value = line.partition(" = ")
        names = {title: pattern.replace("{}", value or label) for title, pattern in patterns.items()}
        table[label] = {title: runs for title, name in names.items() if (runs := found(name, methods))}
        if not table[label]:
            raise TableError(f'{EVIDENCE.name} has no runs of "{line}"')
    if unseen := patterns.keys() - {title for row in table.values() for title in row}:
        raise TableError(f"{EVIDENCE.name} has no runs of the column {', '.join(sorted(unseen))}")
    return table


def _crossed(lines: list[str], methods: Methods, measures: list[str]) -> Iterator[list[str]]:
    """Yield the rows of a table with a column for each method; one of which nothing is shown is left out."""
    _, corner, *columns = (cell.strip() for cell in lines[0].split("|"))
    shown = {
        label: {
            title: "; ".join(
                filter(None, (MEASURES[name].show(runs, _baselines(row.items())) for name in measures))
            )
            for title, runs in row.items()
        }
        for label, row in crossed(lines, methods).items()
    }
    titles = [column.partition(" = ")[0] for column in columns]
    titles = [title for title in titles if any(row.get(title) for row in shown.values())]
    yield [corner, *titles]
    for label, row in shown.items():
        yield [label, *(row.get(title, "") for title in titles)]


def _baselines(rows: Iterable[tuple[str, Found]]) -> dict[str, Found]:
    """Return the rows with which the others are compared, by their names; the first is "first"."""
    (_, first), *_ = rows = list(rows)
    found = {name: runs for label, runs in rows[::-1] for name in BASELINES if label.startswith(name)}
    return found | {"first": first}


if __name__ == "__main__":
    main()
