"""Random draws that are the same on every rank and machine: words, permutations, shuffles without a table.

Only numpy pieces whose streams numpy promises never to change are used (SeedSequence and the Philox bit
generator); `Generator.permutation` carries no such promise, so replicas that run different numpy versions
could otherwise disagree about their partners.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

_FEISTEL_ROUNDS = 4


class Stream(IntEnum):
    """Names the purpose of a draw. Draws for different purposes are independent, also with equal counters."""

    GROUPING = 1
    ROUTING = 2
    SAMPLES = 3
    WEIGHTS = 4
    DROPOUT = 5
    DOCUMENTS = 6
    SKETCH = 7
    CHECKSUM = 8
    CHOICES = 9


def draw_words(count: int, seed: int, stream: Stream, *counters: int) -> np.ndarray:
    """Return `count` independent uniform 64-bit words, shape [count], from (seed, stream, counters)."""
    bits = np.random.Philox(np.random.SeedSequence([seed, int(stream), *counters]))
    return bits.random_raw(count)


def draw_permutation(count: int, seed: int, stream: Stream, *counters: int) -> np.ndarray:
    """Return a uniform permutation of 0..count-1, shape [count], from (seed, stream, counters)."""
    return np.argsort(draw_words(count, seed, stream, *counters), kind="stable")


@dataclass(frozen=True)
class Shuffle:
    """Computes place by place a permutation of 0..size-1 that (seed, stream, counters) determine.

    A balanced Feistel network of four rounds permutes the 4**h numbers of 2h bits, 4**h >= size. A result outside
    0..size-1 goes through the network again until it is inside: cycle walking, which turns a permutation of the
    larger set into one of the smaller (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
    At most four passes are expected, since 4**h <= 4 * size. The round function is the finaliser of SplitMix64
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) of half XOR round key.
    The network need not withstand an attacker, only look random.
    """

    size: int
    seed: int
    stream: Stream
    counters: tuple[int, ...] = ()

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at `places` (0..size-1) of the shuffled order, int64, shape [places]."""
        values = places.astype(np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            values[outside] = self._pass_through_network(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _pass_through_network(self, values: np.ndarray) -> np.ndarray:
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
        left, right = values >> shift, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << shift) | right

    @cached_property
    def _keys(self) -> np.ndarray:
        return draw_words(_FEISTEL_ROUNDS, self.seed, self.stream, *self.counters)


def _mix(words: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words, one to one: the finaliser of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
