"""Preprocessing: every kind of input becomes what Megatron-core reads, token for token, whole or not at all."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_noloco.data import corpus, encode
from megatron_noloco.data.corpus import preprocess
from megatron_noloco.data.indexed import Sequence, read_indexed, write_indexed
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.errors import UserError
from tests.kit.datasets import BYTES, TEXTS, counted, documents, expected, run, write_jsonl
from tests.kit.tokenizers import make_tokenizer, tokenizer_at

ROOT = Path(__file__).parents[2]
PREPROCESS = [sys.executable, "-m", "megatron_noloco", "data", "preprocess"]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small byte-level BPE."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


def test_megatron_core_reads_it_token_for_token(tmp_path: Path, fast: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer = tokenizer_at(fast)
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


def test_blank_lines_between_records_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "one"}\n\n \r\n{"text": ""}\n{"text": "two"}\n\n')
    made = counted(tmp_path, [path])
    assert (made.documents, made.tokens, made.notes) == (2, 8, "; left out: 1 empty document")
    path = tmp_path / "b.jsonl"
    path.write_text('{"text": "one"}\n\nx\n')
    with pytest.raises(ValueError, match="line 3: not JSON"):
        run(tmp_path / "other", [path])


@pytest.mark.parametrize("at_once", [1, 70, 10**6])
def test_batches_of_several_files_are_encoded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The documents are the same however many are encoded in one call of the tokenizer."""
    monkeypatch.setattr(encode, "_CHARACTERS", at_once)
    texts = ["first\n", "a line\n" * 30, "", "last"]
    paths = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    counted = []
    encode_batch = ByteTokenizer.encode_batch

    def count(tokenizer: ByteTokenizer, batch: list[str]) -> list[np.ndarray]:
        if batch != [""]:
            counted.append(len(batch))
        return encode_batch(tokenizer, batch)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", count)
    indexed = run(tmp_path, [paths[0], paths[1], write_jsonl(tmp_path / "a.jsonl", TEXTS), *paths[2:]])
    calls = len(counted)
    assert documents(indexed) == expected([*texts[:2], *TEXTS, *texts[2:]])
    assert indexed.sequences > len(indexed.document_bounds) - 1, "a long text has several sequences"
    assert (calls == 1) == (at_once == 10**6)


def test_a_key_may_be_another_and_ends_left_out(tmp_path: Path) -> None:
    rows = [{"title": "T1", "body": "B1"}, {"title": None, "body": "B2"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = {
        key: run(tmp_path, [tmp_path / "a.jsonl"], key=key, append_eod=False) for key in ("title", "body")
    }
    assert {key: documents(indexed) for key, indexed in found.items()} == {
        "title": [list(b"T1")], "body": [list(b"B1"), list(b"B2")]
    }  # fmt: skip


def test_what_a_stopped_process_leaves(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["two three " * 2000] * 5000)
    command = [
        *PREPROCESS,
        "--input",
        str(tmp_path / "a.jsonl"),
        "--output-prefix",
        str(tmp_path / "out" / "a"),
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob("out/*/data.bin")) and time.monotonic() < deadline:
                time.sleep(0.05)
            process.terminate()
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert without_torch(said).endswith("stopped before all was written; give the command again\n")
    assert not list((tmp_path / "out").iterdir())


def without_torch(said: str) -> str:
    """What torch built for CUDA says where there are CUDA's tools and no GPU."""
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if "No CUDA runtime is found" not in line)


def test_an_index_means_a_complete_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is on the disk when it gets its name, as after a power cut. Then the command is given again."""
    write_jsonl(tmp_path / "a.jsonl", ["A"])
    folder, stops = tmp_path / "data", 0
    make = partial(counted, folder, [tmp_path / "a.jsonl"])
    while _stopped_at(stops, make, monkeypatch):
        prefix = folder / "out_text_document"
        if Path(f"{prefix}.idx").exists():
            assert documents(read_indexed(str(prefix))) == expected(["A"])
            Path(f"{prefix}.idx").unlink()
        assert make().documents == 1
        assert {path.suffix for path in folder.iterdir()} == {".bin", ".json", ".idx"}
        shutil.rmtree(folder)
        stops += 1
    assert stops == 8


def _stopped_at(last: int, make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make a dataset, stopped right before or after a file gets its name; False: it was complete before that."""
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
            make()
        except KeyboardInterrupt:
            return True
    return False


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
    tokenizer = tokenizer_at(fast)
    indexed = read_indexed(str(tmp_path / "out_text_document"))
    assert documents(indexed) == expected(texts, tokenizer)
    assert first.stdout.startswith(f"100 documents, {len(indexed.tokens)} tokens\n")
    with pytest.raises(ValueError, match=r"out_text_document\.idx exists already"):
        run(tmp_path, [tmp_path / "a.jsonl"], tokenizer)


def test_two_of_one_text_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names get a dataset each; of one name the second is refused, also where the first has failed before."""
    write_jsonl(tmp_path / "a.jsonl", ["A"])
    original, inside = corpus.encode, threading.Barrier(2)

    def together(*arguments: Any) -> Any:
        inside.wait(60)
        return original(*arguments)

    def make(name: str) -> str:
        try:
            preprocess([str(tmp_path / "a.jsonl")], tmp_path / "out" / name, BYTES, append_eod=True)
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads, monkeypatch.context() as patch:
        patch.setattr(corpus, "encode", together)
        assert [*threads.map(make, "ab")] == ["", ""]
    for name in "ab":
        assert documents(read_indexed(f"{tmp_path}/out/{name}_text_document")) == expected(["A"])
    with ThreadPoolExecutor(3) as threads:
        first, *others = sorted(threads.map(make, "ccc"))
    assert first == ""
    assert all("c_text_document.idx exists already" in other for other in others)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".bin", ".json", ".idx"}


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
        def sequences() -> Iterator[Sequence]:
            yield Sequence(np.arange(3), True, np.array([False, True, True]))
            yield Sequence(np.arange(4), True, np.array([False, False, True, True]))
            assert not (tmp_path / "p.idx").exists()

        assert write_indexed(tmp_path / "p", sequences(), vocab_size=100_000, masked=True) == 2
        return tmp_path / "p"

    def test_documents_that_were_never_ended(self, tmp_path: Path) -> None:
        write_indexed(tmp_path / "open", [Sequence(np.arange(3), False)], vocab_size=300)
        with pytest.raises(ValueError, match=r"open\.idx: its sequences or documents do not"):
            read_indexed(str(tmp_path / "open"))

    def test_whole(self, prefix: Path) -> None:
        indexed = read_indexed(str(prefix))
        assert indexed.tokens.dtype == np.int32
        assert list(map(len, documents(indexed))) == [3, 4]

    @pytest.mark.parametrize(
        ("suffix", "damage", "line"),
        [
            ("bin", slice(27), r"p\.bin: 27 bytes, its index says 7 tokens x 4 = 28; it is cut short"),
            ("mask", slice(6), r"p\.mask: 6 bytes, its index says 7 tokens x 1 = 7; it is cut short"),
            ("mask", slice(0), r"p\.mask: 0 bytes, its index says 7 tokens x 1 = 7; it is cut short"),
            ("idx", slice(60), r"p\.idx: 60 bytes, 2 sequences need 82; it is cut short"),
            ("idx", slice(20), r"p\.idx: 20 bytes, 2 sequences need 58; it is cut short"),
            ("idx", slice(8), r"p\.idx: not a Megatron index"),
            ("idx", (9, 0), r"p\.idx: not a Megatron index"),
            ("idx", (17, 0), r"p\.idx: not a Megatron index"),
            ("idx", (42, 9), "its sequences or documents do not lie one after the other, to the end; it was"),
            ("idx", (66, 9), "its sequences or documents do not lie one after the other, to the end; it was"),
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
