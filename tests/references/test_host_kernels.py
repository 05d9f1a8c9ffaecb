"""What C computes for vectors in host memory has the bits of torch (test_format.py has both against numpy)."""

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_noloco.outer import OuterOptimizer, TorchWeights, host_kernels
from megatron_noloco.outer.host_codec import HostCodec, codec_for
from megatron_noloco.outer.payload import (
    BLOCK,
    CELLS,
    Codec,
    Found,
    Received,
    blocks_in,
    signs_of,
    wide_type,
)
from megatron_noloco.plans.payloads import BITS, keeps_rounding
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import PAPER, NolocoSettings
from tests.kit.fleet import all_blocks
from tests.kit.loopback import loopback_world
from tests.kit.ranks import run_python, run_ranks

KINDS = ("near", "apart", "equal", "zero", "denormal", "large", "huge", "not finite", "only NaN")
LENGTHS = (511, 5 * BLOCK + 77, 400 * BLOCK)

coded = pytest.mark.parametrize("bits", BITS)
kinds = pytest.mark.parametrize("kind", KINDS)
lengths = pytest.mark.parametrize("elements", LENGTHS)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Several, so that a vector is divided among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def both_codecs(bits: int) -> tuple[Codec, Codec]:
    in_c = codec_for(bits)
    if not isinstance(in_c, HostCodec):
        pytest.skip("no C compiler")
    return Codec(bits), in_c


def drawn(kind: str, members: int, elements: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(elements)
    common = torch.randn(elements, generator=draw)
    vectors = [common + 1e-2 * torch.randn(elements, generator=draw) for _ in range(members)]
    if kind == "apart":
        vectors[0][:: max(1, elements // 7)] += 0.5
        vectors[-1][:: max(1, elements // 3)] += 1e4
    elif kind == "equal":
        vectors = [common.clone() for _ in vectors]
    elif kind == "zero":
        vectors = [torch.zeros(elements) * (-1) ** (member + 1) for member in range(members)]
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
    expected = pytest.approx(float(two.variance), rel=1e-4, abs=0, nan_ok=True)
    assert float(one.variance) == expected


def steps_of(members: list[Tensor], bits: int) -> Tensor:
    signs, found = signs_of(3), list[Tensor]()
    for vector in members:
        both = torch.empty(2, blocks_in(len(vector)), CELLS)
        for codec, sketches in zip(both_codecs(bits), both, strict=True):
            codec.sketch(vector, signs, sketches)
        same(*both)
        found.append(both[0])
    steps, in_c = torch.empty(2, len(found[0]))
    for codec, out in zip(both_codecs(bits), (steps, in_c), strict=True):
        codec.find_steps(found, out)
    same(steps, in_c)
    steps[1::5] = 0.0
    return steps


def sent(vector: Tensor, steps: Tensor, bits: int, digits: int) -> Received:
    codes, checksums = list[Tensor](), torch.empty(2, len(steps), dtype=torch.int32)
    for digit in range(digits):
        both = torch.empty(2, len(steps), BLOCK * bits // 8, dtype=torch.uint8)
        for codec, *out in zip(both_codecs(bits), both, checksums, strict=True):
            codec.encode(all_blocks(vector, steps), digit, (out[0], out[1]))
        same(*both)
        same(*checksums)
        codes.append(both[0])
    return codes, checksums[0]


@coded
@kinds
@lengths
@pytest.mark.parametrize("digits", [1, 2])
def test_codes_of_pairs(bits: int, kind: str, elements: int, digits: int) -> None:
    by_torch, in_c = both_codecs(bits)
    mine, theirs = drawn(kind, 2, elements)
    steps = steps_of([mine, theirs], bits)
    received = sent(theirs, steps, bits, digits)
    blocks, means = all_blocks(mine, steps), torch.empty(2, elements)
    found = by_torch.average(blocks, received, means[0])
    same_found(in_c.average(blocks, received, means[1]), found)
    same(*means)
    not_right = ~found.right.repeat_interleave(BLOCK)[:elements]
    same(means[0][not_right], mine[not_right])
    in_c.average(blocks, received, mine)  # in place
    same(means[0], mine)


@coded
@kinds
@lengths
@pytest.mark.parametrize("members", [3, 4])
def test_codes_of_groups(bits: int, kind: str, elements: int, members: int) -> None:
    codecs, (mine, *others) = both_codecs(bits), drawn(kind, members, elements)
    steps = steps_of([mine, *others], bits)
    for digits in (1, 2):
        received = [sent(theirs, steps, bits, digits) for theirs in others]
        sums, blocks = (
            torch.empty(2, len(steps), BLOCK, dtype=wide_type(bits * digits, members)),
            all_blocks(mine, steps),
        )
        found = [codec.sum_of(blocks, received, out) for codec, out in zip(codecs, sums, strict=True)]
        same_found(*found)
        same(*sums)
        means, roundings = torch.zeros(2, elements), torch.zeros(2, elements)
        for codec, mean, rounding in zip(codecs, means, roundings, strict=True):
            kept = rounding if keeps_rounding(bits, members) else None
            codec.average_sums(blocks, found[0].right, sums[0], members, (mean, kept))
        same(*means)
        same(*roundings)


def test_differences_of_two_digits_may_be_large() -> None:
    """The squares of a block of differences of 20,000 steps add up to more than 32 bits hold."""
    mine, steps = torch.zeros(BLOCK), torch.ones(1)
    received = sent(mine + 20_000, steps, 8, 2)
    for codec in both_codecs(8):
        found = codec.average(all_blocks(mine, steps), received, torch.empty(BLOCK))
        assert found.right.item()
        assert found.variance.item() == BLOCK * 20_000**2 / 2


def test_sums_that_do_not_fit_are_found() -> None:
    """Of 16 members one is 11 steps above the mean in the second block, and 11 below it in the third."""
    numbers = torch.zeros(16, 3, BLOCK)
    numbers[1:15, 1, 9], numbers[15, 1, 9] = -5, 7
    numbers[:, 2] = -numbers[:, 1]
    steps = torch.ones(3)
    others = [sent(member.flatten(), steps, 4, 1) for member in numbers[1:]]
    for codec in both_codecs(4):
        sums = torch.empty(3, BLOCK, dtype=wide_type(4, 16))
        found = codec.sum_of(all_blocks(numbers[0].flatten(), steps), others, sums)
        assert found.right.tolist() == [True, False, False]


@coded
def test_vectors_of_other_lengths_are_seen(bits: int) -> None:
    for codec in both_codecs(bits):
        steps, found = torch.ones(3), list[bool]()
        for length in (3 * BLOCK, 3 * BLOCK - 1):
            codes = torch.empty(3, BLOCK * bits // 8, dtype=torch.uint8), torch.empty(3, dtype=torch.int32)
            codec.encode(all_blocks(torch.zeros(length), steps), 0, codes)
            own, out = all_blocks(torch.zeros(3 * BLOCK), steps), torch.empty(3 * BLOCK)
            found.append(bool(codec.average(own, ([codes[0]], codes[1]), out).unequal))
        assert found == [False, True]


def by_torch_and_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield 0 while torch computes, and 1 while C does."""
    both_codecs(8)
    with monkeypatch.context() as patch:
        patch.setattr(host_kernels, "functions", lambda device: None)
        yield 0
    yield 1


@kinds
@lengths
@pytest.mark.parametrize(("beta", "gamma"), [(0.7, 0.7), (0.7, 0.9)])
@pytest.mark.parametrize("keeps", [False, True])
def test_combining(
    kind: str, elements: int, beta: float, gamma: float, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta, phi, kept = drawn(kind, 3, elements)
    c = theta.repeat(2, 1)
    for which in by_torch_and_c(monkeypatch):
        host_kernels.combine(c[which], phi, kept if keeps else None, beta, gamma, c[which])
    same(*c)


@kinds
@lengths
@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps(
    kind: str, elements: int, alpha: float | None, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    phi, delta, mean, snapshot = (one.repeat(2, 1) for one in drawn(kind, 4, elements))
    theta = torch.zeros(2, elements)
    for which in by_torch_and_c(monkeypatch):
        momentum, method = None if alpha is None else delta[which], (alpha or 0.0, 0.9, nesterov)
        host_kernels.outer_step(phi[which], momentum, mean[which], method, snapshot[which], theta[which])
        assert torch.equal(theta[which].view(torch.int32), phi[which].view(torch.int32))
        host_kernels.outer_step(phi[which], momentum, mean[which], method)
    for both in (phi, delta, snapshot):
        same(*both)


@kinds
@lengths
def test_means_of_pairs(kind: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = drawn(kind, 2, elements)
    means, distances = one.repeat(2, 1), list[float]()
    for which in by_torch_and_c(monkeypatch):
        distances.append(host_kernels.squared_distance(one, two))
        host_kernels.halve(means[which], two, means[which])
    same(*means)
    assert distances[1] == pytest.approx(distances[0], rel=1e-5, abs=1e-35, nan_ok=True)


@kinds
@lengths
@pytest.mark.parametrize("members", [3, 4])
def test_means_of_groups(kind: str, elements: int, members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, means, squares = drawn(kind, members, elements), torch.empty(2, elements), list[float]()
    for which in by_torch_and_c(monkeypatch):
        squares.append(host_kernels.mean_of_group(vectors, means[which]))
    same(*means)
    assert squares[1] == pytest.approx(squares[0], rel=1e-5, abs=1e-35, nan_ok=True)


# Whole runs

METHODS: list[dict[str, Any]] = [
    {"payload": payload, "group_size": members, "consensus_weight": 0.9, "outer_nesterov": members == 4}
    for payload in ("fp32", "int8", "int4", "int3")
    for members in (2, 4)
]


def digest(rounds: int) -> str:
    """Return a hash of all vectors after so many rounds of replicas, whose local steps are exact everywhere."""
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


def in_a_fork(function: Callable[[], Any], **environ: str) -> tuple[Any, str]:
    """Return a function's result in a process whose library is still to be loaded, and what is said on stderr."""

    def another(rank: int, world_size: int) -> tuple[Any, str]:
        os.environ |= environ
        logging.getLogger().handlers.clear()  # those of pytest
        host_kernels._library.cache_clear()
        with redirect_stderr(io.StringIO()) as said:
            return function(), said.getvalue()

    return run_ranks(1, another)[0]


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_runs_have_the_same_bits_everywhere(rounds: int) -> None:
    """With and without a compiler, and whatever instructions torch uses."""
    both_codecs(8)
    found = {digest(rounds), in_a_fork(partial(digest, rounds), CC="false")[0]}
    program = f"from tests.references.test_host_kernels import digest; print(digest({rounds}))"
    for instructions in ("avx2", "default"):  # which torch asks for when it is imported
        environ = {"ATEN_CPU_CAPABILITY": instructions, "CC": "false"}
        done = run_python("-c", program, timeout=600, env=environ)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    assert len(found) == 1


# Where it is built


def made(folder: Path, **environ: str) -> tuple[str, str]:
    """Return what another process says of the codec that it gets, with this cache folder."""
    return in_a_fork(lambda: type(codec_for(8)).__name__, XDG_CACHE_HOME=str(folder), **environ)


def test_it_is_built_once(tmp_path: Path) -> None:
    both_codecs(8)
    assert made(tmp_path) == ("HostCodec", "")
    (library,) = (tmp_path / "megatron_noloco" / "code").iterdir()
    before = library.stat().st_mtime_ns
    assert made(tmp_path) == ("HostCodec", "")
    assert [library] == list(library.parent.iterdir())
    assert library.stat().st_mtime_ns == before
    library.write_bytes(b"cut")
    assert made(tmp_path) == ("HostCodec", "")
    assert len(library.read_bytes()) > 1000


def test_a_cache_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    both_codecs(8)
    (tmp_path / "file").write_text("")
    assert made(tmp_path / "file") == ("HostCodec", "")


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_codes(tmp_path: Path, compiler: str) -> None:
    name, said = made(tmp_path, CC=compiler)
    assert name == "Codec"
    assert said.count("\n") == 1
    assert "torch computes rounds" in said
    assert compiler in said
    assert not list(tmp_path.iterdir())


def test_a_forked_process_has_threads_of_its_own() -> None:
    program = (
        "import os, torch\n"
        "from megatron_noloco.outer.host_codec import codec_for\n"
        "from megatron_noloco.outer.payload import signs_of\n"
        "torch.set_num_threads(2)\n"
        "vector, signs, out = torch.ones(512 * 512), signs_of(0), torch.zeros(512, 4)\n"
        "twice, expected = 2 * vector, 2 * float(signs[::4].sum())\n"
        "codec_for(8).sketch(vector, signs, out)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    codec_for(8).sketch(twice, signs, out)\n"
        "    os._exit(int(out[0, 0].item() != expected))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = run_python("-c", program)
    assert (done.stdout, done.stderr) == ("0\n", "")
