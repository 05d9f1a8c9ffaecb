"""Random draws that every rank, on every machine, makes alike.

Only numpy pieces whose streams numpy promises never to change are used (SeedSequence and the Philox bit
generator); `Generator.permutation` carries no such promise, so replicas that run different numpy versions
could otherwise disagree about their partners.
"""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """The purpose of a draw: draws for different purposes are independent even where their counters agree."""

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
    """`count` independent uniform 64-bit words, shape [count], determined by (seed, stream, counters)."""
    bits = np.random.Philox(np.random.SeedSequence([seed, int(stream), *counters]))
    return bits.random_raw(count)


def draw_permutation(count: int, seed: int, stream: Stream, *counters: int) -> np.ndarray:
    """A uniform permutation of 0..count-1, shape [count], determined by (seed, stream, counters)."""
    return np.argsort(draw_words(count, seed, stream, *counters), kind="stable")
