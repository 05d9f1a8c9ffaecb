"""Text to Megatron's indexed datasets: several processes encode, one writes, in the order of the inputs.

Every 256 MB of input become a part, written under a name of its own in `PREFIX.partial/` and marked as done by its
JSON file. A run that was stopped continues after its last done part. At the end the parts become
`PREFIX_KEY_document.bin` and, last of all, `.idx`: where there is an index, the dataset is complete.
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

_NOTES = "job.json"
_PART_BYTES = 1 << 28  # of inputs on disk: what a restart may have to do again
_AHEAD = 4  # batches per worker that are read before they are needed

Sequences = dict[str, list[np.ndarray]]  # key -> the encoded texts of a batch


@dataclass(frozen=True)
class Encoding:
    """How records become documents."""

    tokenizer: TokenizerChoice
    json_keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class Job:
    """What one command preprocesses, to where, and how."""

    inputs: list[Input]
    prefix: Path
    encoding: Encoding
    workers: int

    def output(self, key: str) -> Path:
        """Return the prefix under which the dataset of `key` is put in place."""
        return self.prefix.with_name(f"{self.prefix.name}_{key}_document")

    @property
    def folder(self) -> Path:
        """The folder of the parts until all are done."""
        return self.prefix.with_name(f"{self.prefix.name}.partial")

    def part(self, index: int, key: str) -> Path:
        """Return the prefix of one part of the dataset of `key`."""
        return self.folder / f"{index:05d}_{key}"

    def mark(self, index: int) -> Path:
        """Return the file that marks a part as done."""
        return self.folder / f"{index:05d}.json"

    def fingerprint(self) -> dict[str, object]:
        """Return what must be the same for parts of an earlier run to be used."""
        files = [[str(i.path.resolve()), i.bytes, i.path.stat().st_mtime_ns] for i in self.inputs]
        facts = {"encoding": asdict(self.encoding), "tokenizer": self._tokenizer_digests()}
        return json.loads(json.dumps({**facts, "files": files, "batch": BATCH_BYTES}))

    def _tokenizer_digests(self) -> list[str]:
        if self.encoding.tokenizer.tokenizer_model is None:
            return []
        model = Path(self.encoding.tokenizer.tokenizer_model)
        files = sorted(model.glob("*.json")) if model.is_dir() else [model]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

    def continues(self) -> bool:
        """Return whether an earlier run of the same job was stopped, be it while it put its datasets in place."""
        notes = self.folder / _NOTES
        return notes.exists() and json.loads(notes.read_text()) == self.fingerprint()


@dataclass
class Tally:
    """Counts over some inputs and all keys."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    not_text: int = 0  # files in folders that are no UTF-8 text, left out
    read_bytes: int = 0  # of the inputs on disk

    def add(self, other: "Tally") -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def check(job: Job) -> None:
    """Check a job before any work; raises ValueError."""
    text = next((item.path for item in job.inputs if item.kind == "text"), None)
    if text is not None and len(job.encoding.json_keys) > 1:
        raise ValueError(f"--json-keys: {text} is plain text, which has no keys; give one key, or JSON lines")
    for key in job.encoding.json_keys:
        if Path(f"{job.output(key)}.idx").exists() and not job.continues():
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
    """Carry out a job that passed `check`; calls `advance` with bytes of the inputs as they are done.

    Raises ValueError for an input that cannot be read; the parts done before it stay.
    """
    vocab_size = build_tokenizer(job.encoding.tokenizer).vocab_size
    if not job.continues():
        shutil.rmtree(job.folder, ignore_errors=True)
        with writing(job.prefix, "--output-prefix"):
            job.folder.mkdir()
        write_text(job.folder / _NOTES, json.dumps(job.fingerprint()))
    tally, parts, place = Tally(), 0, (0, 0)
    while job.mark(parts).exists():
        note = json.loads(job.mark(parts).read_text())
        tally.add(Tally(**note["tally"]))
        parts, place = parts + 1, tuple(note["place"])
    advance(tally.read_bytes)
    with closing(_encoded(job, place)) as encoded:
        for first in encoded:
            part, place = _write_part(job, parts, chain([first], encoded), vocab_size, advance)
            write_text(job.mark(parts), json.dumps({"tally": asdict(part), "place": place}))
            tally.add(part)
            parts += 1
    if not tally.documents:
        shutil.rmtree(job.folder)
        raise ValueError(f"all {tally.empty} documents are empty: nothing was written")
    _publish(job, parts, vocab_size)
    return tally


def _encoded(job: Job, after: tuple[int, int]) -> Generator[tuple[Batch, Sequences], None, None]:
    """Encode all batches behind a place, in order; with several workers, in other processes.

    Batches before the place in the same file are read, but not encoded. The pool is our own loop over futures
    because `Executor.map` and `Pool.imap` would read all inputs ahead.
    """
    keys = list(job.encoding.json_keys)
    batches = (
        batch for item in job.inputs[after[0] :] for batch in read_batches(item, keys) if batch.place > after
    )
    if job.workers == 1:
        yield from ((batch, encode(batch, job.encoding)) for batch in batches)
        return
    # spawn: this process may have threads (a progress bar's), which a fork would copy in mid-air
    pool = ProcessPoolExecutor(job.workers, get_context("spawn"), _begin_worker, (os.getpid(),))
    try:
        waiting: deque[tuple[Batch, Future[Sequences]]] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(encode, batch, job.encoding)))
            if len(waiting) >= _AHEAD * job.workers:
                earliest, future = waiting.popleft()
                yield earliest, future.result()
        for earliest, future in waiting:
            yield earliest, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int) -> None:
    """Make a worker end with its parent, and leave Ctrl-C, which reaches workers too, to the parent."""
    signal(SIGINT, SIG_IGN)
    leave_with_parent()
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), SIGKILL)


def encode(batch: Batch, encoding: Encoding) -> Sequences:
    """Encode a batch, in a worker; documents without text are left out.

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
    """Return the tokenizer, which is built once per process."""
    return build_tokenizer(choice)


def _write_part(
    job: Job,
    index: int,
    encoded: Iterator[tuple[Batch, Sequences]],
    vocab_size: int,
    advance: Callable[[int], None],
) -> tuple[Tally, tuple[int, int]]:
    """Write `_PART_BYTES` of the inputs, or the rest; return its counts, and the place of its last batch."""
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
    """Put the datasets in place; an index only when its tokens are there and safe."""
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
            if source.exists():  # else a run that was stopped here had moved it already
                put_in_place(source, Path(f"{job.output(key)}{suffix}"))
    shutil.rmtree(job.folder)
