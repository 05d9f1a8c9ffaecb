"""The tests of this folder fail for faults that no test on a CPU finds: each mutant has a single line changed."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.ranks import REPOSITORY


class Mutant(NamedTuple):
    """A change of the package, and the tests that are to fail for it (a file of `tests`, and pytest's -k)."""

    file: str
    tests: tuple[str, str]
    before: str
    after: str = "pass"


OUTER, ENGINE, ATTACH, ORDER = (
    f"simulated_gpu/test_{name}.py" for name in ("outer", "engine", "attach", "nccl_order")
)
ROUNDS = OUTER, "are_those_of_a_cpu"
PAIRS = OUTER, "are_those_of_a_cpu and pairs"
GROUPS = OUTER, "are_those_of_a_cpu and group and not int4"
CROSSED = OUTER, "cross_the_bus"
WAITS = ENGINE, "waits_for_the_norm and fp32"
CLOCK = "parts/test_stream_clock.py", "block"
MUTANTS = {
    "memory is released before the copies from it": Mutant(
        "outer/vectors.py", (OUTER, "memory_is_released"), "torch.cuda.synchronize()"
    ),
    "an outer step waits for local steps": Mutant(
        "outer/vectors.py",
        (OUTER, "waits_for_no_local_step"),
        "nullcontext() if self._stream is None else torch.cuda.stream(self._stream)",
        "nullcontext()",
    ),
    "a mean is overwritten before it is used": Mutant("outer/vectors.py", GROUPS, "self.side.wait()"),
    "slow weights or a correction are overwritten before they are written": Mutant(
        "outer/vectors.py", PAIRS, "wait_for(self.weights.device)"
    ),
    "no copy of weights is marked": Mutant(
        "outer/vectors.py", PAIRS, "torch.cuda.current_stream().record_event()", "torch.cuda.Event()"
    ),
    "nothing that is queued is waited for": Mutant(
        "outer/weights.py", PAIRS, "torch.cuda.current_stream(device).synchronize()"
    ),
    "a round ends before its outer step": Mutant("outer/round.py", ROUNDS, "self._vectors.side.wait()"),
    "sketches are sent before they are computed": Mutant(
        "outer/bucket_code.py",
        (OUTER, "are_those_of_a_cpu and int4"),
        "wait_for(bucket.device)\n\n",
        "pass\n\n",
    ),
    "FSDP2 gathers weights before they are merged": Mutant(
        "attach/torch_module.py",
        (ATTACH, "events"),
        "written = torch.cuda.current_stream().record_event()\n"
        "                for part in fully_sharded(module):\n"
        "                    part.set_post_optim_event(written)",
    ),
    "ZeRO 3 gathers weights before they are written": Mutant(
        "engine/zero.py", (ATTACH, "stays"), "torch.cuda.current_stream().synchronize()"
    ),
    "a checkpoint is written before it is copied": Mutant(
        "checkpoint/checkpointer.py",
        ("simulated_gpu/test_training.py", "routes"),
        "torch.cuda.current_stream().synchronize()",
    ),
    "rounds wait while the GPU computes": Mutant(
        "engine/replica.py",
        (ENGINE, "rounds_progress"),
        "queued = torch.cuda.current_stream().record_event()\n"
        "        while self.pipeline.between_microbatches() and not queued.query():",
        "while self.pipeline.between_microbatches() and False:",
    ),
    "blocks count before they end": Mutant(
        "pipeline/stream_clock.py", CLOCK, "self._open and self._open[0][1].query()", "self._open"
    ),
    "a stream is inside of what it has left": Mutant(
        "pipeline/stream_clock.py",
        CLOCK,
        "if not end.query():\n                return what if begin.query()",
        "if True:\n                return what if True",
    ),
    "the side stream is not waited for": Mutant("outer/vectors.py", ROUNDS, "self._stream.synchronize()"),
    "a vector is sent before it is formed": Mutant("outer/vectors.py", ROUNDS, "wait_for(self.home)"),
    "codes are sent before they are computed": Mutant(
        "outer/bucket_code.py",
        ROUNDS,
        "wait_for(self._bucket.device)\n        return codes",
        "pass\n        return codes",
    ),
    "verdicts are read before they are there": Mutant(
        "outer/bucket_code.py", ROUNDS, "wait_for(self._bucket.device)\n        if", "pass\n        if"
    ),
    "a vector is coded in host memory": Mutant(
        "outer/optimizer.py", CROSSED, "self._vectors.home if coded else HOST", "HOST"
    ),
    "weights are used before they are copied": Mutant(
        "outer/vectors.py", ROUNDS, "copied.popleft().synchronize()", "copied.popleft()"
    ),
    "the mean stays on the host": Mutant("outer/vectors.py", ROUNDS, ".to(self.home, non_blocking=True)", ""),
    "zeros are made on the host": Mutant(
        "outer/host_kernels.py", ROUNDS, "torch.zeros_like(phi)", "torch.zeros(len(phi))"
    ),
    "weights are written on a stream of their own": Mutant(
        "outer/vectors.py",
        ROUNDS,
        "theta.copy_(phi[at], non_blocking=True)",
        "with torch.cuda.stream(torch.cuda.Stream()):\n"
        "                        theta.copy_(phi[at], non_blocking=True)",
    ),
    "the host waits for each microbatch": Mutant(
        "pipeline/pipeline.py", WAITS, "tensor.to(device, non_blocking=True)", "tensor.to(device)"
    ),
    "each loss is read": Mutant(
        "pipeline/pipeline.py",
        WAITS,
        'self.record("train/loss", loss)',
        'self.record("train/loss", float(loss))',
    ),
    "stages send before they receive": Mutant(
        "pipeline/communicator.py",
        (ORDER, "all_ranks_end and chunks"),
        "return dist.batch_isend_irecv(operations) if operations else []",
        "return [work for one in operations for work in dist.batch_isend_irecv([one])]",
    ),
    "no group is connected at the start": Mutant(
        "pipeline/groups.py",
        (ORDER, "connected_at_the_start and parallelism"),
        'connect(groups, torch.device("cuda"))',
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
