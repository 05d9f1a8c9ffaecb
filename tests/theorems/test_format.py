"""The format of codes once more, in numpy, whose operations are those of IEEE 754: the same bits."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_noloco.outer.host_codec import HostCodec, codec_for
from megatron_noloco.outer.payload import (
    BLOCK,
    CELLS,
    Codec,
    _checksum_weights,
    blocks_in,
    signs_of,
)
from megatron_noloco.plans.payloads import BITS, CODES
from tests.kit.fleet import all_blocks

Floats = NDArray[np.float32]
F = np.float32
KINDS = ("near", "equal", "zero", "denormal", "huge", "apart", "not finite")
LENGTHS = (1, 511, 512, 513, 5 * 512 + 77)


def test_weights_of_checksums_are_odd() -> None:
    """An even one could hide a single difference that does not fit."""
    assert bool((_checksum_weights() & 1).all())


@pytest.fixture(params=["torch", "C"])
def codecs(request: pytest.FixtureRequest) -> Callable[[int], Codec]:
    if request.param == "torch":
        return Codec
    if not isinstance(codec_for(8), HostCodec):
        pytest.skip("no C compiler")
    return codec_for


def drawn(kind: str, elements: int, seed: int) -> tuple[Floats, Floats]:
    """Vectors of two members."""
    random = np.random.default_rng(seed)
    one = random.standard_normal(elements).astype(F)
    two = (one + F(1e-3) * random.standard_normal(elements).astype(F)).astype(F)
    if kind == "equal":
        two = one.copy()
    elif kind == "zero":
        one, two = np.zeros_like(one), -np.zeros_like(two)
    elif kind in ("denormal", "huge"):
        scale = F(1e-40) if kind == "denormal" else F(1e38)
        with np.errstate(over="ignore", under="ignore"):
            one, two = one * scale, two * scale
    elif kind == "apart":
        two[::97] += F(3)
    elif kind == "not finite":
        two[:: max(1, elements // 3)] = random.choice([np.nan, np.inf])
    return one, two


def in_blocks(vector: Floats) -> Floats:
    rows = np.zeros((blocks_in(len(vector)), BLOCK), F)
    rows.reshape(-1)[: len(vector)] = vector
    return rows


def sketch(vector: Floats, signs: Floats) -> Floats:
    rows = (in_blocks(vector) * signs).reshape(-1, BLOCK // CELLS, CELLS)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def bf16(values: Floats) -> Floats:
    words = values.view(np.uint32)
    even = (words >> np.uint32(16)) & np.uint32(1)
    return ((words + even + np.uint32(0x7FFF)) & np.uint32(0xFFFF0000)).view(F)


def steps_of(one: Floats, two: Floats, bits: int) -> Floats:
    def energy(sketches: Floats) -> Floats:
        square = sketches * sketches
        return (square[:, 0] + square[:, 2]) + (square[:, 1] + square[:, 3])

    def smooth(energies: Floats) -> Floats:
        padded, total = np.pad(energies, 2), np.zeros_like(energies)
        for shift in range(5):
            total += padded[shift : shift + len(energies)]
        return np.maximum(energies, np.minimum(total / F(5), F(8) * energies)) / F(BLOCK)

    difference, size = energy(one - two), energy(one) + energy(two)
    finite = np.isfinite(difference) & np.isfinite(size)
    difference, size = (smooth(np.where(finite, x, F(0))) for x in (difference, size))
    step = np.sqrt(difference) * F(CODES[bits].ranges[0] / (2 ** (bits - 1) - 1))
    step = np.maximum(np.maximum(step, np.sqrt(size / F(2)) * F(2.0**-22)), F(2.0**-100))
    return bf16(step * F(1 + 2**-8)) * finite.astype(F)


def whole_steps(vector: Floats, steps: Floats) -> NDArray[np.int32]:
    inverse = np.where(steps > 0, F(1) / steps, F(0)).astype(F)
    rounded = np.rint(in_blocks(vector) * inverse[:, None])
    return np.clip(np.nan_to_num(rounded), -(2.0**30), 2.0**30).astype(np.int32)


def packed(n: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Plane after plane: a byte has the parts of elements that lie a share of the block apart."""
    planes, done = [], 0
    for width in CODES[bits].planes:
        parts = (n >> done & (2**width - 1)).astype(np.uint8).reshape(len(n), 8 // width, -1)
        shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
        planes.append(np.bitwise_or.reduce(parts << shifts, axis=1))
        done += width
    return np.concatenate(planes, axis=1)


def checksum(n: NDArray[np.int32], elements: int) -> NDArray[np.int32]:
    with np.errstate(over="ignore"):
        sums = (n * _checksum_weights().numpy()).sum(axis=1, dtype=np.int32)
    sums[-1] += elements % BLOCK
    return sums


@pytest.mark.parametrize("elements", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
def test_codes_and_means_have_the_bits_of_ieee_754(
    bits: int, kind: str, elements: int, codecs: Callable[[int], Codec]
) -> None:
    codec, number = codecs(bits), 3
    with np.errstate(all="ignore"):
        vectors = drawn(kind, elements, bits + elements)
        signs = signs_of(number).numpy()
        expected_sketches = [sketch(vector, signs) for vector in vectors]
        expected_steps = steps_of(*expected_sketches, bits)
        n, theirs = (whole_steps(vector, expected_steps) for vector in vectors)
    sketches = [torch.empty(blocks_in(elements), CELLS) for _ in vectors]
    for vector, out in zip(vectors, sketches, strict=True):
        codec.sketch(torch.from_numpy(vector), signs_of(number), out)
    for found, wanted in zip(sketches, expected_sketches, strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted)
    steps = torch.empty(len(expected_steps))
    codec.find_steps(sketches, steps)
    np.testing.assert_array_equal(steps.numpy().view(np.uint32), expected_steps.view(np.uint32))

    coded = expected_steps > 0  # the blocks that are sent as codes
    codes = torch.empty(len(steps), BLOCK * bits // 8, dtype=torch.uint8)
    checksums = torch.empty(len(steps), dtype=torch.int32)
    codec.encode(all_blocks(torch.from_numpy(vectors[1]), steps), 0, (codes, checksums))
    np.testing.assert_array_equal(codes.numpy()[coded], packed(theirs, bits)[coded])
    np.testing.assert_array_equal(checksums.numpy()[coded], checksum(theirs, elements)[coded])

    own = all_blocks(torch.from_numpy(vectors[0]), steps)
    m, fits, unequal = codec.differences(own, torch.from_numpy(n), ([codes], checksums))
    right = fits.numpy() & coded
    assert not bool(unequal) or not coded.all()
    np.testing.assert_array_equal(m.numpy()[right], (theirs - n)[right])
    limit = 2 ** (bits - 1)
    np.testing.assert_array_equal(right, (np.abs(theirs - n) < limit).all(axis=1) & coded)
    moved = torch.empty(elements)
    found = codec.average(own, ([codes], checksums), moved)
    np.testing.assert_array_equal(found.right.numpy(), right)
    scale = (expected_steps * fits.numpy() / F(2))[:, None]
    expected = (m.numpy().astype(F) * scale).reshape(-1)[:elements] + vectors[0]
    np.testing.assert_array_equal(moved.numpy(), expected)


def test_steps_of_a_million_blocks_have_the_bits_of_ieee_754(codecs: Callable[[int], Codec]) -> None:
    """A root whose last bit is another library's changes some of a million by a unit of bf16."""
    random = np.random.default_rng(0)
    one = random.standard_normal((1 << 20, CELLS)).astype(F)
    two = (one + F(0.01) * random.standard_normal(one.shape).astype(F)).astype(F)
    for bits in BITS:
        codec, steps = codecs(bits), torch.empty(len(one))
        codec.find_steps([torch.from_numpy(x) for x in (one, two)], steps)
        np.testing.assert_array_equal(steps.numpy(), steps_of(one, two, bits))
