"""Documents in one sample: where they end, who attends to whom, and what has a loss."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_noloco.data.datasets import Needs, build_datasets
from megatron_noloco.data.indexed import IndexedWriter
from megatron_noloco.data.microbatches import ValidationSource
from megatron_noloco.data.samples import IGNORED, ShuffledDataset, TokenDataset
from megatron_noloco.data.sources import Blend, Documents, IndexedSource
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.model.layers import document_mask

END = 9
TOKENS = np.array([1, 2, END, 3, END, END, 4, 5, 6])  # documents of 3, 2, 1 and more than 2 tokens
BOTH = Documents(END, reset_attention_mask=True, eod_mask_loss=True)


def test_the_token_after_an_end_begins_a_document_and_has_no_loss() -> None:
    tokens, labels, documents = TokenDataset(TOKENS, 8, documents=BOTH)[0]
    assert tokens.tolist() == TOKENS[:8].tolist()
    assert labels.tolist() == [2, END, IGNORED, END, IGNORED, IGNORED, 5, 6]
    assert documents is not None
    assert documents.tolist() == [0, 0, 0, 1, 1, 2, 3, 3]


def test_each_is_done_without_the_other() -> None:
    _, labels, documents = TokenDataset(TOKENS, 8, documents=Documents(END, eod_mask_loss=True))[0]
    assert IGNORED in labels
    assert documents is None
    _, labels, documents = TokenDataset(TOKENS, 8, documents=Documents(END, reset_attention_mask=True))[0]
    assert IGNORED not in labels
    assert documents is not None


def test_in_shuffled_sequences_and_in_microbatches() -> None:
    dataset = ShuffledDataset(TOKENS, np.array([0, 3, 5, 6, 9]), 4, "the data", 0, BOTH)
    microbatch = ValidationSource(dataset, 2, count=1).microbatch(0)
    assert microbatch.documents is not None
    ends = microbatch.tokens == END
    assert torch.equal(microbatch.labels == IGNORED, ends)
    assert torch.equal(microbatch.documents.diff(), ends[:, :-1].long())


def test_who_attends_to_whom() -> None:
    (mask,) = document_mask(torch.tensor([[0, 0, 1, 1]]))[0].int().tolist()
    assert mask == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("field", ["reset_attention_mask", "eod_mask_loss"])
def test_a_dataset_without_ends_is_refused(field: str, tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "a", ByteTokenizer.vocab_size)
    writer.add(np.arange(100), ends_document=True)
    writer.finish()
    documents = Documents(ByteTokenizer.end_of_document, **{field: True})
    source = IndexedSource(Blend.parse(str(tmp_path / "a")), None, None)
    needs = Needs(ByteTokenizer.vocab_size, 8, evaluates=False, documents=documents)
    with pytest.raises(
        ValueError, match=rf"^data.{field}: .*a holds no end-of-document token \(256\), .*--append-eod$"
    ):
        build_datasets(source, ByteTokenizer(), needs)
