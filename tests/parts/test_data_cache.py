"""The cache of datasets: made once, whole or not at all, anew when a file or a setting changes."""

import fcntl
import os
import threading
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_noloco.cli.main import main
from megatron_noloco.data import cache, corpus
from megatron_noloco.data.cache import cache_folder, entries
from megatron_noloco.data.corpus import corpus_of
from megatron_noloco.data.indexed import read_indexed
from megatron_noloco.data.sources import Split, TextSource
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.errors import UserError

BYTES = ByteTokenizer()
HALVES = Split.parse("1,1")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(f"the text of {name}\n" * 9)
    return folder


def source_of(text: Path, split: Split = HALVES) -> TextSource:
    return TextSource(str(text), split, str((text if text.is_dir() else text.parent).parent / "cache"))


def count_makings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the entries that are made from now on."""
    made_now, original = list[str](), cache._made

    def count(folder: Path, digest: str, *others: Any) -> Any:
        made_now.append(digest)
        return original(folder, digest, *others)

    monkeypatch.setattr(cache, "_made", count)
    return made_now


def test_a_text_is_made_once_wherever_it_lies(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    makings = count_makings(monkeypatch)
    first = corpus_of(source_of(text), BYTES).make()
    moved = text.rename(text.with_name("moved"))
    assert corpus_of(source_of(moved), BYTES).make() == first
    assert len(makings) == 1
    assert sorted(path.name for path in first.folder.iterdir()) == [
        f"data.{suffix}" for suffix in ("bin", "facts.json", "idx")
    ]


@settings(max_examples=8)
@given(st.permutations(["content", "time kept", "added", "removed", "tokenizer"]))
def test_what_changes_a_dataset_makes_another_entry(changes: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(mkdtemp())
        (folder / "a.txt").write_text("one")
        (folder / "b.txt").write_text("two")
        source, tokenizer, digests = TextSource(str(folder), HALVES), ByteTokenizer(), set[str]()
        digests.add(corpus_of(source, tokenizer).recipe.digest)
        for change in changes:
            if change == "content":
                (folder / "a.txt").write_text("longer")
            elif change == "time kept":
                before = (folder / "b.txt").stat()
                while (
                    folder / "b.txt"
                ).stat().st_ctime_ns == before.st_ctime_ns:  # the system's clock has ticks
                    (folder / "b.txt").write_text("owt")
                    os.utime(folder / "b.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
            elif change == "added":
                (folder / "c.txt").write_text("three")
            elif change == "removed":
                (folder / "a.txt").unlink()
            else:
                patch.setattr(tokenizer, "digest", "another")
            assert corpus_of(source, tokenizer).recipe.digest not in digests, change
            digests.add(corpus_of(source, tokenizer).recipe.digest)


@pytest.mark.parametrize("locks", [True, False])
def test_two_that_make_it_at_once_both_have_it(
    locks: bool, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits; on a file system without locks, both make it."""
    makings, inside, go = count_makings(monkeypatch), threading.Event(), threading.Event()
    original, lock, found = corpus.read_documents, fcntl.flock, []

    def flock(*arguments: Any) -> None:
        if not locks:
            raise OSError("no locks here")
        if inside.is_set():
            go.set()  # the second one waits
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock)

    def slowly(*arguments: Any) -> Any:
        inside.set()
        assert go.wait(60)
        return original(*arguments)

    monkeypatch.setattr(corpus, "read_documents", slowly)
    threads = [
        threading.Thread(target=lambda: found.append(corpus_of(source_of(text), BYTES).make()))
        for _ in range(2)
    ]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    if not locks:
        while len(makings) < 2:
            threads[1].join(0.01)
        go.set()
    for thread in threads:
        thread.join(60)
    assert len(makings) == (1 if locks else 2)
    assert found[0] == found[1]
    assert read_indexed(found[0].prefix).tokens.tobytes().startswith(b"t\0h\0e\0")
    assert not list((text.parent / "cache").glob("*.partial-*"))


def test_a_file_that_changes_meanwhile_is_named(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = corpus.read_documents

    def change(*arguments: Any) -> Any:
        (text / "a.txt").write_text("other")
        return original(*arguments)

    monkeypatch.setattr(corpus, "read_documents", change)
    with pytest.raises(UserError, match=rf"^{text}: changed while it was read; start again"):
        corpus_of(source_of(text), BYTES).make()
    assert entries(text.parent / "cache") == []


def test_a_folder_that_cannot_be_written_says_what_to_set(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    source = TextSource(str(text), HALVES, str(tmp_path / "file" / "cache"))
    for door in (
        lambda: corpus_of(source, BYTES).check(tmp_path / "run"),
        lambda: corpus_of(source, BYTES).make(),
    ):
        with pytest.raises(UserError, match=r"file/cache: cannot be written: .*; give another data.cache$"):
            door()


def test_an_entry_in_a_folder_that_may_only_be_read_is_used(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = corpus_of(source_of(text), BYTES).make()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert corpus_of(source_of(text), BYTES).make() == entry
    corpus_of(source_of(text), BYTES).check(tmp_path / "run")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder(None) == Path("/caches/megatron_noloco/data")
    assert cache_folder("~/here") == Path.home() / "here"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(None) == Path.home() / ".cache/megatron_noloco/data"


def test_the_command_lists_and_clears(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = text.parent / "cache"
    digests = [corpus_of(source_of(path), BYTES).make().folder.name for path in (text, text / "a.txt")]
    (folder / "mine.txt").write_text("of the user")

    def listed(*options: str) -> list[str]:
        assert main(["data", "cache", "--folder", str(folder), *options]) == 0
        return capsys.readouterr().out.splitlines()

    assert {line.split()[0] for line in listed()[:-1]} == set(digests)
    assert sorted(line.split("  ")[-1] for line in listed()[:-1]) == [f"{text}", f"{text}/a.txt"]
    assert listed("--clear", digests[0][:6])[0].endswith("0.0 MB removed")
    assert [line.split()[0] for line in listed()[:-1]] == [digests[1]]
    (folder / digests[1] / cache._FACTS).write_text("damaged")
    assert [line.split()[0] for line in listed()[:-1]] == [], "it would be made again"
    listed("--clear")
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert listed() == [f"{folder}: 0.0 MB"]


def test_what_is_being_made_is_not_cleared(text: Path) -> None:
    digest = corpus_of(source_of(text), BYTES).recipe.digest
    partial = text.parent / "cache" / f"{digest}.partial-1"
    partial.mkdir(parents=True)
    with (partial.parent / f"{digest}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache.clear(partial.parent)
        assert partial.exists()
    cache.clear(partial.parent)
    assert not list(partial.parent.iterdir())
