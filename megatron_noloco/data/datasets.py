"""What a run reads, put together from its config."""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from megatron_noloco.config.data_block import DataConfig, Paths, blend_of
from megatron_noloco.data.corpus import Corpus, count_tokens, load_corpus, unigram_cross_entropy
from megatron_noloco.data.dataset import JoinedDataset, SampleDataset, TokenDataset
from megatron_noloco.data.indexed import IndexedTokens
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.plans.samples import BlendedOrder, SampleOrder

_LOOKED_AT = 1 << 24  # tokens per dataset that are looked at before a run; all of a smaller one


@dataclass(frozen=True)
class Part:
    """One dataset of a blend."""

    dataset: TokenDataset
    weight: float


@dataclass(frozen=True)
class Datasets:
    """Samples to learn from, and samples to measure on (none where the run never evaluates)."""

    training: list[Part]
    validation: list[Part]
    about: str  # one line for the banner
    vocab_size: int

    @cached_property
    def train(self) -> SampleDataset:
        """All samples to learn from; their ids are those of `order`."""
        if len(self.training) == 1:
            return self.training[0].dataset
        return JoinedDataset([part.dataset for part in self.training])

    def order(self, seed: int) -> SampleOrder | BlendedOrder:
        """In which order a run of this seed reads `train`."""
        if len(self.training) == 1:
            return SampleOrder(len(self.train), seed)
        sizes = tuple(len(part.dataset) for part in self.training)
        return BlendedOrder(sizes, tuple(part.weight for part in self.training), seed)

    @cached_property
    def unigram_entropy(self) -> float:
        """Nats per token of the best model without context, in the blend's proportions; NaN without validation.

        Of large datasets, from a part of their tokens.
        """
        if not self.validation:
            return math.nan
        seen = sum(part.weight * _frequencies(part, self.vocab_size, 1) for part in self.training)
        measured = sum(part.weight * _frequencies(part, self.vocab_size, 0) for part in self.validation)
        return unigram_cross_entropy(np.asarray(seen), np.asarray(measured))


def build_datasets(
    config: DataConfig,
    tokenizer: Tokenizer,
    vocab_size: int,
    seq_length: int,
    global_batch: int,
    evaluates: bool,
) -> Datasets:
    """The datasets of a run whose every step consumes `global_batch` training samples; ValueError if it cannot be.

    A training split smaller than one global batch is refused: a single step would see a sample twice.

    Args:
        vocab_size: of the model, without padding; more than the tokenizer's where the config says so.
        evaluates: whether validation samples are needed.
    """
    if config.text is not None:
        corpus = load_corpus(config.text, config.split, tokenizer)
        training, validation = _corpus_parts(corpus, seq_length, evaluates)
        about = (
            f"{corpus.name}, {corpus.files} files, {corpus.megabytes:.1f} MB, {len(corpus.train)} training and "
            f"{len(corpus.validation)} validation tokens"
        )
    else:
        training, validation = _indexed_parts(config, seq_length, evaluates)
        about = "; ".join(
            _about(parts, what) for parts, what in ((training, "training"), (validation, "validation"))
        )
    datasets = Datasets(training, validation, about, vocab_size)
    for part in training + validation:
        _check_ids(part.dataset, vocab_size)
    if len(datasets.train) < global_batch:
        tokens = sum(len(part.dataset.tokens) for part in training)
        raise ValueError(
            f"corpus too small: {datasets.train.name} has {tokens} tokens = {len(datasets.train)} samples of "
            f"{seq_length}, one global batch needs {global_batch}"
        )
    return datasets


def whole_dataset(data: str, tokenizer: Tokenizer, vocab_size: int, seq_length: int) -> TokenDataset:
    """All tokens of a text file, a folder of them, or an indexed dataset's prefix; raises ValueError."""
    indexed = Path(f"{data}.idx").exists()
    tokens = IndexedTokens(data).tokens if indexed else load_corpus(data, "1", tokenizer).train
    dataset = TokenDataset(tokens, seq_length, data)
    _check_ids(dataset, vocab_size)
    return dataset


def _corpus_parts(corpus: Corpus, seq_length: int, evaluates: bool) -> tuple[list[Part], list[Part]]:
    train = TokenDataset(corpus.train, seq_length, f"the training split of {corpus.name}")
    if not evaluates:
        return [Part(train, 1.0)], []
    validation = TokenDataset(corpus.validation, seq_length, f"the validation split of {corpus.name}")
    return [Part(train, 1.0)], [Part(validation, 1.0)]


def _indexed_parts(config: DataConfig, seq_length: int, evaluates: bool) -> tuple[list[Part], list[Part]]:
    if config.train_data_path is not None:
        valid = config.valid_data_path if evaluates else None
        return _whole(config.train_data_path, seq_length), _whole(
            valid, seq_length
        ) if valid is not None else []
    assert config.data_path is not None
    training: list[Part] = []
    validation: list[Part] = []
    for prefix, weight in blend_of(config.data_path):
        indexed = IndexedTokens(prefix)
        bounds = split_bounds(config.split_weights, len(indexed.lengths))
        for split, parts in enumerate((training, validation) if evaluates else (training,)):
            name = f"the {('training', 'validation')[split]} split of {prefix}"
            tokens = indexed.part(bounds[split], bounds[split + 1])
            if not len(tokens):
                raise ValueError(
                    f'data.split: "{config.split}" leaves {name} empty ({len(indexed.lengths)} sequences); '
                    "raise its weight, or give data.train_data_path and data.valid_data_path"
                )
            parts.append(Part(TokenDataset(tokens, seq_length, name), weight))
    return training, validation


def _whole(paths: Paths, seq_length: int) -> list[Part]:
    return [
        Part(TokenDataset(IndexedTokens(prefix).tokens, seq_length, prefix), weight)
        for prefix, weight in blend_of(paths)
    ]


def split_bounds(weights: tuple[float, float, float], sequences: int) -> list[int]:
    """First sequence of train, validation and test, and the end: Megatron's rounding, so the same splits."""
    shares = [weight / sum(weights) for weight in weights]
    bounds = [0, *(round(share * sequences) for share in accumulate(shares))]
    return [*bounds[:-1], sequences]


def _about(parts: list[Part], what: str) -> str:
    shares = ", ".join(
        f"{len(part.dataset.tokens)} tokens of {part.dataset.name} ({100 * part.weight:.4g} %)"
        for part in parts
    )
    return f"{what}: {shares or 'none'}"


def _look_at(dataset: TokenDataset) -> np.ndarray:
    """Up to `_LOOKED_AT` tokens, evenly spread over the dataset in 16 stretches."""
    tokens = dataset.tokens
    if len(tokens) <= _LOOKED_AT:
        return tokens
    starts = np.linspace(0, len(tokens) - _LOOKED_AT // 16, 16).astype(int)
    return np.concatenate([tokens[start : start + _LOOKED_AT // 16] for start in starts])


def _frequencies(part: Part, vocab_size: int, added: int) -> np.ndarray:
    """Relative, each count raised by `added`, shape [vocab_size]."""
    counts = count_tokens(_look_at(part.dataset), vocab_size) + added
    return counts / counts.sum()


def _check_ids(dataset: TokenDataset, vocab_size: int) -> None:
    largest = int(_look_at(dataset).max())
    if largest >= vocab_size:
        raise ValueError(
            f"{dataset.name} holds token {largest}, the vocabulary has {vocab_size}: it was made with another "
            "tokenizer (data.tokenizer_type, data.tokenizer_model)"
        )
