"""The one command line: quick to import, and one place where errors become lines and exit codes."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from megatron_noloco.cli import config, errors, main
from megatron_noloco.cli.errors import StoppedError
from tests.harness import REPOSITORY


def command_that_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def raise_it(_: object) -> int:
        raise error

    monkeypatch.setattr(config, "_config", raise_it)
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "megatron" else name)
    return main.main(["config", "--explain"])


def test_a_ctrl_c_leaves_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_that_raises(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (ValueError("heads: 3 is odd"), 2, "heads: 3 is odd"),
        (FileNotFoundError(2, "No such file", "run.json"), 2, "[Errno 2] No such file: 'run.json'"),
        (StoppedError("replica 3 did not answer"), 1, "replica 3 did not answer"),
        (
            ModuleNotFoundError("No module named 'megatron.core'", name="megatron.core"),
            2,
            "megatron_noloco: this command needs packages that are not installed (megatron); "
            "pip install 'megatron-noloco[trainer]'",
        ),
    ],
)
def test_what_is_known_is_one_line(
    error: Exception,
    exit_code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_that_raises(error, monkeypatch) == exit_code
    assert capsys.readouterr() == ("", f"{line}\n")


@pytest.mark.parametrize("make", [lambda: KeyError("x"), lambda: ModuleNotFoundError("no", name="mine")])
def test_everything_else_is_a_traceback(
    make: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_that_raises(make(), monkeypatch) == 1
    assert capsys.readouterr().err.startswith("Traceback")


def test_importing_it_is_quick_and_needs_no_extra() -> None:
    code = (
        "import sys, megatron_noloco.cli.main\n"
        "heavy = {'torch', 'pydantic', 'rich', 'deepspeed', 'megatron', 'transformers', 'numpy'}\n"
        "sys.exit(bool(heavy & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "command",
    [["train", "--config", "configs/quickstart.json"], ["config", "--explain"], ["data", "preprocess"]],
    ids=lambda command: command[0],
)
def test_without_the_trainers_packages(command: list[str]) -> None:
    arguments = [*command, "--input", "x", "--output-prefix", "y"] if command[0] == "data" else command
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(['deepspeed', 'megatron', 'pydantic', 'rich'])\n"  # None: not installed
        f"from megatron_noloco.cli.main import run; run({arguments!r})"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, timeout=60, capture_output=True, text=True
    )
    assert finished.returncode == 2
    assert finished.stderr.endswith("; pip install 'megatron-noloco[trainer]'\n")
    assert finished.stderr.count("\n") == 1
