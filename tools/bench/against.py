"""How much slower or faster this tree is than another commit: ratios of both, measured in turn on this machine.

    make bench AGAINST=v0.2.0
    python -m tools.bench against v0.2.0 --only exchange throughput

The commit is checked out in a temporary folder. Each repeat runs a benchmark once in either tree, with the same
Python and packages, and the trees take turns in going first. A ratio is this tree's seconds over those of the
commit: its median over the repeats, the smallest and the largest. A benchmark that one of the trees cannot run has
the end of its error output instead. Each benchmark's ratios are a line of JSON, printed when they are there. Only
an idle machine gives ratios near 1 for equal trees.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_PAIR = ("mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2")


class Measure(NamedTuple):
    """A benchmark, and where the object that it prints has the seconds to compare."""

    launcher: tuple[str, ...]
    options: tuple[str, ...]
    seconds: dict[str, tuple[str, ...]]


MEASURES = {
    "exchange": Measure(
        _PAIR,
        ("--megabytes", "32"),
        {"messages": ("median_seconds", "transport"), "exchange": ("median_seconds", "exchange")},
    ),
    "overlap": Measure(
        _PAIR,
        ("--megabytes", "16"),
        {"waiting": ("fastest_seconds", "none", "all"), "overlapping": ("fastest_seconds", "delayed", "all")},
    ),
    "federation": Measure(
        (),
        ("--megabytes", "32", "--payloads", "int8"),
        {"large": ("int8", "seconds"), "small": ("int8", "seconds_of_small_rounds")},
    ),
    "throughput": Measure((), ("--peers", "core"), {"step": ("ours", "tokens_per_second")}),
    "routing": Measure((), (), {"routed": ("median_seconds", "microbatch")}),
    "checkpoint": Measure((), (), {"save": ("median_seconds", "sync")}),
}


class FailedError(Exception):
    """A benchmark that did not end well; the message is the end of what it wrote."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("commit", help="what git can check out")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each benchmark in either tree")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="NAME")


def run(options: argparse.Namespace) -> None:
    """Measure."""
    failed = False
    with _checked_out(options.commit) as before:
        for name in options.only:
            found = _compared(name, before, options.repeats)
            report = {"against": options.commit, "repeats": options.repeats, name: found}
            print(json.dumps(report), flush=True)
            failed |= isinstance(found, str)
    raise SystemExit(failed)


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    with TemporaryDirectory() as parent:
        folder = Path(parent, "before")
        git = ("git", "-C", str(ROOT), "worktree")
        added = subprocess.run(
            (*git, "add", "--quiet", "--detach", folder, commit), stderr=subprocess.PIPE, text=True
        )
        if added.returncode:
            raise SystemExit(f"{commit}: {added.stderr.strip()}")
        try:
            yield folder
        finally:
            subprocess.run((*git, "remove", "--force", folder), check=True)


def _compared(case: str, before: Path, repeats: int) -> dict[str, dict[str, float]] | str:
    ratios: dict[str, list[float]] = {name: [] for name in MEASURES[case].seconds}
    try:
        for repeat in range(repeats):
            trees = (ROOT, before) if repeat % 2 else (before, ROOT)
            found = {tree: _measured(case, tree) for tree in trees}
            for name, taken in ratios.items():
                taken.append(found[ROOT][name] / found[before][name])
    except FailedError as error:
        return str(error)
    return {
        name: {
            "median": round(statistics.median(taken), 3),
            "smallest": round(min(taken), 3),
            "largest": round(max(taken), 3),
        }
        for name, taken in ratios.items()
    }


def _measured(case: str, tree: Path) -> dict[str, float]:
    """Run a benchmark in a tree; returns its seconds by name, of a speed those of a unit."""
    measure = MEASURES[case]
    is_file = (tree / f"tools/bench_{case}.py").exists()  # older trees have a command for each
    module = (f"tools.bench_{case}",) if is_file else ("tools.bench", case)
    command = (*measure.launcher, sys.executable, "-m", *module, *measure.options)
    environ = os.environ | {
        "PYTHONPATH": str(tree),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    ended = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
    if ended.returncode:
        raise FailedError(f"{case} in {tree}: {ended.stderr.strip()[-500:]}")
    printed = json.loads(ended.stdout[ended.stdout.index("{") :])
    return {name: _at(printed, path) for name, path in measure.seconds.items()}


def _at(printed: Any, path: tuple[str, ...]) -> float:
    for key in path:
        printed = printed[key]
    return 1 / printed if path[-1].endswith("per_second") else float(printed)
