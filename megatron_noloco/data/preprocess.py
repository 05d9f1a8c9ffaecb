"""Encode text into Megatron's indexed datasets: several processes encode, one writes, in the order of the inputs.

A dataset gets its name, `PREFIX_KEY_document.{bin,idx}`, when it is complete: a run that was stopped is run again.
"""

import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, SIGKILL, signal

import numpy as np

from megatron_noloco.data.corpus import check_outside
from megatron_noloco.data.indexed import IndexedWriter
from megatron_noloco.data.inputs import Batch, Input, read_batches
from megatron_noloco.data.sources import TokenizerChoice
from megatron_noloco.data.tokenizer import Tokenizer, build_tokenizer
from megatron_noloco.files import writing
from megatron_noloco.job.leaving import leave_with_parent

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


@dataclass
class Tally:
    """Counts of what was preprocessed, all keys together."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    not_text: int = 0  # files found in folders and left out, since they are not UTF-8


def check(job: Job) -> None:
    """Raise ValueError when a job cannot be carried out; nothing is written."""
    if not job.prefix.name:
        raise ValueError(f"--output-prefix {job.prefix}: names no file; give one such as data/corpus")
    for place, key in enumerate(job.encoding.json_keys):
        if key in job.encoding.json_keys[:place]:
            raise ValueError(f"--json-keys {key}: is given more than once; give each key once")
        if "/" in key:
            raise ValueError(
                f'--json-keys {key}: its dataset would be a file with this name, which cannot have "/"'
            )
    text = next((item.path for item in job.inputs if item.kind == "text"), None)
    if text is not None and len(job.encoding.json_keys) > 1:
        raise ValueError(f"--json-keys: {text} is plain text, which has no keys; give one key, or JSON lines")
    for folder in {item.folder for item in job.inputs if item.folder is not None}:
        check_outside(job.prefix, "--output-prefix", folder, "--input")
    build_tokenizer(job.encoding.tokenizer)


def preprocess(job: Job, advance: Callable[[int], None]) -> Tally:
    """Carry out a job that passed `check`, and call `advance` with the input bytes of each batch that is written.

    Raises ValueError for an input that cannot be read, and for a dataset that exists or is being written. A file
    gets its name when it is complete.
    """
    vocab_size = build_tokenizer(job.encoding.tokenizer).vocab_size
    writers: dict[str, IndexedWriter] = {}
    tally = Tally()
    try:
        with writing(job.prefix, "--output-prefix"):
            job.prefix.parent.mkdir(parents=True, exist_ok=True)
            for key in job.encoding.json_keys:
                writers[key] = IndexedWriter(job.output(key), vocab_size)
        with closing(_encode_all(job)) as encoded:
            for batch, by_key in encoded:
                tally.not_text += not batch.records
                for key, sequences in by_key.items():
                    tally.empty += batch.count - len(sequences)
                    for number, sequence in enumerate(sequences, 1):
                        ends = batch.ends_document or number < len(sequences)
                        writers[key].add(sequence, ends)
                        tally.tokens += len(sequence)
                        tally.documents += ends
                advance(batch.read_bytes)
        if not tally.documents:
            raise ValueError(
                f"nothing was written: {tally.empty} documents are empty, {tally.not_text} files are no UTF-8 text"
            )
        for writer in writers.values():
            writer.finish()
    finally:
        for writer in writers.values():
            writer.discard()
    return tally


def _encode_all(job: Job) -> Generator[tuple[Batch, Sequences], None, None]:
    """Encode all batches, in order; with several workers, in other processes.

    Futures are submitted in a loop, because `Executor.map` and `Pool.imap` would read all inputs ahead.
    """
    keys = list(job.encoding.json_keys)
    batches = (batch for item in job.inputs for batch in read_batches(item, keys))
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
    except BrokenProcessPool:
        raise ValueError(
            f"one of {job.workers} workers was killed, probably for want of memory; give fewer --workers"
        ) from None
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
