"""Runs each command that README, docs, `make help` and the `--help` of commands name, in a fresh clone.

    python -m tools.commands --output runs/commands
    python -m tools.commands --output runs/commands --venv .venv --only 'megatron-noloco .*'

tools/commands.txt says for each command what is run in its place, or why it is left out; a unit test compares the
two. Each command runs in a shell in a clone of HEAD, OUTPUT/clone, and leaves OUTPUT/NUMBER.log. Prints a table,
and writes it to OUTPUT/commands.json; what has passed there is not run again. Exit code 1: a command has failed.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_noloco.cli.main import help_pages
from tools.options import command_line
from tools.runner import Results, run_command

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "configs/README.md"]
TABLE = ROOT / "tools/commands.txt"
LIMIT_SECONDS = 1800
_DATA = ("json", "python", "mermaid", "yaml")  # blocks that hold no commands
_COMMAND = re.compile(
    r"((?:[A-Z_]+=\S* )*(?:nice )?(?:(?:until )?launch/\w+\.sh|megatron-noloco|make|[\w./]*python3?|mpirun"
    r"|torchrun|deepspeed|sbatch|srun|pip|hf|tensorboard|cp|scp|sysctl)(?: (?=\S).*|$))"
)


class Row(NamedTuple):
    """A paragraph of the table: patterns of commands, what is run in their place, and why it is not the same."""

    patterns: list[str]
    run: str | None  # "": the command itself
    reason: str


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "runs/commands")
    parser.add_argument("--venv", type=Path, help="an environment of `make setup`, which is then left out")
    parser.add_argument("--only", default=".*", metavar="REGEX", help="commands to run")
    options = parser.parse_args()
    clone, results = options.output.resolve() / "clone", Results(options.output / "commands.json")
    if not clone.exists():
        _prepare(clone, options.venv)
    commands = to_run(rows())[bool(options.venv) :]  # the first makes the environment
    planned = {
        command: number for number, command in enumerate(commands) if re.fullmatch(options.only, command)
    }
    for command, number in planned.items():
        log, found = options.output / f"{number:02}.log", results.found.get(command)
        if found is None or not found.passed:
            found = run_command(["sh", "-c", command], log, LIMIT_SECONDS, clone, _environ(clone))
            results.add(command, found)
        verdict = "passed" if found.passed else f"FAILED, see {log}:"
        print(f"{found.seconds:7} s  {verdict} {command}", flush=True)
    return int(any(not results.found[command].passed for command in planned))


def to_run(table: list[Row]) -> list[str]:
    """Return what is run, each once, in the order of the table."""
    named = sorted(set(named_commands()))
    commands = []
    for row in table:
        if row.run:
            commands.append(row.run)
        elif row.run is not None:
            commands += [command for command in named if row_of(command, table) is row]
    return list(dict.fromkeys(commands))


def rows() -> list[Row]:
    """Read the table."""
    table = []
    for paragraph in TABLE.read_text().split("\n\n")[1:]:
        lines = paragraph.strip().splitlines()
        runs = [line[1:].strip() for line in lines if line.startswith("=")]
        assert len(runs) <= 1, f"{TABLE.name}: two commands in one paragraph: {paragraph}"
        reason = next((line[2:] for line in lines if line.startswith("# ")), "")
        table.append(Row([line for line in lines if line[0] not in "=#"], runs[0] if runs else None, reason))
    return table


def row_of(command: str, table: list[Row]) -> Row | None:
    """Return the first row that has a pattern of a command."""
    return next((row for row in table if any(re.fullmatch(p, command) for p in row.patterns)), None)


def named_commands() -> Iterator[str]:
    """Yield the commands in blocks and spans of code of the pages, in `make help`, and in the help of commands."""
    for page in [*PAGES, *sorted((ROOT / "docs").glob("*.md"))]:
        yield from commands_of(page.read_text())
    yield from re.findall(r"^\t@echo '(make \S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command, text in help_pages():
        yield f"{command} --help"
        for line in text.splitlines():
            if line.startswith("  ") and (match := _COMMAND.fullmatch(re.split(r" {3,}", line.strip())[0])):
                yield match[1]


def commands_of(text: str) -> Iterator[str]:
    """Yield the commands in a page: lines of code blocks, and code spans that have more than a name."""
    language, lines = None, iter(text.splitlines())
    for line in lines:
        if line.startswith("```"):
            language = None if language is not None else line[3:]
        elif language not in _DATA and (language is not None or line.startswith("    ")):
            while line.endswith("\\"):
                line = f"{line[:-1].rstrip()} {next(lines).strip()}"
            if match := _COMMAND.fullmatch(re.split(r"\s{2,}#", line.strip())[0]):
                yield match[1]
        elif language is None:
            for span in re.findall(r"`([^`]+)`", line):
                if " " in span and (match := _COMMAND.fullmatch(span)):
                    yield match[1]


def _prepare(clone: Path, venv: Path | None) -> None:
    """Clone HEAD, and write the configs and the loop that the table names."""
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    (config,) = re.findall(r"```json\n(.*?)```", (clone / "docs/running.md").read_text(), re.DOTALL)
    (clone / "my-run.json").write_text(config)
    loop, *_ = re.findall(r"```python\n(.*?)```", (clone / "docs/library.md").read_text(), re.DOTALL)
    (clone / "my_loop.py").write_text(loop)
    (clone / ".git/info/exclude").write_text("my_loop.py\n")  # `make lint` leaves it out
    short = json.loads((clone / "configs/quickstart.json").read_text())
    short["training"]["train_iters"] = short["noloco"]["local_steps"] = 4
    short["scheduler"]["params"]["warmup_num_steps"] = 2
    short["evaluation"]["iters"] = 2
    (clone / "short.json").write_text(json.dumps(short))
    if venv is not None:
        (clone / ".venv").symlink_to(venv.resolve())
        os.utime(
            clone / "requirements.txt", (0, 0)
        )  # older than the environment: make does not set it up again


def _environ(clone: Path) -> dict[str, str]:
    """Return the environment of the clone."""
    return os.environ | {
        "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(clone),
        "VIRTUAL_ENV": f"{clone}/.venv",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
