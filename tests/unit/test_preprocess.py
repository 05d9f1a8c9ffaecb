"""Preprocessing: every kind of input becomes what Megatron-core reads, token for token, whole or not at all."""

import gzip
import json
import os
import re
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

from megatron_noloco.cli.main import main
from megatron_noloco.data import encode, formats, preprocess
from megatron_noloco.data.fast_tokenizer import FastTokenizer
from megatron_noloco.data.indexed import Dataset, IndexedWriter, read_indexed
from megatron_noloco.data.inputs import find_inputs
from megatron_noloco.data.preprocess import Job
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.data.tokenizer import Tokenizer as AnyTokenizer
from tests.harness import full_disk
from tests.unit.test_data import write_cache

ROOT = Path(__file__).parents[2]
PREPROCESS = [sys.executable, "-m", "megatron_noloco", "data", "preprocess"]
TEXTS = ["One.\n", "", "Größe, 大きさ\n\n", "two three " * 40]
BYTES = ByteTokenizer()


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


def job_of(
    paths: list[Path],
    prefix: Path,
    tokenizer: AnyTokenizer = BYTES,
    json_keys: tuple[str, ...] = ("text",),
    append_eod: bool = True,
) -> Job:
    return Job(find_inputs(map(str, paths), "--input"), prefix, tokenizer, json_keys, append_eod)


def run(folder: Path, paths: list[Path], tokenizer: AnyTokenizer = BYTES, **options: Any) -> Dataset:
    job = job_of(paths, folder / "out", tokenizer, **options)
    preprocess.check(job)
    preprocess.preprocess(job, lambda _: None)
    return read_indexed(str(folder / "out_text_document"))


def documents(indexed: Dataset) -> list[list[int]]:
    bounds = indexed.offsets[indexed.document_bounds]
    return [indexed.tokens[a:b].tolist() for a, b in pairwise(bounds)]


def expected(texts: list[str], tokenizer: AnyTokenizer = BYTES) -> list[list[int]]:
    return [[*tokenizer.encode(text).tolist(), tokenizer.end_of_document] for text in texts if text]


def test_megatron_core_reads_it_token_for_token(tmp_path: Path, fast: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer = FastTokenizer(fast)
    run(tmp_path, [write_jsonl(tmp_path / "a.jsonl", TEXTS)], tokenizer)
    theirs = IndexedDataset(str(tmp_path / "out_text_document"))
    assert theirs.index.dtype == np.uint16
    assert [document.tolist() for document in theirs] == expected(TEXTS, tokenizer)
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]


def test_what_megatron_core_wrote_is_read(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    builder.add_document(torch.arange(5), [2, 3])
    builder.add_item(torch.tensor([100_000]))
    builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = read_indexed(str(tmp_path / "theirs"))
    assert documents(ours) == [[0, 1, 2, 3, 4], [100_000]]
    assert ours.offsets[:].tolist() == [0, 2, 5, 6]
    assert ours.part(1, 3).tokens.tolist() == [2, 3, 4, 100_000]


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
    (item,) = find_inputs([str(path)], "--input").files
    assert list(item.pieces("text", (read := list[int]()).append))
    assert sum(read) == item.bytes


def test_blank_lines_between_records_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "one"}\n\n \r\n{"text": ""}\n{"text": "two"}\n\n')
    job = job_of([path], tmp_path / "out")
    counts = preprocess.preprocess(job, lambda _: None)
    assert [counts[name] for name in ("documents", "tokens", "empty")] == [2, 8, 1]
    path = tmp_path / "b.jsonl"
    path.write_text('{"text": "one"}\n\nx\n')
    with pytest.raises(ValueError, match="line 3: not JSON"):
        list(find_inputs([str(path)], "--input").files[0].pieces("text", lambda _: None))


def test_each_file_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it has several paths, or is given as well as its folder; text beside records is counted."""
    cache = tmp_path / "cache"
    write_cache(cache, *(json.dumps({"text": text}) for text in TEXTS))
    data, out = cache / "snapshots" / "abc" / "data", tmp_path / "out"
    given = {
        (cache,): "; documents that are files of text beside records: 1",
        (data, data / "train.jsonl"): "; further paths to files that are read once: 1",
        (data / "train.jsonl", cache / "blobs" / "0f"): "; further paths to files that are read once: 1",
        (data / "train.jsonl",): "",
    }
    for number, (paths, notes) in enumerate(given.items()):
        arguments = ["--input", *map(str, paths), "--output-prefix", f"{out}{number}"]
        assert main(["data", "preprocess", *arguments]) == 0
        assert re.match(rf"{3 + (number == 0)} documents, \d+ tokens; .*{notes}\n", capsys.readouterr().out)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two", "of": {"id": 1, "id": 2}}\n')
    with pytest.raises(ValueError, match=r'a.jsonl, line 2: the key "id" is there twice; leave one out$'):
        list(find_inputs([str(path)], "--input").files[0].pieces("text", lambda _: None))


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
    job = job_of([folder], tmp_path / "out")
    tally = preprocess.preprocess(job, lambda _: None)
    assert documents(read_indexed(str(job.output("text")))) == expected(["first", "second", "third"])
    assert [tally[name] for name in ("documents", "not_text", "empty_files")] == [3, 2, 1]


@pytest.mark.parametrize(("at_once", "calls"), [(1, 9), (70, 4), (10**6, 1)])
def test_batches_of_several_files_are_encoded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, calls: int
) -> None:
    """The documents are the same however many are encoded in one call of the tokenizer."""
    monkeypatch.setattr(formats, "PIECE_BYTES", 50)
    monkeypatch.setattr(encode, "_CHARACTERS", at_once)
    texts = ["first\n", "a line\n" * 30, "", "last"]
    paths = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    counted = []
    encode_batch = ByteTokenizer.encode_batch

    def count(tokenizer: ByteTokenizer, batch: list[str]) -> list[np.ndarray]:
        counted.append(len(batch))
        return encode_batch(tokenizer, batch)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", count)
    indexed = run(tmp_path, [paths[0], paths[1], write_jsonl(tmp_path / "a.jsonl", TEXTS), *paths[2:]])
    assert documents(indexed) == expected([*texts[:2], *TEXTS, *texts[2:]])
    assert indexed.sequences > len(indexed.document_bounds) - 1, "a long text has several sequences"
    assert len(counted) == calls


def test_one_dataset_per_key_and_no_ends(tmp_path: Path) -> None:
    rows = [{"title": "T1", "body": "B1"}, {"title": None, "body": "B2"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    job = job_of([tmp_path / "a.jsonl"], tmp_path / "out", BYTES, ("title", "body"), append_eod=False)
    tally = preprocess.preprocess(job, lambda _: None)
    assert [tally[name] for name in ("documents", "tokens", "empty")] == [3, 6, 1]
    assert documents(read_indexed(str(tmp_path / "out_title_document"))) == [list(b"T1")]
    assert documents(read_indexed(str(tmp_path / "out_body_document"))) == [list(b"B1"), list(b"B2")]


def test_the_folder_of_a_prefix_is_made(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["two"])
    assert documents(run(tmp_path / "data" / "new", [tmp_path / "a.jsonl"])) == [[*b"two", 256]]
    with pytest.raises(ValueError, match=r"a.jsonl/out: cannot be written: .*; give another --output-prefix"):
        run(tmp_path / "a.jsonl", [tmp_path / "a.jsonl"])


def test_a_prefix_among_the_inputs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    job = job_of([tmp_path / "texts"], tmp_path / "texts" / "out")
    with pytest.raises(ValueError, match=r"^--output-prefix .*/texts/out lies in --input .*/texts: "):
        preprocess.check(job)


def test_what_a_stopped_process_leaves(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["two three " * 2000] * 5000)
    command = [*PREPROCESS, "--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            written = tmp_path / "out_text_document.bin.partial"
            while not (written.exists() and written.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.05)
            there = [path.name for path in tmp_path.glob("out*")]
            process.terminate()
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert there == ["out_text_document.bin.partial"], "what a killed process would leave"
    assert process.returncode == 130
    assert without_torch(said) == "stopped before all was written; give the command again\n"
    assert not list(tmp_path.glob("out*"))


def without_torch(said: str) -> str:
    """What torch built for CUDA says where there are CUDA's tools and no GPU."""
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if "No CUDA runtime is found" not in line)


def test_wherever_it_is_stopped_a_name_means_a_complete_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": "A", "b": "B"}))
    inputs = find_inputs([str(tmp_path / "a.jsonl")], "--input")
    job = Job(inputs, tmp_path / "out", BYTES, ("a", "b"), False)
    stops = 0
    while _stopped_at(stops, job, monkeypatch):
        whole = [f"out_{key}_document.{end}" for key in "ab" for end in ("bin", "tokenizer.sha256", "idx")]
        assert {path.name for path in tmp_path.glob("out*")} == set(whole[: (stops + 1) // 2])
        for key in ("a", "b"):
            if Path(f"{job.output(key)}.idx").exists():
                assert documents(read_indexed(str(job.output(key)))) == [list(key.upper().encode())]
        for path in tmp_path.glob("out*.idx"):
            path.unlink()
        preprocess.check(job)
        assert preprocess.preprocess(job, lambda _: None)["documents"] == 2
        for path in tmp_path.glob("out*"):
            path.unlink()
        stops += 1
    assert stops == 12


def _stopped_at(last: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the job, stopped right before or after a file gets its name; False: it ended before that.

    A power cut: when a file gets its name, it must be on the disk.
    """
    calls = iter(range(100))
    synced, sync, replace = set(), os.fsync, Path.replace

    def note(descriptor: int) -> None:
        sync(descriptor)
        synced.add((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

    def rename(path: Path, target: Path) -> Path:
        assert (path.stat().st_ino, path.stat().st_size) in synced
        for step in (lambda: None, lambda: replace(path, target)):
            step()
            if next(calls) == last:
                raise KeyboardInterrupt
        return target

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", note)
        patch.setattr(Path, "replace", rename)
        try:
            preprocess.preprocess(job, lambda _: None)
        except KeyboardInterrupt:
            return True
    return False


NO_END = "no end-of-document token; name it as eos_token"


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json: not a JSON object; copy"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not a JSON object; copy"),
        ("tokenizer_config.json", "{}", NO_END),
        ("tokenizer_config.json", json.dumps({"eos_token": ["<end>"]}), NO_END),
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer"),
    ],
)
def test_broken_files_of_a_tokenizer(tmp_path: Path, name: str, content: str, line: str) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=line):
        FastTokenizer(tmp_path)


def test_a_tokenizer_is_a_folder(fast: Path) -> None:
    """Its other files are of its tokenizer.json, not of a file of another name beside it."""
    line = r"/tokenizer.json: no folder with a tokenizer.json .*; give that of"
    with pytest.raises(ValueError, match=line):
        FastTokenizer(fast / "tokenizer.json")


def call_preprocess(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Preprocess a.jsonl in the folder with two threads."""
    command = [*PREPROCESS, "--input", str(folder / "a.jsonl")]
    command += ["--output-prefix", str(folder / "out"), "--workers", "2", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_preprocess_writes_a_dataset_once(tmp_path: Path, fast: Path) -> None:
    texts = [f"two three {number}" for number in range(100)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    named = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(fast))
    first = call_preprocess(tmp_path, "--append-eod", *named)
    assert (first.returncode, without_torch(first.stderr)) == (0, "")
    tokenizer = FastTokenizer(fast)
    indexed = read_indexed(str(tmp_path / "out_text_document"))
    assert documents(indexed) == expected(texts, tokenizer)
    assert first.stdout.startswith(f"100 documents, {len(indexed.tokens)} tokens\n")
    with pytest.raises(ValueError, match=r"out_text_document\.idx exists already"):
        run(tmp_path, [tmp_path / "a.jsonl"], tokenizer)


def test_a_dataset_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": "A", "b": "B"}))
    job = job_of([tmp_path / "a.jsonl"], tmp_path / "out", BYTES, ("a", "b"), append_eod=False)
    other = IndexedWriter(job.output("b"), 257)
    other.add(np.arange(3), ends_document=True)
    with pytest.raises(ValueError, match=r"out_b_document\.bin\.partial: another process is writing this"):
        preprocess.preprocess(job, lambda _: None)
    assert [path.name for path in tmp_path.glob("out*")] == ["out_b_document.bin.partial"]
    other.finish()
    assert documents(read_indexed(str(job.output("b")))) == [[0, 1, 2]]
    other.discard()
    with pytest.raises(ValueError, match=r"out_b_document\.idx exists already"):
        preprocess.preprocess(job, lambda _: None)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out_b_document.bin", "out_b_document.idx"]


@pytest.mark.parametrize("texts", [["a" * 900], ["a" * 100_000]], ids=["at the end", "while it writes"])
def test_a_full_disk_is_named_and_nothing_left(tmp_path: Path, texts: list[str]) -> None:
    inputs = find_inputs([str(write_jsonl(tmp_path / "a.jsonl", texts))], "--input")
    job = Job(inputs, tmp_path / "out", BYTES, ("text",), True)
    with pytest.raises(OSError, match=r"too large: .*/out_text_document\.bin\.partial'$"), full_disk():
        preprocess.preprocess(job, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def parquet_of(text: bytes, columns: int = 1) -> bytes:
    """A file with columns of text, all of one name, which Parquet does not check."""
    written, column = pyarrow.BufferOutputStream(), pyarrow.array([b"x", text]).view(pyarrow.string())
    parquet.write_table(pyarrow.table([column] * columns, names=["text"] * columns), written)
    return written.getvalue().to_pybytes()


BAD_INPUTS: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("a.jsonl", b'{"text": "x"}\n{"text": \n', {}, r"a\.jsonl, line 2: not JSON"),
    ("a.jsonl", b"1\n", {}, r"line 1: not a JSON object"),
    (
        "a.jsonl",
        b'{"text": "x"}\n' + bytes(9),
        {},
        r"line 2: not UTF-8 text: it begins with bytes 0x00, as what",
    ),
    ("a.tar", b"text" + bytes(9), {}, r"a\.tar: not UTF-8 text: byte 0x00 at offset 4$"),
    (
        "a.tar.gz",
        gzip.compress(b"text" + bytes(9)),
        {},
        r"a\.tar\.gz: not UTF-8 text: byte 0x00 at offset 4$",
    ),
    (
        "a.parquet",
        parquet_of(b"x", columns=2),
        {},
        r"a\.parquet: the column 'text' is there twice; leave one out",
    ),
    ("a.jsonl", b'{"body": "x"}\n', {}, r"line 1: no key 'text'; there are body"),
    ("a.jsonl", b'{"text": 3}\n', {}, r"'text' holds int, not text"),
    ("a.jsonl", b'{"text": ""}\n', {}, r"^nothing was written; left out: 1 empty document$"),
    ("a.jsonl.gz", gzip.compress(b"x" * 99)[:-9], {}, r"a\.jsonl\.gz: cannot be decompressed"),
    ("a.txt.zst", zstd(os.urandom(9999))[:5000], {}, r"a\.txt\.zst: cannot be decompressed"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\\ud83d"}\n', {}, r"a\.jsonl, line 2: holds half a character"),
    ("a.parquet", b"plain", {}, r"a\.parquet: not a valid Parquet file"),
    ("a.parquet", parquet_of(b"\xff"), {}, r"a\.parquet, after row 0: not UTF-8 text"),
    ("a.txt", b"\xff\xfe", {}, r"a\.txt: not UTF-8 text"),
    ("a.txt", b"text\n" * 200_000 + b"\xe9", {}, r"a\.txt: not UTF-8 text: byte 0xe9 at offset 1000000$"),
    ("a.txt.gz", gzip.compress(b"caf\xe9"), {}, r"a\.txt\.gz: not UTF-8 text: byte 0xe9 at offset 3$"),
    ("a.txt", b"", {}, r"holds no files with text"),
    ("a.txt", b"x", {"json_keys": ("a", "b")}, r"a\.txt is plain text, which has no keys"),
    ("a.jsonl", b"{}", {"json_keys": ("a/b",)}, r"^--json-keys a/b: "),
    ("a.jsonl", b"{}", {"json_keys": ("a", "b", "a")}, r"^--json-keys a: is given more than once; give each"),
]


@pytest.mark.parametrize(("name", "content", "edits", "line"), BAD_INPUTS, ids=[row[3] for row in BAD_INPUTS])
def test_bad_input_is_one_line(
    tmp_path: Path, name: str, content: bytes, edits: dict[str, Any], line: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=line) as caught:
        run(tmp_path, [tmp_path / name], **edits)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out_*"))


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what an import then raises is a ModuleNotFoundError
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModuleNotFoundError, match="pyarrow"):  # cli/exit_codes.py says how to install it
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
            read_indexed(str(tmp_path / "open"))

    def test_whole(self, prefix: Path) -> None:
        indexed = read_indexed(str(prefix))
        assert indexed.tokens.dtype == np.int32
        assert list(map(len, documents(indexed))) == [3, 4]

    @pytest.mark.parametrize(
        ("suffix", "damage", "line"),
        [
            ("bin", slice(27), r"p\.bin: 27 bytes, its index says 7 tokens x 4 = 28; it is cut short"),
            ("idx", slice(60), r"p\.idx: 60 bytes, 2 sequences need 82; it is cut short"),
            ("idx", slice(20), r"p\.idx: not a Megatron index"),
            ("idx", (9, 0), "version 0 with token type 4"),
            ("idx", (17, 0), "token type 0"),
            ("idx", (42, 9), "its sequences do not lie one after the other"),
            ("idx", (66, 9), "its documents do not end where its sequences do; it was not finished, or is"),
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
            read_indexed(str(prefix))

    def test_one_file_missing(self, prefix: Path) -> None:
        prefix.with_suffix(".bin").unlink()
        with pytest.raises(ValueError, match=r"p\.bin: no such file .* without \"\.bin\""):
            read_indexed(str(prefix))
