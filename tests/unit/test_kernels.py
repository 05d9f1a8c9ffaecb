"""Torch and the compiled kernels have the same bits; test_format.py has both against numpy."""

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_noloco.outer import OuterOptimizer, TorchWeights, finite_mean, payload, vectors
from megatron_noloco.outer.compiling import compiler
from megatron_noloco.outer.host_kernels import Compiled
from megatron_noloco.outer.payload import BLOCK, CELLS, Codec, Found, Received, blocks_in, signs_of, wide_type
from megatron_noloco.plans.payloads import BITS, keeps_rounding
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import PAPER, NolocoSettings
from tests.loopback import loopback_world

pytest.importorskip("numba")
KINDS = ("near", "apart", "equal", "zero", "denormal", "large", "huge", "not finite", "only NaN")
LENGTHS = (1, 511, 5 * 512 + 77, 400 * 512)
COMMAND = [sys.executable, "-c"]
COMPILE = "from megatron_noloco.outer.compiling import compiler as c; c.start(); print(c.wait())"


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    compiler.start()
    assert compiler.wait()
    assert Compiled.kernels is not None
    return Compiled.kernels


@pytest.fixture(autouse=True)
def threads() -> Any:
    """Several, so that a vector is divided among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def drawn(kind: str, members: int, elements: int, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(elements, generator=draw)
    vectors = [common + 1e-2 * torch.randn(elements, generator=draw) for _ in range(members)]
    if kind == "apart":
        vectors[0][:: max(1, elements // 7)] += 0.5
        vectors[-1][:: max(1, elements // 3)] += 1e4
    elif kind == "equal":
        vectors = [common.clone() for _ in vectors]
    elif kind == "zero":
        vectors = [torch.zeros(elements) * (-1) ** member for member in range(members)]
    elif kind in ("denormal", "large", "huge"):
        vectors = [vector * {"denormal": 1e-40, "large": 1e20, "huge": 1e38}[kind] for vector in vectors]
    elif kind == "not finite":
        vectors[0][elements // 2 :: 997] = torch.nan
        vectors[-1][elements // 3 :: 1999] = torch.inf
        vectors[-1][elements // 4 :: 1999] = -torch.inf
    elif kind == "only NaN":
        vectors = [torch.full((elements,), torch.nan) for _ in vectors]
    return vectors


def same(one: Tensor, two: Tensor) -> None:
    """Compare the bits; a NaN is a NaN."""
    assert (one.dtype, one.shape) == (two.dtype, two.shape)
    if one.dtype == torch.float32:
        number = ~(one.isnan() & two.isnan())
        one, two = one.view(torch.int32)[number], two.view(torch.int32)[number]
    assert torch.equal(one, two)


def same_found(one: Found, two: Found) -> None:
    assert torch.equal(one.right, two.right)
    assert bool(one.unequal) == bool(two.unequal)
    torch.testing.assert_close(
        one.variance.double(), two.variance.double(), rtol=1e-4, atol=0, equal_nan=True
    )


def steps_of(members: list[Tensor], bits: int, kernels: ModuleType) -> Tensor:
    blocks = blocks_in(len(members[0]))
    codec, signs, found = Codec(bits), signs_of(3), list[Tensor]()
    for vector in members:
        both = torch.empty(2, blocks, CELLS)
        Codec.sketch.__wrapped__(codec, vector, signs, both[0])  # type: ignore[attr-defined]
        kernels.sketch(codec, vector, signs, both[1])
        same(*both)
        found.append(both[0])
    steps = torch.empty(2, blocks)
    payload.find_steps.__wrapped__(found, bits, steps[0])  # type: ignore[attr-defined]
    kernels.find_steps(found, bits, steps[1])
    same(*steps)
    steps[0, 1::5] = 0.0
    return steps[0]


def sent(codec: Codec, vector: Tensor, steps: Tensor, digits: int, kernels: ModuleType) -> Received:
    codes, checksums = list[Tensor](), torch.empty(2, len(steps), dtype=torch.int32)
    for digit in range(digits):
        both = torch.empty(2, len(steps), codec.block_bytes, dtype=torch.uint8)
        encode: Any = Codec.encode
        encode.__wrapped__(codec, vector, steps, digit, (both[0], checksums[0]))
        kernels.encode(codec, vector, steps, digit, (both[1], checksums[1]))
        same(*both)
        same(*checksums)
        codes.append(both[0])
    return codes, checksums[0]


coded = pytest.mark.parametrize("bits", BITS)
kinds = pytest.mark.parametrize("kind", KINDS)
lengths = pytest.mark.parametrize("elements", LENGTHS)


@coded
@kinds
@lengths
@pytest.mark.parametrize("digits", [1, 2])
def test_codes_of_pairs(bits: int, kind: str, elements: int, digits: int, kernels: ModuleType) -> None:
    codec, (mine, theirs) = Codec(bits), drawn(kind, 2, elements, bits + elements)
    steps = steps_of([mine, theirs], bits, kernels)
    received = sent(codec, theirs, steps, digits, kernels)
    means, average = torch.empty(2, elements), Codec.average
    by_torch = average.__wrapped__(codec, mine, steps, received, means[0])  # type: ignore[attr-defined]
    by_kernels = kernels.average(codec, mine, steps, received, means[1])
    same(*means)
    same_found(by_torch, by_kernels)
    kernels.average(codec, mine, steps, received, mine)
    same(means[0], mine)


@coded
@kinds
@lengths
@pytest.mark.parametrize("members", [3, 4, 5])
def test_codes_of_groups(bits: int, kind: str, elements: int, members: int, kernels: ModuleType) -> None:
    codec, (mine, *others) = Codec(bits), drawn(kind, members, elements, bits + elements)
    steps = steps_of([mine, *others], bits, kernels)
    for digits in (1, 2):
        received = [sent(codec, theirs, steps, digits, kernels) for theirs in others]
        dtype = wide_type(bits * digits, members)
        by_torch, by_kernels = torch.empty(2, len(steps), BLOCK, dtype=dtype)
        sum_of: Any = Codec.sum_of
        found = sum_of.__wrapped__(codec, mine, steps, received, by_torch)
        same_found(found, kernels.sum_of(codec, mine, steps, received, by_kernels))
        same(by_torch, by_kernels)
        outs = [torch.empty(2, elements) for _ in range(2)]
        for (mean, rounding), average_sums in zip(
            outs,
            (Codec.average_sums.__wrapped__, kernels.average_sums),  # type: ignore[attr-defined]
            strict=True,
        ):
            kept = rounding if keeps_rounding(bits, members) else None
            if kept is None:
                rounding.zero_()
            average_sums(codec, mine, steps, by_torch, members, (mean, kept))
        same(*outs)


@kinds
@lengths
@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_means_in_fp32(kind: str, elements: int, members: int, kernels: ModuleType) -> None:
    group = drawn(kind, members, elements, elements)
    name = "mean_of_pair" if members == 2 else "mean_of_group"
    by_torch, by_kernels = torch.zeros(2, elements)
    deviation = getattr(finite_mean, name).__wrapped__(group, by_torch)
    assert deviation == pytest.approx(
        getattr(kernels, name)(group, by_kernels), rel=1e-4, abs=1e-35, nan_ok=True
    )
    same(by_torch, by_kernels)


@kinds
@lengths
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("nesterov", [False, True])
def test_vectors_of_a_round(
    kind: str, elements: int, alpha: float, nesterov: bool, kernels: ModuleType
) -> None:
    theta, phi, kept, mean = drawn(kind, 4, elements, elements)
    for beta, gamma in ((0.7, 0.7), (0.7, 0.9), (1.0, 1.0)):
        for rounding in (None, kept):
            c = torch.empty(2, elements)
            vectors.combine.__wrapped__(theta, phi, rounding, beta, gamma, c[0])  # type: ignore[attr-defined]
            kernels.combine(theta, phi, rounding, beta, gamma, c[1])
            same(*c)
        moved = [phi.clone() for _ in range(2)]
        deltas = [theta.clone() if alpha else None for _ in range(2)]
        step: Any = vectors.outer_step
        for place, delta, function in zip(moved, deltas, (step.__wrapped__, kernels.outer_step), strict=True):
            function(place, delta, mean, alpha, gamma, nesterov)
        same(*moved)
        if alpha:
            same(*deltas)  # type: ignore[arg-type]


def test_kernels_serve_vectors_in_host_memory(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(kernels, "find_steps", lambda *_: calls.append("kernel"))
    payload.find_steps([torch.zeros(1, CELLS)] * 2, 8, torch.empty(1))
    monkeypatch.setattr(kernels, "combine", lambda *_: calls.append("kernel"))
    elsewhere = torch.zeros(3, device="meta")
    vectors.combine(elsewhere, elsewhere, None, 0.5, 0.7, elsewhere)
    assert calls == ["kernel"]


# What happens around the compiling


def test_a_fork_while_kernels_compile_is_left_to_torch() -> None:
    """The child has a lock of the import that nobody opens."""
    program = (
        "import os, time\n"
        "from megatron_noloco.outer.compiling import compiler as c\n"
        "c.start()\n"
        "while 'megatron_noloco.outer.kernels' not in __import__('sys').modules: time.sleep(0.001)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    c.start()\n"
        "    raise SystemExit(int(c.wait()))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), c.wait())\n"
    )
    done = subprocess.run([*COMMAND, program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("0 True\n", 0), done.stderr


def test_a_process_that_ends_while_kernels_compile_ends_well(tmp_path: Path) -> None:
    program = "from megatron_noloco.outer.compiling import compiler as c; c.start()"
    environ = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([*COMMAND, program], capture_output=True, text=True, timeout=120, env=environ)
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_fork_after_compiling_uses_the_kernels(kernels: ModuleType) -> None:
    program = (
        f"{COMPILE}\n"
        "import os, torch\n"
        "from megatron_noloco.outer.vectors import outer_step\n"
        "torch.set_num_threads(2)\n"
        "phi, mean = torch.zeros(1 << 20), torch.ones(1 << 20)\n"
        "outer_step(phi, None, phi, 0.0, 1.0, False)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    outer_step(phi, None, mean, 0.0, 1.0, False)\n"
        "    os._exit(int(phi.numpy().sum()) != 1 << 20)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([*COMMAND, program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n0\n", done.stderr


def test_jit_off_leaves_all_to_torch() -> None:
    environ = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([*COMMAND, COMPILE], capture_output=True, text=True, timeout=120, env=environ)
    assert (done.stdout, done.stderr) == ("False\n", "")


# Whole runs


METHODS: list[dict[str, Any]] = [
    {"payload": payload, "group_size": members, "consensus_weight": 0.9, "outer_nesterov": members == 4}
    for payload in ("fp32", "int8", "int4", "int3")
    for members in (2, 4)
]


def digest(rounds: int, uses_kernels: bool) -> str:
    """Return a hash of all vectors after so many rounds of replicas, whose local steps are exact everywhere."""
    compiler.start()
    assert compiler.wait() == uses_kernels
    found = hashlib.sha256()
    for method in METHODS:
        settings = NolocoSettings(**{**PAPER, "local_steps": 1, **method})
        thetas = [torch.ones(70_001) for _ in range(method["group_size"])]
        outers = [
            OuterOptimizer(TorchWeights([theta]), transport, Place(transport.rank, len(thetas)), settings)
            for theta, transport in zip(thetas, loopback_world(len(thetas)), strict=True)
        ]
        random = np.random.default_rng(0)
        with ThreadPoolExecutor(len(outers)) as threads:
            for index in range(rounds):
                for theta in thetas:
                    theta.numpy()[:] += random.standard_normal(len(theta)).astype(np.float32) / np.float32(64)
                list(threads.map(lambda outer, index=index: outer.run_round(index), outers))
        for outer in outers:
            for vector in (outer.slow_weights, outer.momentum, outer.rounding):
                found.update(b"" if vector is None else vector.numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_runs_have_the_same_bits_everywhere(rounds: int) -> None:
    """With and without kernels, and whatever instructions torch uses."""
    found = set[str]()
    for capability in ("", "avx2", "default"):
        for off in (False, True):
            environ = {**os.environ, "NUMBA_DISABLE_JIT": str(int(off))}
            environ |= {"ATEN_CPU_CAPABILITY": capability} if capability else {}
            program = f"from tests.unit.test_kernels import digest; print(digest({rounds}, {not off}))"
            done = subprocess.run(
                [*COMMAND, program], capture_output=True, text=True, timeout=600, env=environ
            )
            assert done.returncode == 0, done.stderr
            found.add(done.stdout)
    assert len(found) == 1
