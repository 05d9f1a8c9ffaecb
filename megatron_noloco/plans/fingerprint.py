"""Fingerprints of vectors of which each rank has a part: they tell whether two jobs have equal weights.

Every element is hashed together with its place in the canonical vector, and the hashes are added modulo 2^64. So
the sum does not depend on how the vector is divided among ranks. Another value of a single element always changes
it. Two vectors that differ in more have equal sums with a chance of about 2^-64. Nothing protects against intent.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_noloco.plans.canonical import Block, matrices

MODULUS = 2**64
_AT_ONCE = 1 << 14  # elements: longer arrays come from fresh pages, which takes three times as long
# Odd numbers without further meaning; the last is that of a mixer by Pelle Evensen ("rrmxmx").
_PLACE, _VALUE, _MIX = map(np.uint64, (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xD6E8FEB86659FD93))
_HALF = np.uint64(32)


def digest_of(text: str, total: int = 0) -> str:
    """Return a digest of a text and the sum of fingerprints, modulo 2^64."""
    return hashlib.sha256(f"{text} {total % MODULUS}".encode()).hexdigest()


def digest_of_shapes(shapes: Mapping[str, Sequence[int]]) -> str:
    """Return a digest of the names and shapes of a canonical vector."""
    return digest_of(repr([(name, [*shapes[name]]) for name in matrices(shapes)]))


def fingerprint(bits: np.ndarray, block: Block) -> int:
    """Return the sum of the hashes of a block's elements.

    Args:
        bits: of the elements, as unsigned integers, shape [block.size].
    """
    ends = ((start, min(start + _AT_ONCE, block.size)) for start in range(0, block.size, _AT_ONCE))
    parts = (part for start, stop in ends for part in block._replace(own=0).part(start, stop))
    return sum(_sum(bits[part.own : part.own + part.size], part) for part in parts) % MODULUS


def _sum(bits: np.ndarray, block: Block) -> int:
    rows = np.arange(block.rows, dtype=np.uint64)[:, None] * np.uint64(block.matrix.columns)
    places = rows + np.arange(block.first, block.first + block.width, dtype=np.uint64)
    mixed: Any = places.reshape(-1)
    mixed *= _PLACE
    mixed ^= bits * _VALUE
    mixed ^= mixed >> _HALF
    mixed *= _MIX
    mixed ^= mixed >> _HALF
    return int(mixed.sum(dtype=np.uint64))
