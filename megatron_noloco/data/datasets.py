"""The datasets of a run, put together from its source."""

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from megatron_noloco.data.corpus import Corpus, load_corpus
from megatron_noloco.data.indexed import IndexedTokens
from megatron_noloco.data.records import Record, RecordDataset, load_records
from megatron_noloco.data.samples import JoinedDataset, SampleDataset, ShuffledDataset, TokenDataset
from megatron_noloco.data.sources import Documents, IndexedSource, RecordSource, Source, Split, TextSource
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.plans.samples import BlendedOrder, SampleOrder

_SPLITS = ("training", "validation")
_TRAINING, _VALIDATION = range(2)
_LOOKED_AT = 1 << 24  # tokens per dataset that are checked and counted; all of a smaller one
_COUNT_AT_ONCE = 1 << 20  # tokens; bincount widens its input to 8 bytes each
_Open = Callable[[str], IndexedTokens]


@dataclass(frozen=True)
class Needs:
    """What a run needs of its datasets; to evaluate, the first two and the last are enough."""

    vocab_size: int  # of the model, without padding; it may be more than the tokenizer's
    seq_length: int
    global_batch: int = 1  # training samples that a local step of all replicas consumes
    seed: int = 0  # of the order in which the sequences of an indexed dataset are laid end to end
    evaluates: bool = True  # whether validation samples are needed
    documents: Documents | None = None  # what is done at their borders; None: nothing


@dataclass(frozen=True)
class Part:
    """One dataset of a blend."""

    dataset: TokenDataset | RecordDataset
    weight: float


@dataclass(frozen=True)
class Datasets:
    """The training samples of a run, and its validation samples (none where it never evaluates)."""

    training: list[Part]
    validation: list[Part]
    about: str  # one line for the banner
    vocab_size: int

    @cached_property
    def train(self) -> SampleDataset:
        """All training samples; their ids are those of `order`."""
        if len(self.training) == 1:
            return self.training[0].dataset
        return JoinedDataset([part.dataset for part in self.training])

    def order(self, seed: int) -> SampleOrder | BlendedOrder:
        """Return the order in which a run of this seed reads `train`."""
        if len(self.training) == 1:
            return SampleOrder(len(self.train), seed)
        sizes = tuple(len(part.dataset) for part in self.training)
        return BlendedOrder(sizes, tuple(part.weight for part in self.training), seed)

    @cached_property
    def unigram_entropy(self) -> float:
        """Validation loss, in nats per token, of the best model that sees no context: what a model has to beat.

        Each token's probability is its share of the training tokens, each count raised by one so that none is
        zero; of large datasets a part of the tokens is counted. NaN without validation.
        """
        if not self.validation:
            return math.nan
        seen = _shares(self.training, self.vocab_size, added=1)
        return float(-(_shares(self.validation, self.vocab_size, added=0) @ np.log(seen)))


def build_datasets(source: Source, tokenizer: Tokenizer, needs: Needs) -> Datasets:
    """Build the datasets of a run; raises ValueError, in one line, where they are missing, broken or too small.

    A training split smaller than one global batch is refused: a single step would see a sample twice.
    """
    if isinstance(source, TextSource):
        corpus = load_corpus(source.text, source.split, tokenizer)
        name = f"the training split of {corpus.name}"
        training = [Part(TokenDataset(corpus.train, needs.seq_length, name, needs.documents), 1.0)]
        validation = _validation_of_corpus(corpus, needs) if needs.evaluates else []
        about = (
            f"{corpus.name}, {corpus.files} files, {corpus.megabytes:.1f} MB, {len(corpus.train)} training and "
            f"{len(corpus.validation)} validation tokens"
        )
    elif isinstance(source, RecordSource):
        records = load_records(source.path, tokenizer)
        training = [_records(source, records, _TRAINING, tokenizer, needs)]
        validation = [_records(source, records, _VALIDATION, tokenizer, needs)] if needs.evaluates else []
        cut = sum(
            part.dataset.cut for part in training + validation if isinstance(part.dataset, RecordDataset)
        )
        about = (
            f"{source.path}, {len(records)} records ({cut} longer than a sample), {len(training[0].dataset)} "
            f"training samples with {len(training[0].dataset.tokens)} tokens in answers"
        )
    else:
        opened = cache(IndexedTokens)  # both splits are often of one dataset, whose index may be long
        training = _indexed_training(source, needs, opened)
        validation = _indexed_validation(source, needs, opened) if needs.evaluates else []
        about = f"{_about(training, 'training')}; {_about(validation, 'validation')}"
    datasets = Datasets(training, validation, about, needs.vocab_size)
    for part in training + validation:
        check_tokens(part.dataset, needs.vocab_size)
    if len(datasets.train) < needs.global_batch:
        tokens = sum(len(part.dataset.tokens) for part in training)
        raise ValueError(
            f"corpus too small: {datasets.train.name} has {tokens} tokens = {len(datasets.train)} samples of "
            f"{needs.seq_length}, one global batch needs {needs.global_batch}"
        )
    return datasets


def validation_datasets(
    source: Source, tokenizer: Tokenizer, needs: Needs
) -> list[TokenDataset | RecordDataset]:
    """Return what a run is evaluated on, without its training samples; raises ValueError."""
    if isinstance(source, TextSource):
        parts = _validation_of_corpus(load_corpus(source.text, source.split, tokenizer), needs)
    elif isinstance(source, RecordSource):
        parts = [_records(source, load_records(source.path, tokenizer), _VALIDATION, tokenizer, needs)]
    else:
        parts = _indexed_validation(source, needs, IndexedTokens)
    for part in parts:
        check_tokens(part.dataset, needs.vocab_size)
    return [part.dataset for part in parts]


def whole_dataset(data: str, tokenizer: Tokenizer, needs: Needs) -> TokenDataset:
    """Return all tokens of a text file, a folder of them, or an indexed dataset's prefix; raises ValueError."""
    indexed = Path(f"{data}.idx").exists()
    try:
        tokens = IndexedTokens(data).tokens if indexed else load_corpus(data, Split(1, 0, 0), tokenizer).train
    except ValueError as error:
        raise ValueError(f"--data: {str(error).removeprefix('data.text: ')}") from None
    dataset = TokenDataset(tokens, needs.seq_length, data, needs.documents)
    check_tokens(dataset, needs.vocab_size)
    return dataset


def _validation_of_corpus(corpus: Corpus, needs: Needs) -> list[Part]:
    name = f"the validation split of {corpus.name}"
    return [Part(TokenDataset(corpus.validation, needs.seq_length, name, needs.documents), 1.0)]


def _records(
    source: RecordSource, records: list[Record], split: int, tokenizer: Tokenizer, needs: Needs
) -> Part:
    first, stop = split_bounds(source.split, len(records))[split : split + 2]
    name = f"the {_SPLITS[split]} split of {source.path}"
    if first == stop:
        raise ValueError(
            f"data.split: a share of {astuple(source.split)[split]:.4g} leaves {name} empty ({len(records)} "
            "records); raise its weight or add records"
        )
    padding = tokenizer.end_of_document
    return Part(RecordDataset(records[first:stop], needs.seq_length, name, source.packed, padding), 1.0)


def _indexed_training(source: IndexedSource, needs: Needs, opened: _Open) -> list[Part]:
    parts = []
    for indexed, (first, stop), name, weight in _splits(source, _TRAINING, opened):
        tokens, offsets = indexed.part(first, stop), indexed.offsets[first : stop + 1]
        dataset = ShuffledDataset(tokens, offsets, needs.seq_length, name, needs.seed, needs.documents)
        parts.append(Part(dataset, weight))
    return parts


def _indexed_validation(source: IndexedSource, needs: Needs, opened: _Open) -> list[Part]:
    """Return the validation parts, in the order of the files: every run is evaluated on the same samples."""
    return [
        Part(TokenDataset(indexed.part(*bounds), needs.seq_length, name, needs.documents), weight)
        for indexed, bounds, name, weight in _splits(source, _VALIDATION, opened)
    ]


def _splits(
    source: IndexedSource, split: int, opened: _Open
) -> Iterator[tuple[IndexedTokens, tuple[int, int], str, float]]:
    """Yield each dataset, the bounds of its sequences that belong to `split`, their name, and their weight."""
    blend = source.train if source.split is not None else (source.train, source.validation)[split]
    if blend is None:
        raise ValueError(
            "data.valid_data_path is missing: there is nothing to evaluate on (evaluate: give --data)"
        )
    for prefix, weight in blend.parts:
        indexed = opened(prefix)
        sequences = len(indexed.lengths)
        if source.split is None:
            yield indexed, (0, sequences), prefix, weight
            continue
        first, stop = split_bounds(source.split, sequences)[split : split + 2]
        name = f"the {_SPLITS[split]} split of {prefix}"
        if not len(indexed.part(first, stop)):
            share = f"data.split: a share of {astuple(source.split)[split]:.4g} leaves {name} empty"
            if sequences == 1:
                raise ValueError(
                    f"{share}: one sequence cannot be divided; preprocess several documents, such as JSON lines, "
                    "or give the text itself as data.text"
                )
            raise ValueError(
                f"{share} ({sequences} sequences); raise its weight, or give data.train_data_path and "
                "data.valid_data_path"
            )
        yield indexed, (first, stop), name, weight


def split_bounds(split: Split, sequences: int) -> list[int]:
    """Return the first sequence of train, validation and test, and the end; rounded as Megatron does."""
    bounds = [0, *(round(share * sequences) for share in accumulate(astuple(split)))]
    return [*bounds[:-1], sequences]


def _about(parts: list[Part], what: str) -> str:
    shares = ", ".join(
        f"{len(part.dataset.tokens)} tokens of {part.dataset.name} ({100 * part.weight:.4g} %)"
        for part in parts
    )
    return f"{what}: {shares or 'none'}"


# The tokens of a dataset


def check_tokens(dataset: TokenDataset | RecordDataset, vocab_size: int) -> None:
    """Raise ValueError for a token outside the vocabulary, or where documents to be separated do not end."""
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
            "documents cannot be separated; preprocess it with --append-eod"
        )


def _look_at(dataset: TokenDataset | RecordDataset) -> np.ndarray:
    """Return up to `_LOOKED_AT` tokens, evenly spread over the dataset in 16 stretches."""
    tokens = dataset.tokens
    if len(tokens) <= _LOOKED_AT:
        return tokens
    starts = np.linspace(0, len(tokens) - _LOOKED_AT // 16, 16).astype(int)
    return np.concatenate([tokens[start : start + _LOOKED_AT // 16] for start in starts])


def _shares(parts: list[Part], vocab_size: int, added: int) -> np.ndarray:
    """Return how often each token occurs in a blend, relative to all, shape [vocab_size].

    Args:
        added: what each count of each part is raised by.
    """
    shares = np.zeros(vocab_size)
    for part in parts:
        tokens = _look_at(part.dataset)
        counts = np.full(vocab_size, added)
        for start in range(0, len(tokens), _COUNT_AT_ONCE):
            counts += np.bincount(tokens[start : start + _COUNT_AT_ONCE], minlength=vocab_size)
        shares += part.weight * (counts / counts.sum())
    return shares
