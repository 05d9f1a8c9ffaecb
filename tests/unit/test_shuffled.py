"""Training samples of indexed datasets: sequences shuffled, laid end to end, every token a label once."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_noloco.data import samples as samples_module
from megatron_noloco.data.samples import ShuffledDataset, TokenDataset
from megatron_noloco.plans.draws import Stream
from megatron_noloco.plans.shuffle import Shuffle
from tests.harness import REPOSITORY

SEQ = 8


def dataset(lengths: list[int], seed: int = 7, before: int = 0) -> ShuffledDataset:
    """Sequences whose tokens are all different; `before`: where in its file the first one begins."""
    offsets = before + np.cumsum([0, *lengths])
    return ShuffledDataset(np.arange(sum(lengths)), offsets, SEQ, "the data", seed)


def samples(made: TokenDataset) -> list[list[int]]:
    """All tokens of each, the last label included."""
    return [[*made[index].tokens.tolist(), int(made[index].labels[-1])] for index in range(len(made))]


def laid_end_to_end(lengths: list[int], seed: int) -> np.ndarray:
    """All tokens, sequence after sequence of the shuffled order."""
    pieces = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    order = Shuffle(len(lengths), seed, Stream.DOCUMENTS).at(np.arange(len(lengths)))
    return np.concatenate([pieces[index] for index in order])


any_lengths = st.lists(st.integers(0, 60), max_size=40).map(lambda lengths: [*lengths, SEQ + 1])


@settings(max_examples=60)
@given(lengths=any_lengths, seed=st.integers(0, 5), block=st.integers(1, 9), before=st.integers(0, 99))
def test_samples_are_those_of_the_shuffled_sequences(
    lengths: list[int], seed: int, block: int, before: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples_module, "_BLOCK", block)
        patch.setattr(samples_module, "_AT_ONCE", 2)
        found = samples(dataset(lengths, seed, before))
    assert found == samples(TokenDataset(laid_end_to_end(lengths, seed), SEQ))


@settings(max_examples=30)
@given(lengths=any_lengths, seed=st.integers(0, 5))
def test_every_token_is_a_label_once(lengths: list[int], seed: int) -> None:
    """But the first one, and the rest that is shorter than a sample; inputs precede their labels in a sequence."""
    made = dataset(lengths, seed)
    labels = Counter(token for sample in samples(made) for token in sample[1:])
    assert set(labels.values()) == {1}
    assert sum(labels.values()) == len(made) * SEQ == (sum(lengths) - 1) // SEQ * SEQ
    begins = {0, *np.cumsum(lengths).tolist()}
    for sample in samples(made):
        assert all(label == token + 1 or label in begins for token, label in pairwise(sample))


def test_seeds_differ_and_neighbours_part() -> None:
    lengths = [SEQ] * 200
    ours, others = samples(dataset(lengths, seed=1)), samples(dataset(lengths, seed=2))
    assert ours != others
    together = sum(
        sample[-1] == sample[-2] + 1 for sample in ours
    )  # a sequence and the one after it in the file
    assert together < 10


def test_outside_is_an_index_error() -> None:
    made = dataset([40])
    for index in (-1, len(made)):
        with pytest.raises(IndexError, match="outside the data"):
            made[index]


def test_reading_imports_no_engine() -> None:
    """Importing megatron.core takes seconds, on every rank and in every process that encodes."""
    code = (
        "import sys, megatron_noloco.data.preprocess, megatron_noloco.data.datasets;"
        "sys.exit(bool({'torch', 'megatron', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60).returncode == 0
