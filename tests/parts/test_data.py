"""Data: the same text gives the same microbatches on every rank."""

import errno
import gzip
import json
import os
import re
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

from megatron_noloco.data.corpus import corpus_of
from megatron_noloco.data.inputs import files_below, find_inputs
from megatron_noloco.data.microbatches import ValidationSource, training_microbatch
from megatron_noloco.data.opening import open_data
from megatron_noloco.data.samples import Samples, ShuffledSamples
from megatron_noloco.data.sources import (
    STANDARD_LIBRARY,
    Needs,
    RecordSource,
    Split,
    TextSource,
    parse_prefixes,
)
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.files import utf_8_problem
from megatron_noloco.plans.sample_order import BatchPlan, Order
from tests.kit.datasets import load_text, sequences_of, write_cache
from tests.kit.ranks import output_of

SPLIT = "949,50,1"
END = ByteTokenizer.end_of_document


@pytest.fixture(scope="module")
def stdlib() -> Any:
    return load(STANDARD_LIBRARY, SPLIT)


def load(text: str, split: str) -> Any:
    return load_text(text, split, ByteTokenizer())


def write_documents(path: Path, texts: list[str]) -> None:
    """Write texts as what the name of the file says."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    table = pyarrow.table({"text": texts})
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix in (".arrow", ".feather"):
        kind = pyarrow.ipc.new_stream if path.suffix == ".arrow" else pyarrow.ipc.new_file
        with kind(path, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".zst":  # two frames
        frames = (
            pyarrow.compress(part, "zstd", asbytes=True)
            for part in (lines[:50].encode(), lines[50:].encode())
        )
        path.write_bytes(b"".join(frames))
    else:
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())


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
        assert ByteTokenizer().decode([ord("a"), 0xC3, ord("b"), 300]) == "a\ufffdb"


class TestCorpus:
    def test_standard_library(self, stdlib: Any) -> None:
        assert stdlib.bytes > 5e6
        assert stdlib.files == len(find_inputs([STANDARD_LIBRARY], "data.text"))
        tokens = sum(map(len, (stdlib.train, stdlib.validation, stdlib.test)))
        assert tokens == stdlib.bytes + stdlib.files
        assert stdlib.train.dtype == np.uint16
        assert 0.02 < len(stdlib.validation) / tokens < 0.1

    def test_standard_library_files_are_sources_only(self) -> None:
        files = [item.path for item in find_inputs([STANDARD_LIBRARY], "data.text")]
        assert any(path.name == "argparse.py" for path in files)
        assert all(path.suffix == ".py" for path in files)
        forbidden = {"site-packages", "test", "tests", "__pycache__"}
        library = next(path.parent for path in files if path.name == "argparse.py")
        assert not any(forbidden & set(path.relative_to(library).parts) for path in files)

    def test_a_text_is_cut_at_lines_and_characters(self, tmp_path: Path) -> None:
        """A small text in 40 pieces, so that each split gets some; its lines and characters stay whole."""
        (tmp_path / "a.txt").write_text("Größe ÄßÜ\n" * 400)
        corpus = load(str(tmp_path / "a.txt"), SPLIT)
        decoded = [ByteTokenizer().decode(part) for part in (corpus.train, corpus.validation, corpus.test)]
        assert "".join(decoded) == "Größe ÄßÜ\n" * 400
        assert all(part.endswith("\n") for part in decoded[:2])

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
        named = "1 empty file (empty.txt), 4 files not in UTF-8 (picture.png, x, y, ...)"
        assert corpus.notes == f"; left out: {named}"
        (tmp_path / "x").unlink()
        named = named.replace("4", "3").replace("x, y, ...", r"y, \xe9\x1b")
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
        (here / "d").write_bytes(gzip.compress(b'{"text": "a"}'))
        (here / "e.jsonl.gz").symlink_to("d")
        for places in ([here], [here, here / "c.txt", here]):
            found = find_inputs(map(str, places), "--input")
            assert [item.name for item in found] == ["b.txt", "e.jsonl.gz"]
        assert [item.name for item in find_inputs([f"{here / 'a.txt'}"] * 2, "--input")] == ["a.txt"]
        assert load(str(here), "1").files == 2

    def test_links_that_lead_nowhere_are_counted(self, tmp_path: Path) -> None:
        """Of a folder, of text or records, in each summary."""
        folder, note = tmp_path / "here", "; left out: 2 links to nowhere (gone.jsonl, loop)"
        folder.mkdir()
        (folder / "gone.jsonl").symlink_to("nowhere")
        (folder / "loop").symlink_to("loop")
        (folder / "a.jsonl").write_text('{"text": "a", "prompt": "a", "completion": "b"}\n')
        records = corpus_of(RecordSource(str(folder), Split(1, 0, 0)), ByteTokenizer())
        assert records.make().made.notes.endswith(note)
        (folder / "a.txt").write_text("text")
        assert note in load(str(folder), "1").notes

    def test_of_a_cache_with_two_revisions_that_of_main_is_read(self, tmp_path: Path) -> None:
        write_cache(tmp_path)
        (tmp_path / "snapshots" / "abd").mkdir()
        (tmp_path / "snapshots" / "abd" / "a.txt").write_text("of another revision")
        assert [path.name for path in files_below(tmp_path)] == ["README.md", "train.jsonl"]
        (tmp_path / "refs" / "main").write_text("gone")
        assert [path.name for path in files_below(tmp_path)] == ["README.md", "train.jsonl", "a.txt"]

    def test_a_card_is_no_document_of_a_repository_with_rows(self, tmp_path: Path) -> None:
        """A repository of the hub without rows has texts, also beside another with rows."""
        for name, rows in (("rows", ['{"text": "a row"}']), ("texts", [])):
            write_cache(tmp_path / f"datasets--{name}", *rows)
        (revision := tmp_path / "datasets--texts" / "snapshots" / "abc").joinpath("a.txt").write_text("text")
        (revision / "data" / "train.jsonl").unlink()
        corpus, card = load(str(tmp_path), "1"), "datasets--rows/snapshots/abc/README.md"
        assert corpus.documents == 3
        assert "documents that are files of text beside records: 2" in corpus.notes
        assert corpus.notes.startswith(f"; left out: 1 file without records ({card})")

    @pytest.mark.parametrize(
        ("name", "files", "documents"), [("photos", 4, 4), ("datasets--a--b", 3, 1), ("models--a--b", 3, 1)]
    )
    def test_a_folder_is_a_cache_only_if_the_hub_would_write_it(
        self, name: str, files: int, documents: int, tmp_path: Path
    ) -> None:
        """Candidates may have folders of the same names, and texts beside rows."""
        (tmp_path / name).mkdir()
        write_cache(tmp_path / name, '{"text": "a row"}')
        shutil.rmtree(tmp_path / name / "refs")
        (tmp_path / name / "blobs" / "2f").write_text("a blob that no snapshot names")
        (tmp_path / name / "snapshots" / "abc" / "a.txt").write_text("a text beside the rows")
        assert len(find_inputs([str(tmp_path)], "--input")) == files
        assert load(str(tmp_path), "1").documents == documents

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

    @pytest.mark.parametrize(
        "name",
        ["a.jsonl", "a.JSON", "a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.arrow", "a.feather"],
    )
    def test_all_formats_are_documents_also_beside_text(self, name: str, tmp_path: Path) -> None:
        """Divided in their order; those of training are shuffled, those of validation are not."""
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
        (item,) = find_inputs([str(folder)], "--input")
        assert list(item.pieces("text", (read := list[int]()).append, 99))
        assert sum(read) == item.bytes
        (folder / "README.md").write_text("# A card")
        corpus = load(str(folder), "1")
        assert (corpus.documents, corpus.files) == (41, 2)
        assert "documents that are files of text beside records: 1" in corpus.notes

    @pytest.mark.parametrize(("last", "whole"), [(30_000, True), (600_000, False)])
    def test_a_long_text_lies_in_one_split(self, last: int, whole: bool, tmp_path: Path) -> None:
        """Else training reads the beginning of what it is validated on, as of a text longer than all of it."""
        for number in range(8):
            (tmp_path / f"{number}.txt").write_text(
                f"text {number}, " * ((last if number == 7 else 30_000) // 8)
            )
        source = TextSource(str(tmp_path), Split.parse("7,3"))
        data = open_data(source, ByteTokenizer(), Needs(257, 4))
        read = {
            split: set(re.findall(r"\d", ByteTokenizer().decode(blend.parts[0].tokens)))
            for split, blend in (("training", data.training), ("validation", data.validation))
            if blend is not None
        }
        assert read["validation"] == ({"6", "7"} if whole else {"7"})
        assert read["training"].isdisjoint(read["validation"]) == whole

    @pytest.mark.parametrize("several", [False, True])
    def test_what_datasets_saves_is_read_by_its_list(self, several: bool, tmp_path: Path) -> None:
        """A DatasetDict has a folder for each split; files that state.json does not name are old."""
        folder = tmp_path / "train" if several else tmp_path
        folder.mkdir(exist_ok=True)
        if several:
            (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
        for number in range(3):
            write_documents(folder / f"data-{number}.arrow", [f"text {number}"] * 9)
        (folder / "dataset_info.json").write_text('{"features": {}}')
        listed = [{"filename": f"data-{number}.arrow"} for number in (0, 2)]
        (folder / "state.json").write_text(json.dumps({"_data_files": listed}))
        corpus = load(str(tmp_path), "1")
        assert (corpus.documents, corpus.files, corpus.notes) == (18, 2, "")
        (folder / "data-2.arrow").unlink()
        with pytest.raises(ValueError, match=r"state.json: names data-2.arrow, which is not there; save the"):
            load(str(tmp_path), "1")
        for state in ("{}", '{"_data_files": [{}]}', '{"_data_files": ["data-0.arrow"]}'):
            (folder / "state.json").write_text(state)
            with pytest.raises(
                ValueError, match=r"state.json: does not name the files of the dataset; save it"
            ):
                load(str(tmp_path), "1")
        (folder / "state.json").unlink()  # the cache of `datasets`
        write_documents(folder / "cache-0123456789abcdef.arrow", ["text 0 after a `map`"])
        assert load(str(tmp_path), "1").files == 2

    @pytest.mark.parametrize(("names", "splits"), [
        ("en/train-00000-of-2.json en/train-00001-of-2.json en/test/0000.json en/c4-validation.00000-of-8.json",
         "validation (1), test (1), train (2)"),  # as the hub names files
        ("en/test/0000.json", ""),
        ("00.jsonl val.jsonl", "others (1), val (1)"),  # as the Pile
        ("TinyStories-train.txt TinyStories-valid.txt", "train (1), valid (1)"),
        ("train/data.jsonl test/data.jsonl", "test (1), train (1)"),  # a DatasetDict
        ("a.py test_a.py", ""),
        ("c4-train.00000-of-2.json more.jsonl", ""),
    ])  # fmt: skip
    def test_what_is_not_for_training_is_named(self, names: str, splits: str, tmp_path: Path) -> None:
        """Who trains on all of them trains on the test data, too."""
        for name in names.split():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text('{"text": "a"}\n' if ".json" in name else "a text\n")
        if names.startswith("train/"):
            (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        note = f"; files of several splits are read: {splits}" if splits else ""
        assert load(str(tmp_path), "1").notes == note

    def test_a_pattern_takes_some_files_of_a_folder(self, tmp_path: Path) -> None:
        for name in ("train_sft-0.jsonl", "train_sft-1.jsonl", "test_sft-0.jsonl"):
            (tmp_path / name).write_text('{"text": "a"}\n')
        assert load(f"{tmp_path}/train_sft-*", "1").files == 2
        with pytest.raises(ValueError, match=r"no file or folder at .*/valid-\*"):
            load(f"{tmp_path}/valid-*", "1")

    def test_a_small_text_beside_rows_stays_whole(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("what is in here")
        (tmp_path / "rows.jsonl").write_text('{"text": "a text"}\n' * 5000)
        assert load(str(tmp_path), "1").documents == 5001

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


NO_SPLITS = ["", "a,b", "1,-1", "0,1,1", "1,1,1,1", "inf,1", "nan"]
NO_BLENDS: list[Any] = [[], [1, "a", 1], [0, "a"], ["1", ""], ["a", 1], [1]]


@pytest.mark.parametrize("wrong", [*NO_SPLITS, *NO_BLENDS], ids=str)
def test_what_is_no_split_and_no_blend(wrong: Any) -> None:
    parse, example = (Split.parse, "949,50,1") if isinstance(wrong, str) else (parse_prefixes, "prefixB")
    with pytest.raises(ValueError, match=f"^must be .*{example}.*, got ") as caught:
        parse(wrong)
    assert "\n" not in str(caught.value)


NAMES = [["a", "b"], ["2021", "2022", "2023"], ["./2021", "./2022"], ["a", "1"]]


@pytest.mark.parametrize("paths", NAMES, ids=str)
def test_a_list_of_prefixes_has_no_weights(paths: list[str]) -> None:
    """As in Megatron; a prefix may be a number."""
    assert parse_prefixes(paths) == tuple((path, None) for path in paths)


def test_a_list_of_two_readings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "3.idx").touch()
    for paths, weighted in (
        (["2021", "2022"], '[2021, "2022"]'),
        (["3", "a", "0.5", "b"], '[3, "a", 0.5, "b"]'),
    ):
        with pytest.raises(ValueError) as caught:
            parse_prefixes(paths)
        alone = json.dumps([f"./{path}" for path in paths])
        assert f"then write {weighted}, and as datasets alone, then write {alone}" in str(caught.value)
        assert next(share for _, share in parse_prefixes(json.loads(weighted))) is not None


class TestMicrobatches:
    plan = BatchPlan(replicas=3, dp=2, microbatches=2, micro_batch_size=2)

    def source(self) -> Callable[..., Any]:
        dataset = Samples(sequences_of(np.arange(30 * 4 + 1, dtype=np.uint16)), Needs(121, 4))
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
        dataset = Samples(sequences_of(np.arange(30 * 4 + 1, dtype=np.uint16)), Needs(121, 4))
        source, other = ValidationSource(dataset, 3, count=10), ValidationSource(dataset, 1, count=12)
        assert (len(source), source.available, len(other), other.available) == (10, 10, 12, 30)
        seen = torch.cat([source.microbatch(index)[0] for index in range(len(source))])
        assert sorted(seen[:, 0].tolist()) == list(range(0, 120, 4))
        assert torch.equal(torch.cat([other.microbatch(index)[0] for index in range(12)]), seen[:12])
        with pytest.raises(AssertionError):
            source.microbatch(10)

    def test_validation_split_too_small(self) -> None:
        dataset = Samples(sequences_of(np.arange(30 * 4 + 1, dtype=np.uint16)), Needs(121, 4))
        with pytest.raises(ValueError, match=r"corpus too small: .* = 11 x 3 need 33 samples of 4 tokens"):
            ValidationSource(dataset, 3, count=11)
