"""`make matrix`: which environments it makes, and what it shows; without making one."""

import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.unit.test_requirements import INSTALLED, PROJECT
from tools.gpu_check.runner import REPOSITORY, Outcome, Results, Step
from tools.matrix.__main__ import environment, interpreter, names_of, table, try_out
from tools.matrix.combinations import COMBINATIONS, STEPS, Combination


def test_every_supported_python_has_a_combination() -> None:
    supported = SpecifierSet(PROJECT["requires-python"])
    pythons = {f"3.{minor}" for minor in range(30) if supported.contains(f"3.{minor}.0")}
    assert {one.python for one in COMBINATIONS} == pythons


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    (oldest,) = (one for one in COMBINATIONS if one.name == "oldest")
    for line in oldest.constraints:
        name, _, version = line.partition("==")
        assert f">={version.removesuffix('.*')}" in map(str, INSTALLED[name])
    bounded = {name for name, versions in INSTALLED.items() if ">=" in str(versions)}
    assert {line.partition("==")[0] for line in oldest.constraints} == bounded


def test_an_interpreter_is_of_the_version_or_none() -> None:
    assert interpreter("{}.{}".format(*sys.version_info)) is not None
    assert interpreter("2.99") is None


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when what it was made from changes."""
    (tmp_path / "launch").mkdir()
    script = tmp_path / "launch" / "setup.sh"
    script.write_text(
        '#!/bin/sh\nmkdir -p "$VENV"\ncat "$PIP_CONSTRAINT" >>"$VENV/made"\necho "$PYTHON" >>"$VENV/made"\n'
    )
    script.chmod(0o755)
    (tmp_path / "requirements.txt").write_text((REPOSITORY / "requirements.txt").read_text())
    monkeypatch.setattr("tools.matrix.__main__.REPOSITORY", tmp_path)
    for constraint in ("torch==2.6.*", "torch==2.6.*", "torch==2.7.*"):
        combination = Combination("one", "3.11", (constraint,))
        python = environment(combination, "that-python", tmp_path / "cache")
        assert python == str(tmp_path / "cache/one/bin/python")
    made = (tmp_path / "cache/one/made").read_text().split()
    assert made == ["torch==2.6.*", "that-python", "torch==2.7.*", "that-python"]


def test_what_has_not_passed_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = f"open(r'{tmp_path}/ran', 'a').write(%r)"
    good = Step("good", "", ("-c", counts % "good "), 60)
    bad = Step("bad", "", ("-c", f"{counts % 'bad '}; raise SystemExit('it is wrong')"), 60)
    monkeypatch.setattr("tools.matrix.__main__.STEPS", (good, bad))
    for _ in range(2):
        results = Results(tmp_path / "results.json")
        try_out(COMBINATIONS[0], sys.executable, results)
    assert (tmp_path / "ran").read_text() == "good bad bad "
    assert [outcome.passed for outcome in results.found.values()] == [True, False]


def test_the_table_has_what_was_tried() -> None:
    combination = COMBINATIONS[1]
    versions, first, second, *_ = names_of(combination)
    found = {
        versions: Outcome(True, 0.1, "3.11.7, 2.13.0, 0.16.1, 0.19.8, 5.23.0"),
        first: Outcome(True, 60.0, "46 passed, 2617 deselected, 4 warnings in 63.51s (0:01:03)"),
        second: Outcome(False, 9.0, "", error="it is wrong"),
    }
    head, _, row = table(found).splitlines()
    assert head.startswith("|  | Python | torch | megatron-core | deepspeed | transformers | contracts |")
    waiting = ["**waiting**"] * (len(STEPS) - 3)
    cells = [
        combination.name,
        "3.11.7",
        "2.13.0",
        "0.16.1",
        "0.19.8",
        "5.23.0",
        "46 passed",
        "**failed**",
        *waiting,
    ]
    assert row == f"| {' | '.join(cells)} |"
