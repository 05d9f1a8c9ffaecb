"""The tests of this folder fail for faults that no test on a CPU finds: each mutant has a single line changed."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness import REPOSITORY


class Mutant(NamedTuple):
    """A change of the package, and the tests that are to fail for it (a file of `tests`, and pytest's -k)."""

    file: str
    before: str
    after: str
    tests: tuple[str, str]


ROUNDS = "simulated_gpu/test_outer.py", "are_those_of_a_cpu"
PAIRS = "simulated_gpu/test_outer.py", "are_those_of_a_cpu and pairs"
GROUPS = "simulated_gpu/test_outer.py", "are_those_of_a_cpu and group and not int4"
CROSSED = "simulated_gpu/test_outer.py", "cross_the_bus"
WAITS = "simulated_gpu/test_engine.py", "waits_for_the_norm and fp32"
CLOCK = "unit/test_stream_clock.py", "block"
MUTANTS = {
    "memory is released before the copies from it": Mutant(
        "outer/vectors.py",
        "torch.cuda.synchronize()",
        "pass",
        ("simulated_gpu/test_outer.py", "memory_is_released"),
    ),
    "an outer step waits for local steps": Mutant(
        "outer/vectors.py",
        "nullcontext() if self._stream is None else torch.cuda.stream(self._stream)",
        "nullcontext()",
        ("simulated_gpu/test_outer.py", "waits_for_no_local_step"),
    ),
    "a mean is overwritten before it is used": Mutant("outer/vectors.py", "self.side.wait()", "pass", GROUPS),
    "a correction is overwritten before it is merged": Mutant(
        "outer/vectors.py", "wait_for(self.weights.device)", "pass", PAIRS
    ),
    "no copy of weights is marked": Mutant(
        "outer/vectors.py", "torch.cuda.current_stream().record_event() if crosses", "None if crosses", PAIRS
    ),
    "slow weights are overwritten before they are written": Mutant(
        "outer/weights.py", "wait_for(self.device)", "pass", PAIRS
    ),
    "nothing that is queued is waited for": Mutant(
        "outer/weights.py", "torch.cuda.current_stream(device).synchronize()", "pass", PAIRS
    ),
    "a round ends before its outer step": Mutant(
        "outer/round.py",
        "self._vectors.side.wait()\n        self.complete",
        "pass\n        self.complete",
        PAIRS,
    ),
    "a delayed round ends before its outer step": Mutant(
        "outer/round.py",
        "self._vectors.side.wait()\n            self.complete",
        "pass\n            self.complete",
        ROUNDS,
    ),
    "sketches are sent before they are computed": Mutant(
        "outer/bucket_code.py",
        "wait_for(bucket.device)\n\n",
        "pass\n\n",
        ("simulated_gpu/test_outer.py", "are_those_of_a_cpu and int4"),
    ),
    "FSDP2 gathers weights before they are merged": Mutant(
        "attach/torch_module.py",
        "written = torch.cuda.current_stream().record_event()\n"
        "                for part in fully_sharded(module):\n"
        "                    part.set_post_optim_event(written)",
        "pass",
        ("simulated_gpu/test_attach.py", "events"),
    ),
    "ZeRO 3 gathers weights before they are written": Mutant(
        "engine/zero.py",
        "torch.cuda.current_stream().synchronize()",
        "pass",
        ("simulated_gpu/test_attach.py", "stays"),
    ),
    "a checkpoint is written before it is copied": Mutant(
        "checkpoint/checkpointer.py",
        "torch.cuda.current_stream().synchronize()",
        "pass",
        ("simulated_gpu/test_training.py", "routes"),
    ),
    "rounds wait while the GPU computes": Mutant(
        "engine/replica.py",
        "queued = torch.cuda.current_stream().record_event()\n"
        "        while self.pipeline.between_microbatches() and not queued.query():",
        "while self.pipeline.between_microbatches() and False:",
        ("simulated_gpu/test_engine.py", "rounds_progress"),
    ),
    "blocks count before they end": Mutant(
        "pipeline/stream_clock.py", "self._open and self._open[0][1].query()", "self._open", CLOCK
    ),
    "a stream is inside of what it has left": Mutant(
        "pipeline/stream_clock.py",
        "if not end.query():\n                return what if begin.query()",
        "if True:\n                return what if True",
        CLOCK,
    ),
    "the side stream is not waited for": Mutant(
        "outer/vectors.py", "self._stream.synchronize()", "pass", ROUNDS
    ),
    "a vector is sent before it is formed": Mutant("outer/vectors.py", "wait_for(self.home)", "pass", ROUNDS),
    "codes are sent before they are computed": Mutant(
        "outer/bucket_code.py",
        "wait_for(self.vector.device)\n        return mine",
        "pass\n        return mine",
        ROUNDS,
    ),
    "verdicts are read before they are there": Mutant(
        "outer/bucket_code.py", "wait_for(self.vector.device)\n        if", "pass\n        if", ROUNDS
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
        'self.record("train/loss", loss)',
        'self.record("train/loss", float(loss))',
        WAITS,
    ),
    "stages send before they receive": Mutant(
        "pipeline/communicator.py",
        "return dist.batch_isend_irecv(operations) if operations else []",
        "return [work for one in operations for work in dist.batch_isend_irecv([one])]",
        ("simulated_gpu/test_nccl_order.py", "all_ranks_end and chunks"),
    ),
    "no group is connected at the start": Mutant(
        "pipeline/groups.py",
        'connect(groups, torch.device("cuda"))',
        "pass",
        ("simulated_gpu/test_nccl_order.py", "connected_at_the_start and parallelism"),
    ),
}


_METHODS = {"synchronize", "record_event", "record_stream", "wait_event", "wait_stream", "query"}
_METHODS |= {"set_post_optim_event"}
_FUNCTIONS = {"torch.cuda.stream", "wait_for", "self.side.wait", "self._vectors.side.wait"}


def waits_in(source: str) -> set[int]:
    """The lines at which the source waits for a device, or marks or orders its streams."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = [(call.lineno, ast.unparse(call)) for call in calls]
    return {line for line, name in names if name in _FUNCTIONS or name.rpartition(".")[2] in _METHODS}


def test_each_wait_has_a_mutant() -> None:
    package, without = REPOSITORY / "megatron_noloco", []
    for path in package.rglob("*.py"):
        file, source = path.relative_to(package).as_posix(), path.read_text()
        mutated = set[int]()
        for mutant in MUTANTS.values():
            if mutant.file == file:
                first = source[: source.index(mutant.before)].count("\n") + 1
                mutated |= set(range(first, first + mutant.before.count("\n") + 1))
        without += [f"{file}:{line}" for line in sorted(waits_in(source) - mutated)]
    assert not without


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
    command += [f"tests/{file}"]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
