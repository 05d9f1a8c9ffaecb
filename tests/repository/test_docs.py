"""What the documentation says of the code is true of the code."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco import __version__
from megatron_noloco.config import RunConfig
from megatron_noloco.config.explain import as_markdown
from tests.kit.ranks import output_of

ROOT = Path(__file__).parents[2]
_SEVERAL_LITERALS = re.compile(r'"\s*\n\s*f?"')  # of Python, that are one string


def quoted_messages() -> list[str]:
    """What stands in backquotes in the first column of a table of docs/troubleshooting.md."""
    rows = (ROOT / "docs/troubleshooting.md").read_text().splitlines()
    return [
        text for row in rows if row.startswith("| `") for text in re.findall("`([^`]+)`", row.split(" | ")[0])
    ]


@pytest.fixture(scope="module")
def sources() -> str:
    files = [*(ROOT / "megatron_noloco").rglob("*.py"), *(ROOT / "launch").glob("*.sh")]
    return "\n".join(_SEVERAL_LITERALS.sub("", file.read_text()) for file in files)


@pytest.mark.parametrize("message", quoted_messages())
def test_a_message_is_one_that_the_code_writes(message: str, sources: str) -> None:
    assert message in sources


def test_the_tests_that_pages_name_are_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"`(test_\w+)`", page.read_text())}
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 10
    assert named <= set(re.findall(r"def (test_\w+)\(", sources))


def test_the_library_page_imports_what_is_there() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    imports = [line for block in blocks for line in block.splitlines() if line.startswith("from ")]
    assert len(imports) > 5
    for line in imports:
        exec(line, {})


def test_the_configurations_of_several_machines_are_valid() -> None:
    """The blocks of docs/several-machines.md in the place of those of configs: folder, one job."""
    page = (ROOT / "docs/several-machines.md").read_text()
    folder, parallel = (
        json.loads("{" + block + "}") for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    )
    small: dict[str, Any] = json.loads((ROOT / "configs/internet.json").read_text())
    assert RunConfig(**small).topology(1, slot=3).slot == 3
    assert RunConfig(**small | folder).federation.listen == "off"

    large: dict[str, Any] = json.loads((ROOT / "configs/llama_125m_recipe.json").read_text())
    both = RunConfig(**large | parallel).topology(32, slot=0)
    del parallel["parallel"]["replicas"]
    blocks = {name: small[name] for name in ("noloco", "federation")}
    one = RunConfig(**large | blocks | parallel).topology(8, slot=3)
    assert (both.replicas, one.replicas, one.separate_jobs) == (4, 1, True)
    assert both.replica_size == one.replica_size == 8


def test_the_first_config_can_be_checked_and_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/running.md").read_text()
    (block,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my-run.json").write_text(block)
    output_of("config", "--check", tmp_path / "my-run.json")
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^    megatron-noloco (plan my-run.json .*?) +#", page, re.MULTILINE)
    (row,) = re.findall(r"^this config .*", output_of(*command.split()), re.MULTILINE)
    assert f"rounds take {float(row.split()[-3]):.0f} % of the time" in page


def test_the_reference_has_every_field() -> None:
    page = as_markdown()
    config = json.loads((ROOT / "configs/quickstart.json").read_text())
    for block in ("noloco", "parallel", "model", "training"):
        for field, value in config[block].items():
            if not isinstance(value, dict):
                assert f"| `{field}` |" in page.split(f"## {block}\n")[1].split("\n## ")[0]


def defaults_in(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield block, field, default of tables "in the block `NAME` | default |" and lines "- `NAME.FIELD` (1):"."""
    for block, rows in re.findall(r"\| in the block `(\w+)` \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", page):
        for field, default in re.findall(r"^\| `(\w+)` \| ?(.*?) ?\|", rows, re.MULTILINE):
            yield block, field, default.strip("`")
    yield from re.findall(r"^- `(\w+)\.(\w+)` \((.+?)\):", page, re.MULTILINE)


def test_defaults_on_the_pages_are_those_of_the_code() -> None:
    reference, seen = as_markdown(), 0
    for page in (ROOT / "docs").glob("*.md"):
        for block, field, default in defaults_in(page.read_text()):
            fields = reference.split(f"## {block}\n")[1].split("\n## ")[0]
            (real,) = re.findall(rf"\| `{field}` \| .*?; default (.*?) \|", fields)
            assert json.loads(default) == json.loads(real), f"{page.name}: {field}"
            seen += 1
    assert seen >= 7


def test_one_version() -> None:
    """In the package, for citations, and the newest of the changelog, with the same day."""
    cited = dict(
        line.split(": ", 1) for line in (ROOT / "CITATION.cff").read_text().splitlines() if ": " in line
    )
    first, newest, *_ = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (first, newest) == ("[Unreleased]", f"[{__version__}] - {cited['date-released']}")
    assert cited["version"] == __version__
