"""A shuffle without a table: where each of n things goes is computed, one thing at a time."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_noloco.plans.draws import Stream, draw_words

_FEISTEL_ROUNDS = 4


@dataclass(frozen=True)
class Shuffle:
    """A permutation of 0..size-1, determined by (seed, stream, counters).

    A balanced Feistel network of four rounds permutes the 4**h numbers of 2h bits, 4**h >= size. A result outside
    0..size-1 goes through the network again until it is inside: cycle walking, which turns a permutation of the
    larger set into one of the smaller (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
    At most four passes are expected, since 4**h <= 4 * size. The round function is the finaliser of SplitMix64
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) of half XOR round key.
    It need not withstand an attacker, only look random.
    """

    size: int
    seed: int
    stream: Stream
    counters: tuple[int, ...] = ()

    def at(self, places: np.ndarray) -> np.ndarray:
        """What stands at each of `places` (0..size-1) of the shuffled order, int64, of the same shape [places]."""
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
    """A bijective scrambler of 64-bit words: the finaliser of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
