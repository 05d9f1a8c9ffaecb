"""Try the supported versions of the engines together: `make matrix`, or

    python -m tools.matrix [--only NAME ...] [--output runs/matrix] [--cache FOLDER]

Makes an environment for each combination of `combinations.py` whose Python is on this machine, in a folder that
the next call uses again (several GB each where torch comes with CUDA), and runs the contracts, a short quickstart,
a change of layout, and the tests with transformers in it. table.md and results.json in the output folder have the
outcomes; the same command goes on with the steps that have not passed. Exit code 1: a step failed.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.matrix.combinations import COMBINATIONS, PACKAGES, STEPS, Combination
from tools.options import command_line
from tools.runner import REPOSITORY, Outcome, Results, run

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "megatron-noloco" / "matrix"


def main() -> int:
    parser = command_line(__doc__, "python -m tools.matrix")
    names = [one.name for one in COMBINATIONS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--output", type=Path, default=Path("runs/matrix"), help="folder of the results")
    parser.add_argument("--cache", type=Path, default=_CACHE, help="folder of the environments")
    options = parser.parse_args()

    results = Results(options.output / "results.json")
    chosen = [one for one in COMBINATIONS if one.name in options.only]
    failed = False
    for combination in chosen:
        python = interpreter(combination.python)
        if python is None:
            print(f"{combination.name}: there is no Python {combination.python} on this machine", flush=True)
            continue
        try:
            python = environment(combination, python, options.cache)
        except subprocess.CalledProcessError:
            print(f"{combination.name}: FAILED: the environment could not be made", flush=True)
            failed = True
            continue
        try_out(combination, python, results)
        (options.output / "table.md").write_text(table(results.found))
    print(table(results.found), end="")
    return int(failed or any(not outcome.passed for outcome in results.found.values()))


def interpreter(version: str) -> str | None:
    """Return an interpreter of this version, "3.12": on PATH, of pyenv, or this one; None where there is none."""
    candidates = [shutil.which(f"python{version}"), sys.executable]
    candidates += sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")))
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    for python in filter(None, candidates):
        said = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if said.stdout.strip() == version:
            return python
    return None


def environment(combination: Combination, python: str, cache: Path) -> str:
    """Return the interpreter of the combination's environment, which `launch/setup.sh` makes or completes."""
    cache.mkdir(parents=True, exist_ok=True)
    venv, constraints = cache / combination.name, cache / f"{combination.name}.txt"
    wanted = "\n".join(combination.constraints) + "\n"
    made_from = venv / "made-from.txt"
    complete = wanted + (REPOSITORY / "requirements.txt").read_text()
    if not made_from.exists() or made_from.read_text() != complete:
        constraints.write_text(wanted)
        own = {"PYTHON": python, "VENV": str(venv), "PIP_CONSTRAINT": str(constraints)}
        subprocess.run(["launch/setup.sh"], cwd=REPOSITORY, env=os.environ | own, check=True)
        made_from.write_text(complete)
    return str(venv / "bin" / "python")


def try_out(combination: Combination, python: str, results: Results) -> None:
    """Run the steps that have not passed yet."""
    for step, name in zip(STEPS, names_of(combination), strict=True):
        if name not in results.found or not results.found[name].passed:
            outcome = run(step, results.folder / f"{name}.log", python)
            results.add(name, outcome)
            verdict = "passed" if outcome.passed else "FAILED"
            print(f"{name}: {verdict} in {outcome.seconds:.0f} s  {outcome.figure}", flush=True)


def names_of(combination: Combination) -> list[str]:
    """Return the names of its steps in the results."""
    return [f"{combination.name}.{step.name}" for step in STEPS]


def table(found: Mapping[str, Outcome]) -> str:
    """Return a Markdown table with a row for each combination that was tried."""
    head = ["", "Python", *PACKAGES, *(step.name for step in STEPS[1:])]
    rows = [head, ["---"] * len(head)]
    for combination in COMBINATIONS:
        versions, *outcomes = (found.get(name, _WAITING) for name in names_of(combination))
        if versions.passed:
            cells = [shown(one) for one in outcomes]
            rows.append([combination.name, *versions.figure.split(", "), *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def shown(outcome: Outcome) -> str:
    """Return the figure of an outcome, without what pytest says of warnings, time and tests that were left out."""
    figure = re.sub(r", \d+ (deselected|warnings?)| in [\d.]+s.*", "", outcome.figure)
    return figure if outcome.passed else f"**{figure or 'failed'}**"


_WAITING = Outcome(False, 0.0, "waiting")

if __name__ == "__main__":
    sys.exit(main())
