"""Samples: cut in order or from shuffled sequences, every token a label once, documents told apart."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_noloco.data import indexed
from megatron_noloco.data import samples as samples_module
from megatron_noloco.data.microbatches import ValidationSource, gather
from megatron_noloco.data.opening import open_data
from megatron_noloco.data.samples import IGNORED, Samples, ShuffledSamples
from megatron_noloco.data.sources import IndexedSource, Needs, parse_prefixes
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.model.layers import document_mask
from megatron_noloco.plans.draws import Shuffle, Stream
from tests.kit.datasets import sequences_of, write_dataset

SEQ = 8
NEEDS = Needs(vocab_size=10_000, seq_length=SEQ)
END = 9
TOKENS = np.array([1, 2, END, 3, END, END, 4, 5, 6])  # documents of 3, 2, 1 and more than 2 tokens
BOTH = replace(NEEDS, end_of_document=END, reset_attention_mask=True, eod_mask_loss=True)


@pytest.mark.parametrize(("tokens", "count"), [(9, 1), (16, 1), (17, 2), (100, 12)])
def test_samples_share_one_token(tokens: int, count: int) -> None:
    made = Samples(sequences_of(np.arange(tokens, dtype=np.uint16)), NEEDS)
    assert len(made) == count
    for index in range(count):
        sample = made[index]
        assert sample.tokens.dtype == sample.labels.dtype == np.int64
        assert sample.tokens.tolist() == list(range(index * 8, index * 8 + 8))
        assert sample.labels.tolist() == list(range(index * 8 + 1, index * 8 + 9))
        assert sample.documents is None
    for outside in (-1, count):
        with pytest.raises(AssertionError):
            made[outside]


def test_less_than_a_sample() -> None:
    line = r"corpus too small: .* 8 tokens, one sample needs .* 9; .* lower seq_length"
    with pytest.raises(ValueError, match=line):
        Samples(sequences_of(np.arange(8, dtype=np.uint16)), NEEDS)


@pytest.mark.parametrize("token", [-1, 10_000])
def test_token_outside_vocabulary_is_found_at_read(token: int) -> None:
    tokens = np.arange(100)
    tokens[50] = token
    datasets = [
        Samples(sequences_of(tokens), NEEDS),
        ShuffledSamples(sequences_of(tokens, np.array([0, 100])), NEEDS),
    ]
    for made in datasets:
        assert made[5].tokens[0] == 40
        with pytest.raises(UserError, match=f"^sample 6 of the data holds token {token}, the"):
            gather(made, np.array([0, 6]))


def dataset(lengths: list[int], seed: int = 7, before: int = 0) -> ShuffledSamples:
    """Sequences whose tokens are all different; `before`: where in its file the first one begins."""
    offsets = before + np.cumsum([0, *lengths])
    return ShuffledSamples(sequences_of(np.arange(sum(lengths)), offsets), replace(NEEDS, seed=seed))


def samples(made: Samples) -> list[list[int]]:
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
        patch.setattr(samples_module, "_BATCH_BLOCKS", 2)
        found = samples(dataset(lengths, seed, before))
    assert found == samples(Samples(sequences_of(laid_end_to_end(lengths, seed)), NEEDS))


def test_seeds_differ_and_neighbours_part() -> None:
    lengths = [SEQ] * 200
    ours, others = samples(dataset(lengths, seed=1)), samples(dataset(lengths, seed=2))
    assert ours != others
    together = sum(
        sample[-1] == sample[-2] + 1 for sample in ours
    )  # a sequence and the one after it in the file
    assert together < 10


# Documents in one sample


def test_token_after_end_has_no_loss() -> None:
    tokens, labels, documents = Samples(sequences_of(TOKENS), BOTH)[0]
    assert tokens.tolist() == TOKENS[:8].tolist()
    assert labels.tolist() == [2, END, IGNORED, END, IGNORED, IGNORED, 5, 6]
    assert documents is not None
    assert documents.tolist() == [0, 0, 0, 1, 1, 2, 3, 3]


def test_each_is_done_without_the_other() -> None:
    masked, apart = replace(BOTH, reset_attention_mask=False), replace(BOTH, eod_mask_loss=False)
    _, labels, documents = Samples(sequences_of(TOKENS), masked)[0]
    assert IGNORED in labels
    assert documents is None
    _, labels, documents = Samples(sequences_of(TOKENS), apart)[0]
    assert IGNORED not in labels
    assert documents is not None


def test_in_shuffled_sequences_and_in_microbatches() -> None:
    dataset = ShuffledSamples(sequences_of(TOKENS, np.array([0, 3, 5, 6, 9])), replace(BOTH, seq_length=4))
    microbatch = ValidationSource(dataset, 2, count=1).microbatch(0)
    assert microbatch.documents is not None
    ends = (microbatch.tokens == END) | (microbatch.tokens == 6)  # which ends the last sequence without END
    assert torch.equal(microbatch.labels == IGNORED, ends)
    assert torch.equal(microbatch.documents.diff(), ends[:, :-1].long())


@settings(max_examples=30)
@given(lengths=any_lengths, seed=st.integers(0, 5))
def test_shuffled_pieces_are_separate_documents(lengths: list[int], seed: int) -> None:
    """None of them ends with the token."""
    order = Shuffle(len(lengths), seed, Stream.DOCUMENTS).at(np.arange(len(lengths)))
    lasts = np.cumsum(np.array(lengths)[order])[np.array(lengths)[order] > 0] - 1
    needs = replace(BOTH, seed=seed, end_of_document=-1)
    made = ShuffledSamples(sequences_of(np.arange(sum(lengths)), np.cumsum([0, *lengths])), needs)
    for index in range(len(made)):
        _, labels, documents = made[index]
        expected = np.isin(np.arange(index * SEQ, (index + 1) * SEQ), lasts)
        assert documents is not None
        assert (labels == IGNORED).tolist() == expected.tolist()
        assert np.diff(documents).tolist() == expected[:-1].tolist()


def test_who_attends_to_whom() -> None:
    (mask,) = document_mask(torch.tensor([[0, 0, 1, 1]]))[0].int().tolist()
    assert mask == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("field", ["reset_attention_mask", "eod_mask_loss"])
def test_a_dataset_without_ends_is_refused(field: str, tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "a", [np.arange(100)])
    source = IndexedSource(parse_prefixes(prefix), None, None)
    needs = Needs(ByteTokenizer.vocab_size, 8, evaluates=False, **{field: True})
    with pytest.raises(
        ValueError, match=rf"^data.{field}: documents of .*a have no end-of-document token .*, so they cannot"
    ):
        open_data(source, ByteTokenizer(), needs)


def test_documents_may_be_longer_than_what_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index says where documents end; of the tokens of a large dataset only an excerpt is read."""
    monkeypatch.setattr(indexed, "_EXCERPT_TOKENS", 32)
    documents = [[7] * 900 + [ByteTokenizer.end_of_document] * (number < 6) for number in range(7)]
    source = IndexedSource(parse_prefixes(write_dataset(tmp_path / "a", documents)), None, None)
    needs = Needs(ByteTokenizer.vocab_size, 8, evaluates=False, reset_attention_mask=True)
    training = open_data(source, ByteTokenizer(), needs).training
    assert set(training.parts[0].dataset.some_labels()) == {7}
