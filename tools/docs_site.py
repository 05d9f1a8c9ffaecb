"""Adds pages made from other files, and links to files that are not in docs/, to the site.

A hook of mkdocs.yml. The first page is README.md. The configuration reference is made from the models, and the
table of numbers in watching.md from `monitor/numbers.py`, so that they cannot differ. A page whose tables differ
from docs/evidence.csv is refused.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from megatron_noloco.config.explain import as_markdown
from megatron_noloco.monitor.numbers import TABLE, Number
from tools.evidence import EVIDENCE, read
from tools.tables import TABLES, TableError, check, definitions, with_caption, without_comments

ROOT = Path(__file__).parents[1]
_NUMBERS = "<!-- every number -->"
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_PAGES = {  # outside of docs/, and what they are here
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "configs/README.md": "configs.md",
    "CHANGELOG.md": "changelog.md",
}

_TABLES = """Made from evidence.csv, as `python -m tools.tables all` prints them.
Unless a caption says otherwise, the runs are those of [evidence.md](evidence.md#what-is-lost).
"""
_FIRST_FOUND = "---\nsearch:\n  boost: 3\n---\n"  # a search for a setting finds its definition first


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    made = {page: (ROOT / name).read_text() for name, page in _PAGES.items()}
    made["configuration.md"] = _FIRST_FOUND + as_markdown()
    runs = read(EVIDENCE)
    tables = (with_caption(definition, runs) for definition in definitions(TABLES.read_text()).values())
    made["tables.md"] = "\n".join(["# All tables of losses\n", _TABLES, *tables])
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links as GitHub shows them into links of the site; what the site has not becomes its name.

    Raises PluginError where a table is not that of docs/evidence.csv.
    """
    try:
        check(markdown, read(EVIDENCE), definitions(TABLES.read_text()))
    except TableError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from None
    if page.file.src_uri == "watching.md":
        before, after = markdown.split(_NUMBERS)
        markdown = f"{before}{_table_of_numbers()}{after}"
    sources = {made: ROOT / name for name, made in _PAGES.items()}
    here = sources.get(page.file.src_uri, ROOT / "docs" / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        if not path or "://" in target:
            return match[0]
        within = (here / path).resolve().relative_to(ROOT)
        name = _PAGES.get(str(within))
        if name is None and within.parts[0] == "docs":
            name = str(within.relative_to("docs"))
        if name is None:
            if not (ROOT / within).exists():
                raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which does not exist")
            return f"`{within}`" if text in (target, str(within)) else f"{text} (`{within}`)"
        return f"[{text}]({name}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, without_comments(markdown))


def _table_of_numbers() -> str:
    return "| name | in the log | meaning |\n|---|---|---|\n" + "".join(map(_row, TABLE.values()))


def _row(number: Number) -> str:
    words = "" if number.reduction is None else number.reduction.words
    line = number.name.split("/")[1] if callable(number.line) else number.line
    said = line.split("{}")[0].lstrip(" (").rstrip(" :")
    meaning = "; ".join(filter(None, (number.meaning, words)))
    return f"| `{number.name}` | {f'`{said}`' * bool(said)} | {meaning} |\n"
