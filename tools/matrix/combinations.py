"""Which versions are tried together, and what is tried in each environment: `make matrix`."""

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from tools.runner import REPOSITORY, Step


@dataclass(frozen=True)
class Combination:
    """An environment: all that requirements.txt names, in the newest versions but for `constraints`."""

    name: str
    python: str
    constraints: tuple[str, ...] = ()


def oldest(requirements: Path = REPOSITORY / "requirements.txt") -> tuple[str, ...]:
    """Return constraints for the oldest versions that the requirements allow."""
    lines = (re.split(r"\s*#", line)[0] for line in requirements.read_text().splitlines())
    found = (Requirement(line) for line in lines if line)
    lowest = ((one.name, bound.version) for one in found for bound in one.specifier if bound.operator == ">=")
    return tuple(f"{name}=={version}.*" for name, version in lowest)


PACKAGES = ("torch", "megatron-core", "deepspeed", "transformers")
COMBINATIONS = (
    Combination("oldest", "3.11", oldest()),
    Combination("3.11", "3.11"),
    Combination("3.13", "3.13"),
)

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m")
_QUICK = (*_PYTEST, "not slow and not contract")
_LAUNCHED = ("tests/faults/test_failures.py", "tests/runs/test_launched_runs.py")
_VERSIONS = f"""
import platform
from importlib.metadata import version
print(", ".join([platform.python_version(), *map(version, {PACKAGES})]))
"""
STEPS = (
    Step("versions", "of Python and PACKAGES", ("-c", _VERSIONS), 60),
    Step(
        "contracts",
        "what the code relies on in the engines",
        (*_PYTEST, "contract", "tests/references/test_contracts.py", "tests/repository/test_requirements.py"),
        1200,
    ),
    Step("quickstart", "20 steps of the quickstart", ("-m", "tools.matrix.quickstart"), 900),
    Step("layouts", "a run continues on other ranks", (*_QUICK, "tests/layouts/test_other_layout.py"), 900),
    Step(
        "hugging-face",
        "export, import, the Trainer",
        (*_QUICK, "tests/references/test_publish.py", "tests/references/test_hf_trainer.py"),
        1200,
    ),
    Step(
        "torchrun",
        "launch/torchrun.sh: a failure, a kill, SIGTERM",
        (*_PYTEST, "", "-k", "torchrun", *_LAUNCHED),
        600,
    ),
)
