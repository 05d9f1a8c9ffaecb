"""Preprocessing: every kind of input becomes what Megatron-core reads, token for token, whole or not at all."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_noloco.data import corpus, inputs, preprocess
from megatron_noloco.data.indexed import IndexedTokens, IndexedWriter
from megatron_noloco.data.inputs import find_inputs
from megatron_noloco.data.preprocess import Encoding, Job
from megatron_noloco.data.sources import TokenizerChoice
from megatron_noloco.data.tokenizer import FastTokenizer, build_tokenizer
from megatron_noloco.files import put_in_place

ROOT = Path(__file__).parents[2]
PREPROCESS = [sys.executable, "tools/preprocess_data.py"]  # the command by its name in Megatron-LM
TEXTS = ["One.\n", "", "Größe, 大きさ\n\n", "two three " * 40]
BYTES = Encoding(TokenizerChoice("byte"), ("text",), append_eod=True)


def fast_encoding(folder: Path) -> Encoding:
    return Encoding(TokenizerChoice("HuggingFaceTokenizer", str(folder)), ("text",), append_eod=True)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small byte-level BPE."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path, vocab_size: int = 300) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["two three four five six seven eight nine ten"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "<end>", "special": True}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": 7}) + "\n" for text in texts))
    return path


def run(folder: Path, paths: list[Path], encoding: Encoding = BYTES, workers: int = 1) -> IndexedTokens:
    job = Job(find_inputs(map(str, paths)), folder / "out", encoding, workers)
    preprocess.check(job)
    preprocess.preprocess(job, lambda _: None)
    return IndexedTokens(str(folder / "out_text_document"))


def documents(indexed: IndexedTokens) -> list[list[int]]:
    bounds = indexed.offsets[indexed.document_bounds]
    return [indexed.tokens[a:b].tolist() for a, b in pairwise(bounds)]


def expected(texts: list[str], encoding: Encoding = BYTES) -> list[list[int]]:
    tokenizer = build_tokenizer(encoding.tokenizer)
    end = [tokenizer.end_of_document] if encoding.append_eod else []
    return [tokenizer.encode(text).tolist() + end for text in texts if text]


def test_megatron_core_reads_it_token_for_token(tmp_path: Path, fast: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    encoding = fast_encoding(fast)
    run(tmp_path, [write_jsonl(tmp_path / "a.jsonl", TEXTS)], encoding)
    theirs = IndexedDataset(str(tmp_path / "out_text_document"))
    assert theirs.index.dtype == np.uint16
    assert [document.tolist() for document in theirs] == expected(TEXTS, encoding)
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]


def test_what_megatron_core_wrote_is_read(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    builder.add_document(torch.arange(5), [2, 3])
    builder.add_item(torch.tensor([100_000]))
    builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = IndexedTokens(str(tmp_path / "theirs"))
    assert documents(ours) == [[0, 1, 2, 3, 4], [100_000]]
    assert ours.lengths.tolist() == [2, 3, 1]
    assert ours.part(1, 3).tolist() == [2, 3, 4, 100_000]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "parquet"])
def test_every_format_gives_the_same(tmp_path: Path, kind: str) -> None:
    path, lines = tmp_path / f"a.{kind}", write_jsonl(tmp_path / "source", TEXTS).read_bytes()
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"id": [7] * len(TEXTS), "text": TEXTS}), path)
    elif kind.endswith("gz"):
        path.write_bytes(gzip.compress(lines))
    elif kind.endswith("zst"):
        path.write_bytes(b"".join(zstd(part) for part in (lines[:50], lines[50:])))
    else:
        path.write_bytes(lines)
    assert documents(run(tmp_path, [path])) == expected(TEXTS)


def test_a_folder_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / ".hidden").write_text("hidden")
    (folder / "b.txt").write_text("second")
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    (folder / "below" / "c").write_text("third")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "late.bin").write_bytes(b"text for a while\n" * 50_000 + b"\xff")
    (folder / "empty.txt").write_text("")
    job = Job(find_inputs([str(folder)]), tmp_path / "out", BYTES, 1)
    tally = preprocess.preprocess(job, lambda _: None)
    assert documents(IndexedTokens(str(job.output("text")))) == expected(["first", "second", "third"])
    assert (tally.documents, tally.not_text) == (3, 2)


def test_a_long_text_is_one_document_of_several_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 50)
    text = "".join(f"line {number} of a long text\n" for number in range(30))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("short")
    indexed = run(tmp_path, [tmp_path / "a.txt", tmp_path / "b.txt"])
    assert documents(indexed) == expected([text, "short"])
    assert len(indexed.lengths) > 5


def test_one_dataset_per_key_and_no_ends(tmp_path: Path) -> None:
    rows = [{"title": "T1", "body": "B1"}, {"title": None, "body": "B2"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encoding = Encoding(TokenizerChoice("byte"), ("title", "body"), append_eod=False)
    job = Job(find_inputs([str(tmp_path / "a.jsonl")]), tmp_path / "out", encoding, 1)
    tally = preprocess.preprocess(job, lambda _: None)
    assert (tally.documents, tally.tokens, tally.empty) == (3, 6, 1)
    assert documents(IndexedTokens(str(tmp_path / "out_title_document"))) == [list(b"T1")]
    assert documents(IndexedTokens(str(tmp_path / "out_body_document"))) == [list(b"B1"), list(b"B2")]


def noted(monkeypatch: pytest.MonkeyPatch, die_at: int | None = None) -> list[tuple[int, int]]:
    """The places of the batches that are encoded from now on; the process "dies" at the batch of that number."""
    places: list[tuple[int, int]] = []
    encode = preprocess.encode

    def noting(batch: Any, encoding: Encoding) -> Any:
        if len(places) == die_at:
            raise KeyboardInterrupt
        places.append(batch.place)
        return encode(batch, encoding)

    monkeypatch.setattr(preprocess, "encode", noting)
    return places


@pytest.mark.parametrize(
    ("kind", "die_at"),
    [("jsonl", 0), ("jsonl", 1), ("jsonl", 6), ("jsonl.gz", 4), ("parquet", 4), ("txt", 4)],
)
def test_one_large_file_continues_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, die_at: int
) -> None:
    texts = [f"{number} " * 50 for number in range(2000)]
    path = tmp_path / f"large.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"text": texts}), path)
    elif kind == "txt":
        path.write_text("".join(f"{text}\n" for text in texts))
    else:
        lines = write_jsonl(tmp_path / "source", texts).read_bytes()
        path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    monkeypatch.setattr(inputs, "BATCH_BYTES", 50_000)
    monkeypatch.setattr(corpus, "PIECE_BYTES", 50_000)
    (tmp_path / "whole").mkdir()
    with monkeypatch.context() as patch:
        all_places = noted(patch)
        whole = run(tmp_path / "whole", [path])
    monkeypatch.setattr(preprocess, "_PART_BYTES", path.stat().st_size // 5)
    with monkeypatch.context() as patch:
        before = noted(patch, die_at)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, [path])
    after = noted(monkeypatch)
    resumed = run(tmp_path, [path])
    assert len(before) == die_at < len(all_places)
    assert after == all_places[-len(after) :]
    assert len(all_places) - die_at <= len(after) < len(all_places) or die_at <= 1
    assert documents(resumed) == documents(whole)
    assert resumed.lengths.tolist() == whole.lengths.tolist()


class TestStopped:
    """A job of three parts that dies in the second."""

    @pytest.fixture
    def job(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
        monkeypatch.setattr(preprocess, "_PART_BYTES", 1)
        paths = [write_jsonl(tmp_path / f"{name}.jsonl", [name * 9]) for name in "abc"]
        job = Job(find_inputs(map(str, paths)), tmp_path / "out", BYTES, 1)
        read_batches = preprocess.read_batches
        broken = lambda item, columns: read_batches(item, columns) if item.path.name != "b.jsonl" else 1 / 0  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(preprocess, "read_batches", broken)
            with pytest.raises(ZeroDivisionError):
                preprocess.preprocess(job, lambda _: None)
        return job

    def test_it_continues_where_it_was(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not list(job.prefix.parent.glob("out_text_document*"))
        encoded = noted(monkeypatch)
        done_bytes: list[int] = []
        tally = preprocess.preprocess(job, done_bytes.append)
        assert [place for place, _ in encoded] == [1, 2]
        assert sum(done_bytes) == tally.read_bytes == sum(item.bytes for item in job.inputs)
        assert tally.documents == 3
        assert documents(IndexedTokens(str(job.output("text")))) == expected([name * 9 for name in "abc"])
        assert not job.folder.exists()

    def test_other_text_starts_over(self, job: Job) -> None:
        write_jsonl(job.inputs[0].path, ["changed!"])
        preprocess.preprocess(job, lambda _: None)
        assert documents(IndexedTokens(str(job.output("text"))))[0] == expected(["changed!"])[0]

    def test_another_tokenizer_at_the_same_path_starts_over(self, tmp_path: Path) -> None:
        fast = tmp_path / "tokenizer"
        fast.mkdir()
        make_tokenizer(fast)
        encoding = fast_encoding(fast)
        inputs = find_inputs([str(write_jsonl(tmp_path / "a.jsonl", ["two"]))])
        before = Job(inputs, tmp_path / "out", encoding, 1).fingerprint()
        make_tokenizer(fast, vocab_size=270)
        assert Job(inputs, tmp_path / "out", encoding, 1).fingerprint() != before


def test_a_prefix_among_the_inputs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    job = Job(find_inputs([str(tmp_path / "texts")]), tmp_path / "texts" / "out", BYTES, 1)
    with pytest.raises(
        ValueError, match=r"^--output-prefix .*/texts/out lies in the input folder .*/texts: "
    ):
        preprocess.check(job)


@pytest.mark.parametrize("notice", [signal.SIGTERM, signal.SIGKILL])
def test_workers_go_with_their_process(tmp_path: Path, notice: signal.Signals) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["two three " * 2000] * 5000)
    command = [*PREPROCESS, "--input", str(tmp_path / "a.jsonl")]
    command += ["--workers", "2", "--output-prefix", str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob("out.partial/*.bin")) and time.monotonic() < deadline:
                time.sleep(0.05)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.send_signal(notice)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert len(children) >= 2
    deadline = time.monotonic() + 30
    while any(_runs(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [child for child in children if _runs(child)]
    if notice == signal.SIGTERM:
        assert process.returncode == 130
        assert without_torch(said) == "stopped; the same command continues after the last finished part\n"


def without_torch(said: str) -> str:
    """What torch built for CUDA says where there are CUDA's tools and no GPU."""
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if "No CUDA runtime is found" not in line)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("part_bytes", [1, 1000])
def test_wherever_publishing_is_stopped_an_index_means_a_whole_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(preprocess, "_PART_BYTES", part_bytes)
    keys = ("a", "b")
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"a": f"A{number}", "b": f"B{number}"}))
    job = Job(
        find_inputs([str(tmp_path / f"{number}.jsonl") for number in range(2)]),
        tmp_path / "out",
        Encoding(TokenizerChoice("byte"), keys, append_eod=False),
        1,
    )
    stops = 0
    while _stopped_at(stops, job, monkeypatch):
        for key in keys:
            if Path(f"{job.output(key)}.idx").exists():
                whole = documents(IndexedTokens(str(job.output(key))))
                assert whole == [list(f"{key.upper()}{number}".encode()) for number in range(2)]
        preprocess.check(job)  # the same job may continue
        preprocess.preprocess(job, lambda _: None)
        assert all(len(documents(IndexedTokens(str(job.output(key))))) == 2 for key in keys)
        for path in tmp_path.glob("out*"):
            path.unlink()
        stops += 1
    assert stops == 8


def _stopped_at(last: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the job, stopped right before or after a file is put in place; False: it ended before that."""
    calls = iter(range(100))

    def put(finished: Path, path: Path) -> None:
        for step in (lambda: None, lambda: put_in_place(finished, path)):
            step()
            if next(calls) == last:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "put_in_place", put)
        preprocess.check(job)
        try:
            preprocess.preprocess(job, lambda _: None)
        except KeyboardInterrupt:
            return True
    return False


def test_a_part_is_on_the_disk_before_it_is_marked_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync, mark = set(), os.fsync, preprocess.write_text

    def note(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def marked(path: Path, text: str) -> None:
        written = [file for suffix in ("bin", "idx") for file in path.parent.glob(f"*.{suffix}")]
        assert synced >= {file.stat().st_ino for file in written}
        marks.append(len(written))
        mark(path, text)

    marks: list[int] = []
    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(preprocess, "write_text", marked)
    run(tmp_path, [write_jsonl(tmp_path / "a.jsonl", ["one", "two"])])
    assert marks == [0, 2], "the notes of the job, and a part"


def test_what_a_tokenizer_remembers_of_its_model_does_not_cut_texts(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = FastTokenizer(tmp_path)
    assert found.decode(found.encode("two three four five")) == "two three four five"
    assert len(found.encode("two three four five")) != 9


NO_END = "no end-of-document token; name it as eos_token"


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json: not a JSON object$"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not a JSON object$"),
        ("tokenizer_config.json", "{}", NO_END),
        *(("tokenizer_config.json", json.dumps({"eos_token": end}), NO_END) for end in ({}, ["<end>"], 5)),
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer"),
    ],
)
def test_broken_files_of_a_tokenizer(tmp_path: Path, name: str, content: str, line: str) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=line):
        FastTokenizer(tmp_path)


def test_a_fast_tokenizer_is_the_one_that_transformers_loads(tmp_path: Path, fast: Path) -> None:
    from transformers import AutoTokenizer

    ours = FastTokenizer(fast)
    ours.save(tmp_path, max_length=64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "two three <end> Größe\n"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist()
    assert (theirs.eos_token_id, theirs.model_max_length) == (ours.end_of_document, 64)
    assert ours.vocab_size == len(theirs)
    assert ours.decode([*ours.encode("two six\n"), ours.end_of_document]) == "two six\n"


def call_preprocess(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Preprocess a.jsonl in the folder with two workers."""
    command = [*PREPROCESS, "--input", str(folder / "a.jsonl")]
    command += ["--output-prefix", str(folder / "out"), "--workers", "2", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_two_workers_give_the_same(tmp_path: Path, fast: Path) -> None:
    texts = [f"two three {number}" for number in range(100)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(fast))
    first = call_preprocess(tmp_path, "--append-eod", *tokenizer)
    assert (first.returncode, without_torch(first.stderr)) == (0, "")
    encoding = fast_encoding(fast)
    indexed = IndexedTokens(str(tmp_path / "out_text_document"))
    assert documents(indexed) == expected(texts, encoding)
    assert first.stdout.startswith(f"100 documents, {len(indexed.tokens)} tokens\n")
    with pytest.raises(ValueError, match=r"out_text_document\.idx exists already"):
        run(tmp_path, [tmp_path / "a.jsonl"], encoding)


def test_a_bad_line_in_a_worker_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text"\n')
    finished = call_preprocess(tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith(f"{tmp_path / 'a.jsonl'}, line 2: not JSON")
    assert finished.stderr.count("\n") == 1


BAD_INPUTS: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("a.jsonl", b'{"text": "x"}\n{"text": \n', {}, r"a\.jsonl, line 2: not JSON"),
    ("a.jsonl", b"[1]\n", {}, r"line 1: not a JSON object"),
    ("a.jsonl", b'{"body": "x"}\n', {}, r"line 1: no key 'text'; there are body"),
    ("a.jsonl", b'{"text": 3}\n', {}, r"'text' holds int, not text"),
    ("a.jsonl", b'{"text": ""}\n', {}, r"all 1 documents are empty"),
    ("a.jsonl.gz", gzip.compress(b"x" * 99)[:-9], {}, r"a\.jsonl\.gz: cannot be decompressed"),
    ("a.jsonl.gz", b"plain", {}, r"cannot be decompressed"),
    ("a.txt.gz", gzip.compress(b"x" * 99)[:10] + b"\xff" * 20, {}, r"a\.txt\.gz: cannot be decompressed"),
    ("a.txt.zst", zstd(os.urandom(9999))[:5000], {}, r"a\.txt\.zst: cannot be decompressed"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\\ud83d"}\n', {}, r"a\.jsonl, line 2: holds half a character"),
    ("a.jsonl.zst", b"plain", {}, r"a\.jsonl\.zst: cannot be decompressed"),
    ("a.parquet", b"plain", {}, r"a\.parquet: not a valid Parquet file"),
    ("a.txt", b"\xff\xfe", {}, r"a\.txt: not UTF-8 text"),
    ("a.txt", b"", {}, r"holds no files with text"),
    ("a.txt", b"x", {"json_keys": ("a", "b")}, r"a\.txt is plain text, which has no keys"),
    ("a.txt", b"x", {"tokenizer": TokenizerChoice("HuggingFaceTokenizer")}, r"needs tokenizer_model"),
    (
        "a.txt",
        b"x",
        {"tokenizer": TokenizerChoice("HuggingFaceTokenizer", "/nowhere")},
        r"tokenizer_model /nowhere: no tokenizer\.json there",
    ),
]


@pytest.mark.parametrize(("name", "content", "edits", "line"), BAD_INPUTS, ids=[row[3] for row in BAD_INPUTS])
def test_bad_input_is_one_line(
    tmp_path: Path, name: str, content: bytes, edits: dict[str, Any], line: str
) -> None:
    (tmp_path / name).write_bytes(content)
    options = {"tokenizer": TokenizerChoice("byte"), "json_keys": ("text",)} | edits
    with pytest.raises(ValueError, match=line) as caught:
        run(tmp_path, [tmp_path / name], Encoding(append_eod=True, **options))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out_*"))


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what an import then raises is an ImportError
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=rf"^\S*{name}: .* need a package: pip install pyarrow$"):
        run(tmp_path, [tmp_path / name])


class TestDamage:
    @pytest.fixture
    def prefix(self, tmp_path: Path) -> Path:
        writer = IndexedWriter(tmp_path / "p", vocab_size=100_000)
        for length in (3, 4):
            writer.add(np.arange(length), ends_document=True)
        assert not (tmp_path / "p.idx").exists()
        writer.finish()
        return tmp_path / "p"

    def test_documents_that_were_never_ended(self, tmp_path: Path) -> None:
        writer = IndexedWriter(tmp_path / "open", vocab_size=300)
        writer.add(np.arange(3), ends_document=False)
        writer.finish()
        with pytest.raises(ValueError, match=r"open\.idx: its documents do not end where its sequences do"):
            IndexedTokens(str(tmp_path / "open"))

    def test_whole(self, prefix: Path) -> None:
        indexed = IndexedTokens(str(prefix))
        assert indexed.dtype == np.int32
        assert indexed.document_lengths.tolist() == [3, 4]

    @pytest.mark.parametrize(
        ("suffix", "damage", "line"),
        [
            ("bin", slice(27), r"p\.bin: 27 bytes, its index says 7 tokens x 4 = 28; it is cut short"),
            ("bin", slice(0), r"p\.bin: 0 bytes"),
            ("idx", slice(60), r"p\.idx: 60 bytes, 2 sequences need 82; it is cut short"),
            ("idx", slice(20), r"p\.idx: not a Megatron index"),
            ("idx", slice(0), r"p\.idx: not a Megatron index"),
            ("idx", (0, 0), "not a Megatron index"),
            ("idx", (9, 0), "version 0 with token type 4"),
            ("idx", (17, 0), "token type 0"),
            ("idx", (42, 9), "its sequences do not lie one after the other"),
        ],
    )
    def test_cut_short_or_altered(
        self, prefix: Path, suffix: str, damage: slice | tuple[int, int], line: str
    ) -> None:
        path = prefix.with_suffix(f".{suffix}")
        content = bytearray(path.read_bytes())
        if isinstance(damage, slice):
            content = content[damage]
        else:
            content[damage[0]] = damage[1]
        path.write_bytes(content)
        with pytest.raises(ValueError, match=line):
            IndexedTokens(str(prefix))

    def test_one_file_missing(self, prefix: Path) -> None:
        prefix.with_suffix(".bin").unlink()
        with pytest.raises(ValueError, match=r"p\.bin: no such file .* without \"\.bin\""):
            IndexedTokens(str(prefix))
