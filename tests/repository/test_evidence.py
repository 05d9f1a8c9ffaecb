"""The tables of docs/ are those of docs/evidence.csv, and a page that differs fails `make docs`.

So the pages are the golden files of tools/tables.py.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mkdocs.exceptions import PluginError

from tools import docs_site
from tools.evidence import EVIDENCE, ROOT, Run, found, methods_of, read
from tools.rates import by_text, over_choices, over_texts
from tools.tables import TABLES, TableError, check, definitions, written

RUNS = [
    Run("a", "synchronous, 0.01 0.02", 0.004, 1, 1.0, 1.0, 0),
    Run("a", "synchronous, 0.01 0.02", 0.004, 2, 1.2, 1.2, 0),
    Run("a", "pairs, 0.01 0.02", 0.004, 1, 1.2, 1.3, 5e6),
    Run("a", "pairs, 0.04 0.02", 0.004, 1, 1.1, 1.2, 5e6),
    Run("a", "pairs, 0.04 0.02", 0.004, 2, 1.2, 1.3, 5e6),
    Run("a", "alone, 0.01 0.02 @ b", 0.004, 1, 2.0, 2.0, 0),
    Run("b", "pairs, 0.08 0.02", 0.004, 1, 0.5, 0.5, 0),
]
LIST = """\
table of a: rates loss perplexity benefit MB others
synchronous
**pairs** = pairs
alone = alone @ b
"""
CROSS = """\
table of a: loss
| method | alone = {} @ c | on b = {} @ b | here = {}
pairs
no rounds = alone
"""


def rows(definition: str) -> list[str]:
    """Those of the table, without its head."""
    return written("<!-- table table -->\n", RUNS, definitions(definition)).splitlines()[3:]


def test_column_without_runs_is_refused() -> None:
    with pytest.raises(TableError, match="no runs of the column alone"):
        rows(CROSS)
    assert rows(CROSS.replace(" alone = {} @ c |", "")) == [
        "| pairs |  | 1.1500 +- 0.0707 (2 seeds) |",
        "| no rounds | 2.0000 |  |",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("= pairs", "= pears", 'table table: evidence.csv has no runs of "pears"'),
        ("= pairs", "= pairs, 0.5 0.5", 'no runs of "pairs, 0.5 0.5"'),
        ("MB", "GB", "measures are rates .*, not GB"),
        ("table", "tables", 'tables.txt has no table "table"'),
    ],
)
def test_a_mistake_in_a_definition_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        rows(LIST.replace(old, new))


def test_a_comment_that_makes_no_table_is_refused() -> None:
    with pytest.raises(TableError, match="is not in a line of its own"):
        written("Text <!-- table table --> text.\n", RUNS, definitions(LIST))


def test_rates_that_a_name_lacks_are_those_of_the_study() -> None:
    tokens = methods_of(run for run in read(EVIDENCE) if run.study == "tokens")
    synchronous = found("synchronous @ 256 tokens", tokens)
    assert synchronous is not None
    assert synchronous.best[1].rates == pytest.approx((0.056, 0.064))  # twice those of the study


PAGES = sorted((ROOT / "docs").glob("*.md"))
DEFINED = definitions(TABLES.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_csv(page: Path) -> None:
    check(page.read_text(), read(EVIDENCE), DEFINED)


def build(page: str, markdown: str) -> str:
    """What `make docs` makes of a page."""
    site: Any = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    return docs_site.on_page_markdown(markdown, site, site, site)


@pytest.mark.parametrize("side", ["page", "csv"])
def test_a_number_that_differs_fails_make_docs(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    markdown = (ROOT / "docs/evidence.md").read_text()
    assert "| 1.3325 +- 0.0014 |" in build("evidence.md", markdown)
    if side == "page":
        markdown = markdown.replace("| 1.3325 +- 0.0014 |", "| 1.3324 +- 0.0014 |")
    else:
        runs = [run._replace(loss=run.loss + 0.001) for run in read(EVIDENCE)]
        monkeypatch.setattr(docs_site, "read", lambda file: runs)
    with pytest.raises(PluginError, match=r'^evidence.md: "\| .*" is "\| .*" by evidence.csv; python -m'):
        build("evidence.md", markdown)


def test_unfinished_searches_are_left_out() -> None:
    losses = {
        "synchronous @ a, 20 steps": [1.2, 1.0, 1.3],
        "synchronous @ b, 20 steps": [1.2, 1.0, 1.3],
        "synchronous @ c, 20 steps": [1.0, 1.2, 1.3],  # the best has no neighbour below
        "pairs @ a, 20 steps": [1.2, 1.1, 1.3],
        "pairs @ b, 20 steps": [1.3, 1.2, 1.3],
        "pairs @ c, 20 steps": [1.3, 1.2, 1.3],
    }
    runs = by_text(
        (name, rate, seed, loss + seed - 1)  # of the search counts the first seed alone
        for name, tried in losses.items()
        for rate, loss in zip((0.01, 0.02, 0.04), tried, strict=True)
        for seed in (1, 2)
    )
    assert over_texts(runs).splitlines()[-1] == "| 20 | pairs | 10.5 % (0.018) | 22.1 % (0.02) |  |"
    assert over_choices(runs).splitlines()[-2:] == [  # no runs of a tenth of the length, so none for `tune`
        "| pairs | best on a |  | 22.5 % |  |",
        "| pairs | searched | 10.5 % | 22.1 % |  |",
    ]
