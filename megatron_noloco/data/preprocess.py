"""Text to Megatron's indexed datasets."""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, SIGKILL, signal
from typing import Any

import numpy as np

from megatron_noloco.data.indexed import IndexedWriter
from megatron_noloco.data.inputs import BITE_BYTES, Bite, Input, read_bites
from megatron_noloco.data.sources import TokenizerChoice
from megatron_noloco.data.tokenizer import Tokenizer, build_tokenizer
from megatron_noloco.files import put_in_place, write_text
from megatron_noloco.job.leaving import leave_with_parent


@dataclass(frozen=True)
class Encoding:
    """How records become documents."""

    tokenizer: TokenizerChoice
    json_keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class Encoded:
    """The sequences of a bite under one key."""

    sequences: list[np.ndarray]
    ends_document: bool  # with the last sequence; all others end theirs
    empty: int  # records without text, left out


def encode(bite: Bite, encoding: Encoding) -> dict[str, Encoded]:
    """The bite's sequences by key; raises ValueError that names file and line of what cannot be read."""
    keys = encoding.json_keys
    rows = list(_rows(bite, keys))
    tokenizer = _tokenizer(encoding.tokenizer)
    return {
        key: _encode([row[column] for row in rows], bite, encoding, tokenizer)
        for column, key in enumerate(keys)
    }


def _rows(bite: Bite, keys: tuple[str, ...]) -> Iterator[list[str]]:
    """The texts of each record, in the order of `keys`."""
    path, kind = bite.input.path, bite.input.kind
    for number, record in enumerate(bite.records, bite.first):
        if kind == "text":
            try:
                yield [record.decode()]
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 text ({error.reason})") from None
            continue
        place = _place(bite, number)
        fields = _parse_line(record, place) if kind == "jsonl" else record
        yield [_text(fields, key, place) for key in keys]


def _place(bite: Bite, number: int) -> str:
    return f"{bite.input.path}, {'row' if bite.input.kind == 'parquet' else 'line'} {number}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{place}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{place}: not a JSON object")
    return fields


def _text(fields: dict[str, Any], key: str, place: str) -> str:
    if key not in fields:
        raise ValueError(f"{place}: no key {key!r}; there are {', '.join(fields)} (--json-keys)")
    text = fields[key]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{place}: {key!r} holds {type(text).__name__}, not text (--json-keys)")
    return text or ""


def _encode(texts: list[str], bite: Bite, encoding: Encoding, tokenizer: Tokenizer) -> Encoded:
    try:
        sequences = tokenizer.encode_batch(texts)
    except (TypeError, UnicodeEncodeError):
        bad = next(number for number, text in enumerate(texts, bite.first) if not _is_unicode(text))
        raise ValueError(
            f"{_place(bite, bad)}: holds half a character (a surrogate such as \\ud83d without its other half)"
        ) from None
    if bite.holds_whole_documents:
        sequences = [tokens for tokens in sequences if len(tokens)]
    if encoding.append_eod:
        for index in range(len(sequences) if bite.ends_document else len(sequences) - 1):
            tokens = sequences[index]
            sequences[index] = np.append(tokens, tokens.dtype.type(tokenizer.end_of_document))
    return Encoded(sequences, bite.ends_document, len(texts) - len(sequences))


@cache
def _tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Built once per process."""
    return build_tokenizer(choice)


_NOTES = "job.json"
_PART_BYTES = 1 << 28  # of inputs on disk: what a restart may have to do again
_AHEAD = 4  # bites per worker that are read before they are needed


@dataclass(frozen=True)
class Job:
    inputs: list[Input]
    prefix: Path
    encoding: Encoding
    workers: int

    def output(self, key: str) -> Path:
        """The prefix that the dataset of `key` can be found under."""
        return self.prefix.with_name(f"{self.prefix.name}_{key}_document")

    @property
    def folder(self) -> Path:
        """Where the parts lie until all are done."""
        return self.prefix.with_name(f"{self.prefix.name}.partial")

    def fingerprint(self) -> dict[str, object]:
        """What must be the same for parts of an earlier run to be used."""
        files = [[str(i.path.resolve()), i.bytes, i.path.stat().st_mtime_ns] for i in self.inputs]
        facts = {"encoding": asdict(self.encoding), "tokenizer": self._tokenizer_digests()}
        return json.loads(json.dumps({**facts, "files": files, "bite": BITE_BYTES}))

    def _tokenizer_digests(self) -> list[str]:
        if self.encoding.tokenizer.tokenizer_model is None:
            return []
        model = Path(self.encoding.tokenizer.tokenizer_model)
        files = sorted(model.glob("*.json")) if model.is_dir() else [model]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@dataclass
class Tally:
    """What came of some inputs, over all keys."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    not_text: int = 0  # files in folders that are no UTF-8 text, left out
    read_bytes: int = 0  # of the inputs on disk

    def add(self, other: "Tally") -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def check(job: Job) -> None:
    """Raises ValueError, before any work, for what cannot work."""
    if job.workers < 1:
        raise ValueError(f"--workers must be at least 1, not {job.workers}")
    kinds = {item.kind for item in job.inputs}
    if "text" in kinds and len(job.encoding.json_keys) > 1:
        path = next(item.path for item in job.inputs if item.kind == "text")
        raise ValueError(f"--json-keys: {path} is plain text, which has no keys; give one key, or JSON lines")
    for key in job.encoding.json_keys:
        if Path(f"{job.output(key)}.idx").exists() and not _goes_on(job):
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
    _keep_parts_of_this_job(job)
    tally, parts, place = Tally(), 0, (0, 0)
    while (done := _done(job, parts)).exists():
        note = json.loads(done.read_text())
        tally.add(Tally(**note["tally"]))
        parts, place = parts + 1, tuple(note["place"])
    advance(tally.read_bytes)
    with _Encoder(job.encoding, job.workers) as encoder:
        encoded = encoder.encode(_bites(job, place))
        for first in encoded:
            part, place = _write_part(job, parts, chain([first], encoded), vocab_size, advance)
            write_text(_done(job, parts), json.dumps({"tally": asdict(part), "place": place}))
            tally.add(part)
            parts += 1
    if not tally.documents:
        shutil.rmtree(job.folder)
        raise ValueError(f"all {tally.empty} documents are empty: nothing was written")
    _publish(job, parts, vocab_size)
    return tally


def _keep_parts_of_this_job(job: Job) -> None:
    """Those that a run of the same job left; those of any other are removed."""
    if not _goes_on(job):
        shutil.rmtree(job.folder, ignore_errors=True)
        try:
            job.folder.mkdir()
        except OSError as error:
            raise ValueError(f"--output-prefix {job.prefix}: cannot be written: {error.strerror}") from None
        write_text(job.folder / _NOTES, json.dumps(job.fingerprint()))


def _goes_on(job: Job) -> bool:
    """Whether a run of the same job was stopped here, be it while its datasets were put in place."""
    notes = job.folder / _NOTES
    return notes.exists() and json.loads(notes.read_text()) == job.fingerprint()


def _bites(job: Job, after: tuple[int, int]) -> Iterator[Bite]:
    """All bites of the inputs behind a place; those before it in the same file are read, but not encoded."""
    for item in job.inputs[after[0] :]:
        for bite in read_bites(item, list(job.encoding.json_keys)):
            if bite.place > after:
                yield bite


def _write_part(
    job: Job,
    index: int,
    encoded: Iterator[tuple[Bite, dict[str, Encoded]]],
    vocab_size: int,
    advance: Callable[[int], None],
) -> tuple[Tally, tuple[int, int]]:
    """Write `_PART_BYTES` of the inputs, or the rest; what came of it, and the place of its last bite."""
    tally = Tally()
    writers = {key: IndexedWriter(_part(job, index, key), vocab_size) for key in job.encoding.json_keys}
    for bite, by_key in encoded:
        tally.not_text += not bite.records
        for key, result in by_key.items():
            tally.empty += result.empty
            tally.tokens += sum(map(len, result.sequences))
            for place, sequence in enumerate(result.sequences, 1):
                ends = result.ends_document or place < len(result.sequences)
                writers[key].add(sequence, ends)
                tally.documents += ends
        tally.read_bytes += bite.read_bytes
        advance(bite.read_bytes)
        if tally.read_bytes >= _PART_BYTES:
            break
    for writer in writers.values():
        writer.finish()
    return tally, bite.place


def _publish(job: Job, parts: int, vocab_size: int) -> None:
    """Put the datasets in place; an index only when its tokens are there and safe."""
    for key in job.encoding.json_keys:
        whole = _part(job, 0, key)
        if parts > 1:
            whole = job.folder / key
            writer = IndexedWriter(whole, vocab_size)
            for index in range(parts):
                writer.add_prefix(_part(job, index, key))
            writer.finish()
        for suffix in (".bin", ".idx"):
            source = Path(f"{whole}{suffix}")
            if source.exists():  # else a run that was stopped here had moved it already
                put_in_place(source, Path(f"{job.output(key)}{suffix}"))
    shutil.rmtree(job.folder)


def _done(job: Job, index: int) -> Path:
    return job.folder / f"{index:05d}.json"


def _part(job: Job, index: int, key: str) -> Path:
    return job.folder / f"{index:05d}_{key}"


class _Encoder:
    """Encodes bites in order; with several workers, in other processes. Use as a context manager."""

    def __init__(self, encoding: Encoding, workers: int) -> None:
        self._encoding = encoding
        self._ahead = _AHEAD * workers
        # spawn: this process may have threads (a progress bar's), which a fork would copy in mid-air
        spawn = get_context("spawn")
        self._pool = None
        if workers > 1:
            self._pool = ProcessPoolExecutor(workers, spawn, _begin_worker, (os.getpid(),))

    def __enter__(self) -> "_Encoder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def encode(self, bites: Iterator[Bite]) -> Iterator[tuple[Bite, dict[str, Encoded]]]:
        if self._pool is None:
            yield from ((bite, encode(bite, self._encoding)) for bite in bites)
            return
        waiting: deque[tuple[Bite, Future[dict[str, Encoded]]]] = deque()
        for bite in bites:
            waiting.append((bite, self._pool.submit(encode, bite, self._encoding)))
            if len(waiting) >= self._ahead:
                earliest, future = waiting.popleft()
                yield earliest, future.result()
        for earliest, future in waiting:
            yield earliest, future.result()


def _begin_worker(parent: int) -> None:
    """Ctrl-C, which reaches workers too, is for the process they work for; when that ends they end as well."""
    signal(SIGINT, SIG_IGN)
    leave_with_parent()
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), SIGKILL)
