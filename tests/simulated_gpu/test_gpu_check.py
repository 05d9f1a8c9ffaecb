"""Steps of `make gpu-check`, small, beside a simulated GPU: a lent GPU's minutes are not for faults of a script.

Left out are those about the device itself (about, facts, kernels), pipeline, which needs four GPUs, and exchange,
whose ranks are threads; test_outer has its rounds.
"""

import json
import os
from pathlib import Path

import pytest

from tests.kit.ranks import REPOSITORY, run_python

pytestmark = pytest.mark.slow

SITE = Path(__file__).with_name("site")
SMALL = "--size tiny --replicas 2 --local-steps 4 --steps 12"
STEPS = {
    "quickstart": "tools.gpu_check.replicas quickstart --replicas 2 --steps 24",
    "memory": "tools.gpu_check.replicas memory --size tiny --replicas 1 --steps 2",
    "attached": "tools.gpu_check.attached",
    "overlap": f"tools.gpu_check.replicas overlap {SMALL}",
    "rounds": f"tools.gpu_check.replicas rounds {SMALL}",
    "throughput": "tools.bench throughput --size tiny --warm-ups 1 --repeats 1 --peers core",
    "coding": "tools.gpu_check.coding --elements 65536 --repeats 1",
}
TESTS = ("resume", "engine", "export")


def run(words: str) -> str:
    paths = os.pathsep.join([str(SITE), str(REPOSITORY)])
    finished = run_python("-m", *words.split(), timeout=900, env={"PYTHONPATH": paths})
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.parametrize("name", STEPS)
def test_a_step_passes(name: str) -> None:
    out = run(STEPS[name])
    assert json.loads(out[out.index("{") :])["figure"]


@pytest.mark.parametrize("name", TESTS)
def test_a_file_of_tests_passes(name: str) -> None:
    out = run(f"pytest -m gpu -p no:cacheprovider -p no:xdist tests/gpu/test_{name}.py")
    assert " passed" in out
    assert "skipped" not in out
