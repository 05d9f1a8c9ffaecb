"""What is in the tokens of a dataset, by a look at up to 16 million of them."""

import numpy as np

from megatron_noloco.data.corpus import count_tokens
from megatron_noloco.data.dataset import TokenDataset
from megatron_noloco.data.records import RecordDataset

_LOOKED_AT = 1 << 24  # tokens per dataset; all of a smaller one


def frequencies(dataset: TokenDataset | RecordDataset, vocab_size: int, added: int) -> np.ndarray:
    """How often each token occurs, relative to all; each count raised by `added`, shape [vocab_size]."""
    counts = count_tokens(_look_at(dataset), vocab_size) + added
    return counts / counts.sum()


def check_tokens(dataset: TokenDataset | RecordDataset, vocab_size: int) -> None:
    """Raises ValueError for a token outside the vocabulary, or where documents to be told apart do not end."""
    tokens = _look_at(dataset)
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise ValueError(
            f"{dataset.name} holds token {largest}, the vocabulary has {vocab_size}: it was made with another "
            "tokenizer (data.tokenizer_type, data.tokenizer_model)"
        )
    documents = None if isinstance(dataset, RecordDataset) else dataset.documents
    if documents is None or not (documents.reset_attention_mask or documents.eod_mask_loss):
        return
    if not (tokens == documents.end_of_document).any():
        field = "reset_attention_mask" if documents.reset_attention_mask else "eod_mask_loss"
        raise ValueError(
            f"data.{field}: {dataset.name} holds no end-of-document token ({documents.end_of_document}), so its "
            "documents cannot be told apart; preprocess it with --append-eod"
        )


def _look_at(dataset: TokenDataset | RecordDataset) -> np.ndarray:
    """Up to `_LOOKED_AT` tokens, evenly spread over the dataset in 16 stretches."""
    tokens = dataset.tokens
    if len(tokens) <= _LOOKED_AT:
        return tokens
    starts = np.linspace(0, len(tokens) - _LOOKED_AT // 16, 16).astype(int)
    return np.concatenate([tokens[start : start + _LOOKED_AT // 16] for start in starts])
