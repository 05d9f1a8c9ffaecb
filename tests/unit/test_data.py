"""Data: the same text gives the same microbatches on every rank."""

import errno
import gzip
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_noloco.data.indexed import Dataset
from megatron_noloco.data.inputs import Input, files_below, find_standard_library, once
from megatron_noloco.data.microbatches import ValidationSource, training_microbatch
from megatron_noloco.data.opening import kind_of, open_data
from megatron_noloco.data.samples import Samples, ShuffledSamples
from megatron_noloco.data.sources import (
    STANDARD_LIBRARY,
    Needs,
    RecordSource,
    Split,
    TextSource,
    parse_prefixes,
)
from megatron_noloco.data.text import TextRange, divide
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.files import utf_8_problem
from megatron_noloco.plans.sample_order import BatchPlan, Order
from tests.harness import output_of
from tests.unit.datasets import load_text

SPLIT = "949,50,1"
END = ByteTokenizer.end_of_document


@pytest.fixture(scope="module")
def stdlib() -> Any:
    return load(STANDARD_LIBRARY, SPLIT)


def load(text: str, split: str) -> Any:
    return load_text(text, split, ByteTokenizer())


def divided(number: int) -> list[list[int]]:
    """The places of so many files in each split."""
    texts = [TextRange(Input(Path(str(place)), None), 0, 1) for place in range(number)]
    return [[int(text.item.name) for text in part] for part in divide(texts, Split.parse(SPLIT))]


def write_documents(path: Path, texts: list[str]) -> None:
    """Write texts as what the name of the file says."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())


def write_files(folder: Path, count: int) -> None:
    """Files whose every line names the file, half of them in a folder below."""
    for index in range(count):
        path = folder / ("below" if index % 2 else ".") / f"{index:03}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"file {index:03}\n" * 50)


class TestTokenizer:
    @settings(max_examples=60)
    @given(text=st.text())
    def test_round_trip(self, text: str) -> None:
        tokenizer = ByteTokenizer()
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == list(text.encode())
        assert tokenizer.decode(tokens) == tokenizer.decode([*tokens.tolist(), END]) == text

    def test_what_is_no_text_is_shown_as_such(self) -> None:
        assert ByteTokenizer().decode([ord("a"), 0xC3, ord("b"), 300]) == "a\ufffdb\ufffd"


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


class TestCorpus:
    def test_standard_library(self, stdlib: Any) -> None:
        assert stdlib.bytes > 5e6
        assert stdlib.files == len(find_standard_library().files)
        tokens = sum(map(len, (stdlib.train, stdlib.validation, stdlib.test)))
        assert tokens == stdlib.bytes + stdlib.files
        assert stdlib.train.dtype == np.uint16
        assert stdlib.train[-1] == stdlib.validation[-1] == END
        assert 0.02 < len(stdlib.validation) / tokens < 0.1

    def test_standard_library_files_are_sources_only(self) -> None:
        files = [item.path for item in find_standard_library().files]
        assert any(path.name == "argparse.py" for path in files)
        assert all(path.suffix == ".py" for path in files)
        forbidden = {"site-packages", "test", "tests", "__pycache__"}
        library = next(path.parent for path in files if path.name == "argparse.py")
        assert not any(forbidden & set(path.relative_to(library).parts) for path in files)

    def test_many_files_are_split_by_file(self, tmp_path: Path) -> None:
        write_files(tmp_path, 60)
        corpus = load(str(tmp_path), "2,1,1")
        decode = ByteTokenizer().decode
        found = [
            set(decode(part).split("\n")) - {""} for part in (corpus.train, corpus.validation, corpus.test)
        ]
        assert all(found)
        assert sum(map(len, found)) == len(set.union(*found)) == corpus.files == 60

    @pytest.mark.parametrize("number", range(20, 61))
    def test_any_number_of_files_has_each_split_that_has_a_file(self, number: int) -> None:
        """Each file is in one of them, in the order of files; 5 % of 20 files is one."""
        parts = divided(number)
        assert sorted(place for part in parts for place in part) == list(range(number))
        assert all(sorted(part) == part for part in parts)
        assert abs(len(parts[0]) - 0.949 * number) <= 0.5
        assert abs(len(parts[1]) - 0.05 * number) < 1
        assert parts[1]

    def test_files_for_validation_lie_evenly_among_all(self) -> None:
        places = divided(1000)[1]
        assert max(np.diff([0, *places, 1000])) < 2 / 0.05

    def test_few_files_are_split_by_position(self, tmp_path: Path) -> None:
        (tmp_path / "b.txt").write_text("0123456789")
        (tmp_path / "a.md").write_text("abcdefghij")
        corpus = load(str(tmp_path), "8,1,1")
        assert corpus.train.tolist() == [*b"abcdefgh", END, *b"01234567", END]
        assert corpus.validation.tolist() == [*b"i", END, *b"8", END]
        assert corpus.test.tolist() == [*b"j", END, *b"9", END]
        assert (corpus.files, corpus.bytes) == (2, 20)
        alone = load(str(tmp_path / "a.md"), "1,1")
        assert alone.train.tolist() == [*b"abcde", END]

    def test_no_character_is_cut(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("ÄßÜ" * 5)
        corpus = load(str(tmp_path), "5,3,2")
        decoded = [ByteTokenizer().decode(part) for part in (corpus.train, corpus.validation, corpus.test)]
        assert "".join(decoded) == "ÄßÜ" * 5
        assert list(map(len, decoded)) == [7, 5, 3]

    def test_only_text_is_read(self, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        """The first files of each kind that are left out are named."""
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "config").write_text("hidden")
        (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
        (tmp_path / "empty.txt").write_text("")
        for name in ("é\x1b", "x", "y"):
            (tmp_path / name).write_bytes(b"caf\xe9")
        (tmp_path / "notes.txt").write_text("some notes")
        corpus = load(str(tmp_path), "1,1")
        assert corpus.files == 1
        named = "4 files not in UTF-8 (picture.png, x, y, ...; 18 bytes), 1 empty file (empty.txt)"
        assert corpus.notes == f"; left out: {named}"
        (tmp_path / "x").unlink()
        named = named.replace("4", "3").replace("x, y, ...; 18", r"y, \xe9\x1b; 14")
        output = ("--output-prefix", f"{tmp_path_factory.mktemp('out')}/a")
        said = output_of("data", "preprocess", "--input", tmp_path, *output)
        assert f" tokens; left out: {named}\n" in said
        assert load(str(tmp_path / "notes.txt"), "1,1").notes == ""

    def test_links_to_folders_are_followed_each_folder_once(self, tmp_path: Path) -> None:
        here, there = tmp_path / "here", tmp_path / "there"
        for folder in (here / "own", there):
            folder.mkdir(parents=True)
            (folder / "a.txt").write_text("text")
        (here / "another").symlink_to(here / "own")
        (here / "link").symlink_to(there)
        (there / "back").symlink_to(here)
        assert files_below(here) == [here / "link" / "a.txt", here / "own" / "a.txt"]

    def test_a_file_with_several_paths_is_read_once(self, tmp_path: Path) -> None:
        """Under its own path; another name goes before it only if it says that the file holds records."""
        here = tmp_path / "here"
        here.mkdir()
        (here / "b.txt").write_text("text")
        (here / "a.txt").symlink_to("b.txt")
        (here / "c.txt").hardlink_to(here / "b.txt")
        (here / "d").write_text("{}")
        (here / "e.jsonl.gz").symlink_to("d")
        assert once(files_below(here)) == {here / "b.txt": 2, here / "e.jsonl.gz": 1}
        assert once([here / "a.txt", here / "a.txt"]) == {here / "a.txt": 1}
        corpus = load(str(here), "1")
        assert corpus.files == 2, "a compressed name, whose content is text, is read beside other text"
        assert corpus.notes == "; further paths to files that are read once: 3"

    def test_links_that_lead_nowhere_are_counted(self, tmp_path: Path) -> None:
        """Of a folder, of text or records, in each summary."""
        folder, note = tmp_path / "here", "; links that lead nowhere, left out: 2"
        folder.mkdir()
        (folder / "gone.jsonl").symlink_to("nowhere")
        (folder / "loop").symlink_to("loop")
        (folder / "a.jsonl").write_text('{"text": "a", "prompt": "a", "completion": "b"}\n')
        records = kind_of(RecordSource(str(folder), Split(1, 0, 0), True), ByteTokenizer())
        assert records.make().facts["notes"].endswith(note)
        (folder / "a.txt").write_text("text")
        assert load(str(folder), "1").notes.endswith(note)
        output = ("--output-prefix", tmp_path / "out")
        assert note in output_of("data", "preprocess", "--input", folder, *output)

    def test_of_a_cache_with_two_revisions_that_of_main_is_read(self, tmp_path: Path) -> None:
        write_cache(tmp_path)
        (tmp_path / "snapshots" / "abd").mkdir()
        (tmp_path / "snapshots" / "abd" / "a.txt").write_text("of another revision")
        assert [path.name for path in files_below(tmp_path)] == ["README.md", "train.jsonl"]
        (tmp_path / "refs" / "main").write_text("gone")
        assert [path.name for path in files_below(tmp_path)] == ["README.md", "train.jsonl", "a.txt"]

    @pytest.mark.parametrize(("name", "read"), [("photos", 3), ("datasets--a--b", 2), ("models--a--b", 2)])
    def test_a_folder_is_a_cache_only_if_the_hub_would_write_it(
        self, name: str, read: int, tmp_path: Path
    ) -> None:
        """Candidates may have folders of the same names."""
        (tmp_path / name).mkdir()
        write_cache(tmp_path / name)
        shutil.rmtree(tmp_path / name / "refs")
        (tmp_path / name / "blobs" / "2f").write_text("a blob that no snapshot names")
        assert len(once(files_below(tmp_path))) == read

    def test_a_folder_that_may_not_be_read_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And not left out; a hidden one is not looked at. Root may read all folders."""
        for name in ("open", "closed", ".hidden"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "a.txt").write_text("text")
        listed = os.scandir

        def scandir(path: Any) -> Any:
            if Path(path).name in ("closed", ".hidden"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return listed(path)

        monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(ValueError) as caught:
            files_below(tmp_path)
        assert str(caught.value) == (
            f"{tmp_path / 'closed'}: Permission denied; make the folder readable, or hide it by a name that "
            "begins with a dot"
        )

    @pytest.mark.parametrize("name", ["a.jsonl", "a.JSON", "a.parquet", "a.jsonl.gz"])
    def test_records_are_documents_unless_beside_text(self, name: str, tmp_path: Path) -> None:
        """As `data preprocess` reads them; training is then shuffled, as that of a dataset."""
        folder, texts = tmp_path / "folder", [f"document {number}" for number in range(40)]
        folder.mkdir()
        write_documents(folder / name, texts)
        for path in (folder / name, folder):
            source = TextSource(str(path), Split.parse("7,3"))
            data = open_data(source, ByteTokenizer(), Needs(257, 4))
            assert data.validation is not None
            decoded = [
                ByteTokenizer().decode(blend.parts[0].tokens) for blend in (data.training, data.validation)
            ]
            assert decoded == ["".join(texts[:28]), "".join(texts[28:])]
            assert isinstance(data.training.parts[0], ShuffledSamples)
        (folder / "b.py").write_text("text")
        corpus, lines = load(str(folder), "1,1"), int("json" in name.lower() and "gz" not in name)
        assert corpus.files == 1 + (lines or ("gz" not in name and "parquet" not in name))
        assert corpus.notes.endswith(f"; files of JSON that are read as text: {lines}" * lines)

    def test_folder_without_text(self, tmp_path: Path) -> None:
        (tmp_path / "noise.bin").write_bytes(b"\xff\xff")
        with pytest.raises(ValueError, match=r"^data.text: no text in"):
            load(str(tmp_path), SPLIT)

    @given(
        text=st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1),
        wrong=st.sampled_from([b"\xe9", b"\xff", b"\xe2\x82", b"\0"]),
        size=st.integers(1, 9),
    )
    def test_the_first_wrong_byte_is_named(self, text: str, wrong: bytes, size: int) -> None:
        """However the bytes are divided into pieces; of a character cut short its first one."""
        before = "text" + text
        content = before.encode() + wrong + b" text"
        pieces = [content[place : place + size] for place in range(0, len(content), size)]
        line = f"not UTF-8 text: byte {wrong[0]:#04x} at offset {len(before.encode())}"
        assert utf_8_problem(pieces) == utf_8_problem([before.encode() + wrong]) == line
        assert utf_8_problem([before.encode()]) == ""

    def test_a_file_that_is_no_text(self, tmp_path: Path) -> None:
        """Also one whose beginning, which is looked at before a run starts, is text."""
        file = tmp_path / "a.txt"
        for content, problem in {
            b"": "is empty",
            b"some text caf\xe9": "not UTF-8 text: byte 0xe9 at offset 13",
            b"text\n" * 200_000 + b"\xff": "not UTF-8 text: byte 0xff at offset 1000000",
        }.items():
            file.write_bytes(content)
            line = rf"^data\.text: {file}: {problem}; give a text file, .*-stdlib"
            with pytest.raises(ValueError, match=line):
                load(str(file), SPLIT)


NO_SPLITS = ["", "a,b", "1,-1", "0,1,1", "1,1,1,1", "inf,1", "nan"]
NO_BLENDS: list[Any] = [[], ["a", "b"], ["1", "a", "1"], [0, "a"], ["1", ""], ["a", "1"], [1]]


@pytest.mark.parametrize("wrong", [*NO_SPLITS, *NO_BLENDS], ids=str)
def test_what_is_no_split_and_no_blend(wrong: Any) -> None:
    parse, example = (Split.parse, "949,50,1") if isinstance(wrong, str) else (parse_prefixes, "prefixB")
    with pytest.raises(ValueError, match=f"^must be .*{example}.*, got ") as caught:
        parse(wrong)
    assert "\n" not in str(caught.value)


class TestMicrobatches:
    plan = BatchPlan(replicas=3, dp=2, microbatches=2, micro_batch_size=2)

    def source(self) -> Callable[..., Any]:
        dataset = Samples(Dataset(np.arange(30 * 4 + 1, dtype=np.uint16)), Needs(121, 4))
        return partial(training_microbatch, dataset, Order.of(len(dataset), seed=1), self.plan)

    def test_an_epoch_reads_every_sample_once(self) -> None:
        """30 samples, 24 a step: 5 steps are 4 epochs. A rank that joins late reads what all others read."""
        source, first_tokens = self.source(), list[int]()
        places = list(product(range(5), range(3), range(2), range(2)))
        found = {at: source(at[2], at[0], at[1], at[3]) for at in reversed(places)}
        for tokens, labels, documents in map(found.__getitem__, places):
            assert tokens.shape == labels.shape == (2, 4)
            assert tokens.dtype == labels.dtype == torch.int64
            assert tokens.is_contiguous()
            assert labels.is_contiguous()
            assert torch.equal(labels, tokens + 1)  # the corpus counts
            assert documents is None
            first_tokens += tokens[:, 0].tolist()
        for epoch in range(4):
            assert sorted(first_tokens[epoch * 30 : (epoch + 1) * 30]) == list(range(0, 120, 4))

    def test_validation_is_fixed_and_without_repetition(self) -> None:
        dataset = Samples(Dataset(np.arange(30 * 4 + 1, dtype=np.uint16)), Needs(121, 4))
        source, other = ValidationSource(dataset, 3, count=10), ValidationSource(dataset, 1, count=12)
        assert (len(source), source.available, len(other), other.available) == (10, 10, 12, 30)
        seen = torch.cat([source.microbatch(index)[0] for index in range(len(source))])
        assert sorted(seen[:, 0].tolist()) == list(range(0, 120, 4))
        assert torch.equal(torch.cat([other.microbatch(index)[0] for index in range(12)]), seen[:12])
        with pytest.raises(IndexError):
            source.microbatch(10)

    def test_validation_split_too_small(self) -> None:
        dataset = Samples(Dataset(np.arange(30 * 4 + 1, dtype=np.uint16)), Needs(121, 4))
        with pytest.raises(ValueError, match=r"corpus too small: .* = 11 x 3 need 33 samples of 4 tokens"):
            ValidationSource(dataset, 3, count=11)
