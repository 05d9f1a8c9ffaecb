"""The tests of this folder fail for faults that no test on a CPU finds: each mutant has a single line changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness import REPOSITORY


class Mutant(NamedTuple):
    """A change of the package, and the tests that are to fail for it (a file of this folder, and pytest's -k)."""

    file: str
    before: str
    after: str
    tests: tuple[str, str]


ROUNDS = "test_outer.py", "are_those_of_a_cpu"
CROSSED = "test_outer.py", "cross_the_bus"
WAITS = "test_engine.py", "waits_for_the_norm and fp32"
MUTANTS = {
    "the side stream is not waited for": Mutant(
        "outer/vectors.py", "self._stream.synchronize()", "pass", ROUNDS
    ),
    "a vector is sent before it is formed": Mutant("outer/vectors.py", "wait_for(self.home)", "pass", ROUNDS),
    "codes are sent before they are computed": Mutant(
        "outer/coded_exchange.py", "wait_for(vector.device)\n        return", "pass\n        return", ROUNDS
    ),
    "verdicts are read before they are there": Mutant(
        "outer/coded_exchange.py", "wait_for(self.vector.device)", "pass", ROUNDS
    ),
    "a vector is coded in host memory": Mutant(
        "outer/optimizer.py", "self._vectors.home if coded else HOST", "HOST", CROSSED
    ),
    "weights are used before they are copied": Mutant(
        "outer/vectors.py", "copied.synchronize()", "pass", ROUNDS
    ),
    "the mean stays on the host": Mutant(
        "outer/vectors.py", "c = c.to(delta.device, non_blocking=True)", "pass", ROUNDS
    ),
    "zeros are made on the host": Mutant(
        "outer/vectors.py", "torch.zeros_like(phi)", "torch.zeros(len(phi))", ROUNDS
    ),
    "weights are written on a stream of their own": Mutant(
        "outer/round.py",
        "write(start, phi)",
        "with torch.cuda.stream(torch.cuda.Stream()):\n                            write(start, phi)",
        ROUNDS,
    ),
    "the host waits for each microbatch": Mutant(
        "pipeline/pipeline.py", "tensor.to(device, non_blocking=True)", "tensor.to(device)", WAITS
    ),
    "each loss is read": Mutant(
        "pipeline/pipeline.py",
        'self.record("train/loss", loss, MEAN)',
        'self.record("train/loss", float(loss), MEAN)',
        WAITS,
    ),
    "stages send before they receive": Mutant(
        "pipeline/communicator.py",
        "return dist.batch_isend_irecv(operations) if operations else []",
        "return [work for one in operations for work in dist.batch_isend_irecv([one])]",
        ("test_nccl_order.py", "all_ranks_end and chunks"),
    ),
    "no group is connected at the start": Mutant(
        "pipeline/groups.py",
        'connect(groups, torch.device("cuda"))',
        "pass",
        ("test_nccl_order.py", "connected_at_the_start and parallelism"),
    ),
}


@pytest.mark.slow
def test_an_unchanged_copy_passes(tmp_path: Path) -> None:
    mutant = next(iter(MUTANTS.values()))
    found = outcome_of(mutant._replace(after=mutant.before), tmp_path)
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_is_found(name: str, tmp_path: Path) -> None:
    found = outcome_of(MUTANTS[name], tmp_path)
    assert found.returncode == 1, found.stdout
    assert "1 failed" in found.stdout


def outcome_of(mutant: Mutant, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the mutant's tests in a folder with a copy of the package that has its line."""
    for part in ("megatron_noloco", "tests", "tools", "configs"):
        shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    changed = folder / "megatron_noloco" / mutant.file
    source = changed.read_text()
    assert source.count(mutant.before) == 1, "the mutant is to be written anew"
    changed.write_text(source.replace(mutant.before, mutant.after))
    file, names = mutant.tests
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-k", names]
    command += [f"tests/simulated_gpu/{file}"]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
