"""Datasets of a test: indexed ones, and what text and records become."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow

from megatron_noloco.data.cache import Made
from megatron_noloco.data.corpus import corpus_of, preprocess
from megatron_noloco.data.encode import Counts, files_to_read
from megatron_noloco.data.indexed import Dataset, IndexedDataset, Sequence, read_indexed, write_indexed
from megatron_noloco.data.inputs import find_inputs
from megatron_noloco.data.records import RECORD_KEYS, encode_records
from megatron_noloco.data.sources import Split, TextSource
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer


def write_dataset(
    prefix: Path, documents: Iterable[Any], vocab_size: int = 257, tokenizer: Any = None
) -> str:
    """Write a dataset of these documents, each a sequence of tokens; returns its prefix."""
    write_indexed(prefix, (Sequence(np.array(document), True) for document in documents), vocab_size)
    if tokenizer is not None:
        Path(f"{prefix}.facts.json").write_text(
            json.dumps({"source": "a test", "tokenizer": tokenizer.digest})
        )
    return str(prefix)


def sequences_of(tokens: np.ndarray, offsets: np.ndarray | None = None) -> Dataset:
    """These tokens as sequences; a single one where no offsets are given."""
    return Dataset(tokens, np.array([0, len(tokens)]) if offsets is None else offsets, None, "the data")


def load_text(text: str, split: str, tokenizer: Tokenizer) -> Any:
    """What a text becomes: the tokens of its three splits, and what is known of it."""
    shares = Split.parse(split)
    indexed = corpus_of(TextSource(text, shares, mkdtemp()), tokenizer).open()
    assert indexed.made is not None
    splits = (indexed.part(*bounds).tokens for bounds in pairwise(shares.bounds(indexed.sequences)))
    return SimpleNamespace(
        **dict(zip(("train", "validation", "test"), splits, strict=True)), **indexed.made._asdict()
    )


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


TEXTS = ["One.\n", "", "Größe, 大きさ\n\n", "two three " * 40]
BYTES = ByteTokenizer()
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": 7}) + "\n" for text in texts))
    return path


def counted(folder: Path, paths: list[Path], tokenizer: Tokenizer = BYTES, **options: Any) -> Made:
    """What is known of FOLDER/out_text_document, which is made."""
    return preprocess([*map(str, paths)], folder / "out", tokenizer, **{"append_eod": True, **options})[1]


def run(folder: Path, paths: list[Path], tokenizer: Tokenizer = BYTES, **options: Any) -> IndexedDataset:
    counted(folder, paths, tokenizer, **options)
    return read_indexed(str(folder / f"out_{options.get('key', 'text')}_document"))


def documents(indexed: IndexedDataset) -> list[list[int]]:
    bounds = indexed.offsets[indexed.document_bounds]
    return [indexed.tokens[a:b].tolist() for a, b in pairwise(bounds)]


def expected(texts: list[str], tokenizer: Tokenizer = BYTES) -> list[list[int]]:
    return [[*tokenizer.encode(text).tolist(), tokenizer.end_of_document] for text in texts if text]


def write_cache(folder: Path, *lines: str) -> None:
    """As the library of the Hugging Face Hub keeps a dataset: names in `snapshots` are links to `blobs`."""
    data = folder / "snapshots" / "abc" / "data"
    for part in (folder / "blobs", folder / "refs", data):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "blobs" / "0f").write_text("".join(f"{line}\n" for line in lines))
    (folder / "blobs" / "1e").write_text("# A card")
    (data / "train.jsonl").symlink_to("../../../blobs/0f")
    (data.parent / "README.md").symlink_to("../../blobs/1e")
