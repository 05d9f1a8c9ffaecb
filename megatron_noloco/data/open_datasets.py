"""Open the training and validation datasets of a run from its source."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from megatron_noloco.data.corpus import load_corpus
from megatron_noloco.data.datasets import BY_FILE, Datasets, Part, excerpt
from megatron_noloco.data.indexed import IndexedTokens, open_indexed
from megatron_noloco.data.records import RecordDataset, load_records, record_files
from megatron_noloco.data.samples import ShuffledDataset, TokenDataset, check_vocabulary, in_samples
from megatron_noloco.data.sources import IndexedSource, Needs, RecordSource, Source, Split, TextSource
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.plans.sample_order import slots_of

_SPLIT_NAMES = ("training", "validation")
_TRAINING, _VALIDATION = range(2)
_OpenIndexed = Callable[[str], IndexedTokens]


def build_datasets(source: Source, tokenizer: Tokenizer, needs: Needs) -> Datasets:
    """Build the datasets of a run; raises UserError, in one line, when one is missing, damaged or too small.

    A training split smaller than one global batch is refused: a single step would see a sample twice.
    """
    splits = (_TRAINING, _VALIDATION) if needs.evaluates else (_TRAINING,)
    (training, *others), summary, by_file = _read(source, tokenizer, needs, splits)
    validation = others[0] if others else []
    datasets = Datasets(training, validation, summary, needs.vocab_size, by_file)
    if len(datasets.train) < needs.global_batch:
        raise UserError(
            f"corpus too small: one global batch needs {in_samples(needs.global_batch, needs.seq_length)}, "
            f"{datasets.train.name} has {len(datasets.train)}"
        )
    return datasets


def validation_datasets(
    source: Source, tokenizer: Tokenizer, needs: Needs, counters: Mapping[str, float]
) -> list[TokenDataset | RecordDataset]:
    """Return a run's validation datasets without building its training datasets; raises UserError.

    Args:
        counters: of the run's checkpoint, which say how it divided files of text.
    """
    (parts,), _, by_file = _read(source, tokenizer, needs, (_VALIDATION,))
    if by_file != (BY_FILE in counters):
        raise UserError(
            "data.text: the run divided its files otherwise than they are divided today, so its validation split "
            "is not known (evaluate: give --data)"
        )
    return [part.dataset for part in parts]


def whole_dataset(data: str, tokenizer: Tokenizer, needs: Needs) -> tuple[TokenDataset, str]:
    """Return all of a text file, a folder of text or an indexed dataset (by prefix); raises UserError.

    The second value says which files are left out, "" where none is.
    """
    indexed, notes = Path(f"{data}.idx").exists(), ""
    try:
        tokens: np.ndarray
        if indexed:
            tokens = open_indexed(data, tokenizer).tokens
        else:
            corpus = load_corpus(data, Split(1, 0, 0), tokenizer)
            tokens, notes = corpus.train, corpus.notes
    except UserError as error:
        raise UserError(f"--data: {str(error).removeprefix('data.text: ')}") from None
    dataset = TokenDataset(tokens, needs, data)
    _check_tokens(dataset, needs.vocab_size)
    return dataset, notes.removeprefix("; ")


def spelled_out(special_tokens: int, as_text: bool) -> str:
    """Return the end of a summary that says how special tokens in a text are read; "" where there are none."""
    if not special_tokens:
        return ""
    how = "text" if as_text else "these tokens, not as text"
    return f"; special tokens spelled out: {special_tokens}, read as {how}"


def _read(
    source: Source, tokenizer: Tokenizer, needs: Needs, splits: Sequence[int]
) -> tuple[list[list[Part]], str, bool]:
    """Return the parts of each of the splits, a summary if training is among them, and whether files are whole.

    Raises UserError for a part without samples, and for wrong tokens.
    """
    by_file = False
    match source:
        case TextSource():
            parts, summary, by_file = _read_text(source, tokenizer, needs, splits)
        case RecordSource():
            parts, summary = _read_records(source, tokenizer, needs, splits)
        case IndexedSource():
            parts, summary = _read_indexed(source, tokenizer, needs, splits)
    for part in chain(*parts):
        _check_tokens(part.dataset, needs.vocab_size)
    return parts, summary, by_file


def _read_text(
    source: TextSource, tokenizer: Tokenizer, needs: Needs, splits: Sequence[int]
) -> tuple[list[list[Part]], str, bool]:
    corpus = load_corpus(source.text, source.split, tokenizer)
    tokens = (corpus.train, corpus.validation)
    for split in splits:
        if not len(tokens[split]):
            problem = _no_share(source.split, split, corpus.name)
            raise UserError(f"{problem} ({corpus.files} files); raise its weight or add text")
    parts = [[Part(TokenDataset(tokens[split], needs, _name(split, corpus.name)), 1.0)] for split in splits]
    summary = (
        f"{corpus.name}, {corpus.files} files, {corpus.megabytes:.1f} MB, {len(corpus.train)} training and "
        f"{len(corpus.validation)} validation tokens{corpus.notes}"
        f"{spelled_out(corpus.special_tokens, tokenizer.splits_special_tokens)}"
    )
    return parts, summary, corpus.by_file


def _read_records(
    source: RecordSource, tokenizer: Tokenizer, needs: Needs, splits: Sequence[int]
) -> tuple[list[list[Part]], str]:
    records, datasets = load_records(source.path, tokenizer), []
    lines = [place for place, record in enumerate(records) if record.begins]
    for split in splits:
        first, stop = source.split.bounds(len(lines))[split : split + 2]
        if first == stop:
            problem = _no_share(source.split, split, source.path)
            raise UserError(f"{problem} ({len(lines)} records); raise its weight or add records")
        first, stop = ([*lines, len(records)][bound] for bound in (first, stop))
        name, padding = _name(split, source.path), tokenizer.end_of_document
        datasets.append(RecordDataset(records[first:stop], needs.seq_length, name, source.packed, padding))
    spelled = (
        spelled_out(sum(record.spelled_out for record in records if record.as_text == as_text), as_text)
        for as_text in (True, False)
    )
    cut = sum(dataset.cut for dataset in datasets)
    summary = (
        f"{source.path}, {len(lines)} records ({cut} longer than a sample), "
        f"{len(datasets[0])} training samples with {len(datasets[0].tokens)} tokens in answers"
        f"{record_files(source.path)[1]}{''.join(spelled)}"
    )
    if empty := sum(record.empty for record in records):
        summary += f"; empty answers: {empty}, of which only the end is learnt"
    if joined := sum(record.joined for record in records):
        summary += (
            f"; answers that begin within a token of the prompt: {joined}, which generation reads apart"
        )
    if others := len(records) - len(lines):
        summary += f"; later turns learnt apart: {others}, which read earlier answers as other tokens"
    return [[Part(dataset, 1.0)] for dataset in datasets], summary if _TRAINING in splits else ""


def _read_indexed(
    source: IndexedSource, tokenizer: Tokenizer, needs: Needs, splits: Sequence[int]
) -> tuple[list[list[Part]], str]:
    """Shuffle training alone, so that every run is evaluated on the same samples."""
    open_once = partial(open_indexed, tokenizer=tokenizer)
    found = []
    for split in splits:
        found.append(list[Part]())
        for indexed, (first, stop), name, weight in _split_of_blend(source, split, open_once):
            tokens, offsets = indexed.part(first, stop), indexed.offsets.part(first, stop)
            if split == _TRAINING:
                found[-1].append(Part(ShuffledDataset(tokens, offsets, needs, name), weight))
            else:
                found[-1].append(Part(TokenDataset(tokens, needs, name), weight))
    if _TRAINING not in splits:
        return found, ""
    summary = "; ".join(
        f"{name}: {_in_words(parts)}" for name, parts in zip(_SPLIT_NAMES, [*found, []], strict=False)
    )
    return found, summary + "".join(_check_beginnings(source, open_once, tokenizer))


def _in_words(parts: list[Part]) -> str:
    slots = slots_of([part.weight for part in parts]) if parts else ()
    shares = ", ".join(
        f"{len(part.dataset.tokens)} tokens of {part.dataset.name} ({100 * slot / sum(slots):.4g} %)"
        for part, slot in zip(parts, slots, strict=True)
    )
    return shares or "none"


def _name(split: int, of: str) -> str:
    return f"the {_SPLIT_NAMES[split]} split of {of}"


def _no_share(shares: Split, split: int, of: str) -> str:
    return f"data.split: a share of {astuple(shares)[split]:.4g} leaves {_name(split, of)} empty"


def _check_beginnings(
    source: IndexedSource, open_indexed: _OpenIndexed, tokenizer: Tokenizer
) -> Iterator[str]:
    """Yield the end of a summary that names each dataset with a BOS that nobody asks for.

    Raises UserError for a dataset that lacks a BOS that the run's documents are to begin with.
    """
    bos = tokenizer.beginning_of_document
    parts = source.train.parts + (source.validation.parts if source.validation else ())
    for prefix in dict.fromkeys(prefix for prefix, _ in parts):
        begins = open_indexed(prefix).tokens[0] == bos
        if tokenizer.before_document and not begins:
            raise UserError(
                f"data.prepend_bos: {prefix} does not begin with BOS (token {bos}); preprocess it with "
                "--prepend-bos, or leave data.prepend_bos out"
            )
        if begins and not tokenizer.before_document and bos != tokenizer.end_of_document:
            yield f"; {prefix} begins with BOS; set data.prepend_bos if it was made so, and an export adds it, too"


def _split_of_blend(
    source: IndexedSource, split: int, open_indexed: _OpenIndexed
) -> Iterator[tuple[IndexedTokens, tuple[int, int], str, float]]:
    """Yield each dataset of a blend, the bounds of its sequences in `split`, their name and their weight."""
    blend = source.train if source.split is not None else (source.train, source.validation)[split]
    if blend is None:
        raise UserError(
            "data.valid_data_path is missing: there is nothing to evaluate on (evaluate: give --data)"
        )
    for prefix, weight in blend.parts:
        indexed = open_indexed(prefix)
        sequences = len(indexed.lengths)
        if source.split is None:
            yield indexed, (0, sequences), prefix, weight
            continue
        first, stop = source.split.bounds(sequences)[split : split + 2]
        if not len(indexed.part(first, stop)):
            share = _no_share(source.split, split, prefix)
            if sequences == 1:
                raise UserError(
                    f"{share}: one sequence cannot be divided; preprocess several documents, such as JSON lines, "
                    "or give the text itself as data.text"
                )
            raise UserError(
                f"{share} ({sequences} sequences); raise its weight, or give data.train_data_path and "
                "data.valid_data_path"
            )
        yield indexed, (first, stop), _name(split, prefix), weight


def _check_tokens(dataset: TokenDataset | RecordDataset, vocab_size: int) -> None:
    """Raise UserError for a token outside the vocabulary, or where documents are separated but none ends."""
    tokens = excerpt(dataset.contents[0])
    check_vocabulary(tokens, vocab_size, dataset.name)
    documents = None if isinstance(dataset, RecordDataset) else dataset.documents
    if documents is None or not (documents.reset_attention_mask or documents.eod_mask_loss):
        return
    if not (tokens == documents.end_of_document).any():
        field = "reset_attention_mask" if documents.reset_attention_mask else "eod_mask_loss"
        raise UserError(
            f"data.{field}: {dataset.name} holds no end-of-document token ({documents.end_of_document}), so its "
            "documents cannot be separated; preprocess it with --append-eod"
        )
