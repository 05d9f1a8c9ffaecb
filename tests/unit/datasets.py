"""Datasets of a test: indexed ones, and what text and records become."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from megatron_noloco.data.corpus import corpus_of
from megatron_noloco.data.encode import Counts, files_to_read
from megatron_noloco.data.indexed import Dataset, IndexedWriter, read_indexed
from megatron_noloco.data.inputs import find_inputs
from megatron_noloco.data.records import RECORD_KEYS, encode_records
from megatron_noloco.data.sources import Split, TextSource
from megatron_noloco.data.tokenizer import Tokenizer


def write_dataset(
    prefix: Path, documents: Iterable[Any], vocab_size: int = 257, tokenizer: Any = None
) -> str:
    """Write a dataset of these documents, each a sequence of tokens; returns its prefix."""
    with IndexedWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(np.array(document), ends_document=True)
        writer.finish()
    if tokenizer is not None:
        Path(f"{prefix}.facts.json").write_text(json.dumps({"tokenizer": tokenizer.digest}))
    return str(prefix)


def sequences_of(tokens: np.ndarray, offsets: np.ndarray | None = None) -> Dataset:
    """These tokens as sequences; a single one where no offsets are given."""
    return Dataset(tokens, np.array([0, len(tokens)]) if offsets is None else offsets, None, "the data")


def load_text(text: str, split: str, tokenizer: Tokenizer) -> Any:
    """What a text becomes: the tokens of its three splits, and the facts about it."""
    shares = Split.parse(split)
    entry = corpus_of(TextSource(text, shares, mkdtemp()), tokenizer).make()
    indexed, facts = read_indexed(entry.prefix), entry.facts
    splits = (indexed.part(*bounds).tokens for bounds in pairwise(shares.bounds(indexed.sequences)))
    return SimpleNamespace(**dict(zip(("train", "validation", "test"), splits, strict=True)), **facts)


class Learnt(NamedTuple):
    """What a record becomes; one of several if its turns cannot share a sequence of tokens."""

    tokens: np.ndarray
    answer: np.ndarray
    begins: bool
    joined: int  # answers whose first token reaches into the prompt, so far


def load_records(path: str, tokenizer: Tokenizer) -> list[Learnt]:
    counts, found, begins = Counts(lambda _: None), list[Learnt](), True
    files = files_to_read(find_inputs([path], "data.sft_data_path"), RECORD_KEYS, counts, True)
    for tokens, ends, mask in encode_records(files, tokenizer, counts):
        assert mask is not None
        found.append(Learnt(tokens, mask, begins, counts["joined"]))
        begins = ends
    return found
