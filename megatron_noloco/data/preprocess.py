"""Encode text into Megatron's indexed datasets: several processes encode, one writes, in the order of the inputs.

Each 256 MB of input become a part in `PREFIX.partial/`, which a JSON file marks as done. A run that was stopped
continues after its last done part. At the end the parts are joined to `PREFIX_KEY_document.bin` and, last of all,
`.idx`: where there is an index, the dataset is complete.
"""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, SIGKILL, signal

import numpy as np

from megatron_noloco.data.indexed import IndexedWriter
from megatron_noloco.data.inputs import BATCH_BYTES, Batch, Input, read_batches
from megatron_noloco.data.sources import TokenizerChoice
from megatron_noloco.data.tokenizer import Tokenizer, build_tokenizer
from megatron_noloco.files import put_in_place, write_text, writing
from megatron_noloco.job.leaving import leave_with_parent

_JOB_FILE = "job.json"
_PART_BYTES = 1 << 28  # of inputs on disk: what a restart may have to do again
_AHEAD = 4  # batches per worker that are read ahead

Sequences = dict[str, list[np.ndarray]]  # key -> the encoded texts of a batch


@dataclass(frozen=True)
class Encoding:
    """How records become documents."""

    tokenizer: TokenizerChoice
    json_keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class Job:
    """What one command preprocesses: inputs, output and settings."""

    inputs: list[Input]
    prefix: Path
    encoding: Encoding
    workers: int

    def output(self, key: str) -> Path:
        """Return the prefix of the finished dataset of `key`."""
        return self.prefix.with_name(f"{self.prefix.name}_{key}_document")

    @property
    def folder(self) -> Path:
        """The folder of the parts; removed when the datasets are in place."""
        return self.prefix.with_name(f"{self.prefix.name}.partial")

    def part(self, index: int, key: str) -> Path:
        """Return the prefix of one part of the dataset of `key`."""
        return self.folder / f"{index:05d}_{key}"

    def done_marker(self, index: int) -> Path:
        """Return the file that marks a part as done."""
        return self.folder / f"{index:05d}.json"

    def fingerprint(self) -> dict[str, object]:
        """Return what must be unchanged for the parts of an earlier run to be used, as JSON values."""
        files = [[str(i.path.resolve()), i.bytes, i.path.stat().st_mtime_ns] for i in self.inputs]
        fingerprint = {
            "encoding": asdict(self.encoding),
            "tokenizer": self._tokenizer_digests(),
            "files": files,
            "batch": BATCH_BYTES,
        }
        return json.loads(json.dumps(fingerprint))

    def _tokenizer_digests(self) -> list[str]:
        if self.encoding.tokenizer.tokenizer_model is None:
            return []
        model = Path(self.encoding.tokenizer.tokenizer_model)
        files = sorted(model.glob("*.json")) if model.is_dir() else [model]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

    def can_continue(self) -> bool:
        """Return whether there are parts of an earlier run of the same job, which was stopped."""
        saved = self.folder / _JOB_FILE
        return saved.exists() and json.loads(saved.read_text()) == self.fingerprint()


@dataclass
class Tally:
    """Counts of what was preprocessed, all keys together."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    not_text: int = 0  # files found in folders and left out, since they are not UTF-8
    read_bytes: int = 0  # of the inputs on disk

    def add(self, other: "Tally") -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def check(job: Job) -> None:
    """Raise ValueError when a job cannot be carried out; nothing is written."""
    text = next((item.path for item in job.inputs if item.kind == "text"), None)
    if text is not None and len(job.encoding.json_keys) > 1:
        raise ValueError(f"--json-keys: {text} is plain text, which has no keys; give one key, or JSON lines")
    for key in job.encoding.json_keys:
        if Path(f"{job.output(key)}.idx").exists() and not job.can_continue():
            raise ValueError(
                f"{job.output(key)}.idx exists already; remove it or give another --output-prefix"
            )
    if not job.prefix.parent.is_dir():
        raise ValueError(f"--output-prefix {job.prefix}: no folder {job.prefix.parent}")
    for folder in {item.folder for item in job.inputs if item.folder is not None}:
        if job.prefix.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"--output-prefix {job.prefix} lies in the input folder {folder}: what is written there would "
                "be read as text; give a prefix outside of it"
            )
    build_tokenizer(job.encoding.tokenizer)


def preprocess(job: Job, advance: Callable[[int], None]) -> Tally:
    """Carry out a job that passed `check`, and call `advance` with the input bytes of each batch that is written.

    Raises ValueError for an input that cannot be read; parts that are done stay for the next run.
    """
    vocab_size = build_tokenizer(job.encoding.tokenizer).vocab_size
    if not job.can_continue():
        shutil.rmtree(job.folder, ignore_errors=True)
        with writing(job.prefix, "--output-prefix"):
            job.folder.mkdir()
        write_text(job.folder / _JOB_FILE, json.dumps(job.fingerprint()))
    tally, parts, place = Tally(), 0, (0, 0)
    while job.done_marker(parts).exists():
        done = json.loads(job.done_marker(parts).read_text())
        tally.add(Tally(**done["tally"]))
        parts, place = parts + 1, tuple(done["place"])
    advance(tally.read_bytes)
    with closing(_encode_all(job, place)) as encoded:
        for first in encoded:
            part, place = _write_part(job, parts, chain([first], encoded), vocab_size, advance)
            write_text(job.done_marker(parts), json.dumps({"tally": asdict(part), "place": place}))
            tally.add(part)
            parts += 1
    if not tally.documents:
        shutil.rmtree(job.folder)
        raise ValueError(f"all {tally.empty} documents are empty: nothing was written")
    _publish(job, parts, vocab_size)
    return tally


def _encode_all(job: Job, after: tuple[int, int]) -> Generator[tuple[Batch, Sequences], None, None]:
    """Encode all batches after a place, in order; with several workers, in other processes.

    Earlier batches of the same file are read, but not encoded. Futures are submitted in a loop, because
    `Executor.map` and `Pool.imap` would read all inputs ahead.
    """
    keys = list(job.encoding.json_keys)
    batches = (
        batch for item in job.inputs[after[0] :] for batch in read_batches(item, keys) if batch.place > after
    )
    if job.workers == 1:
        yield from ((batch, encode(batch, job.encoding)) for batch in batches)
        return
    # spawn, not fork: this process may have other threads, a progress bar's, whose locks a fork would copy as held
    pool = ProcessPoolExecutor(job.workers, get_context("spawn"), _begin_worker, (os.getpid(),))
    try:
        pending: deque[tuple[Batch, Future[Sequences]]] = deque()
        for batch in batches:
            pending.append((batch, pool.submit(encode, batch, job.encoding)))
            if len(pending) >= _AHEAD * job.workers:
                earliest, future = pending.popleft()
                yield earliest, future.result()
        for earliest, future in pending:
            yield earliest, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int) -> None:
    """Make a worker end with its parent, and ignore Ctrl-C, which the parent handles."""
    signal(SIGINT, SIG_IGN)
    leave_with_parent()
    if os.getppid() != parent:  # the parent ended before the line above
        os.kill(os.getpid(), SIGKILL)


def encode(batch: Batch, encoding: Encoding) -> Sequences:
    """Encode a batch in a worker; empty documents are left out.

    Raises ValueError that names the file, and the line or row, of a record that cannot be read.
    """
    tokenizer, rows = _tokenizer(encoding.tokenizer), batch.texts(encoding.json_keys)
    encoded = {}
    for column, key in enumerate(encoding.json_keys):
        sequences = tokenizer.encode_batch([row[column] for row in rows])
        if batch.holds_whole_documents:
            sequences = [tokens for tokens in sequences if len(tokens)]
        if encoding.append_eod:
            for index in range(len(sequences) if batch.ends_document else len(sequences) - 1):
                tokens = sequences[index]
                sequences[index] = np.append(tokens, tokens.dtype.type(tokenizer.end_of_document))
        encoded[key] = sequences
    return encoded


@cache
def _tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Build the tokenizer once per process."""
    return build_tokenizer(choice)


def _write_part(
    job: Job,
    index: int,
    encoded: Iterator[tuple[Batch, Sequences]],
    vocab_size: int,
    advance: Callable[[int], None],
) -> tuple[Tally, tuple[int, int]]:
    """Write one part, `_PART_BYTES` of input or the rest; return its counts and the place of its last batch."""
    tally = Tally()
    writers = {key: IndexedWriter(job.part(index, key), vocab_size) for key in job.encoding.json_keys}
    for batch, by_key in encoded:
        tally.not_text += not batch.records
        for key, sequences in by_key.items():
            tally.empty += len(batch.records) - len(sequences)
            for number, sequence in enumerate(sequences, 1):
                ends = batch.ends_document or number < len(sequences)
                writers[key].add(sequence, ends)
                tally.tokens += len(sequence)
                tally.documents += ends
        tally.read_bytes += batch.read_bytes
        advance(batch.read_bytes)
        if tally.read_bytes >= _PART_BYTES:
            break
    for writer in writers.values():
        writer.finish()
    return tally, batch.place


def _publish(job: Job, parts: int, vocab_size: int) -> None:
    """Join the parts and put the datasets in place, each index after its tokens are synced to disk."""
    for key in job.encoding.json_keys:
        whole = job.part(0, key)
        if parts > 1:
            whole = job.folder / key
            writer = IndexedWriter(whole, vocab_size)
            for index in range(parts):
                writer.add_prefix(job.part(index, key))
            writer.finish()
        for suffix in (".bin", ".idx"):
            source = Path(f"{whole}{suffix}")
            if source.exists():  # otherwise an earlier run put it in place before it was stopped
                put_in_place(source, Path(f"{job.output(key)}{suffix}"))
    shutil.rmtree(job.folder)
