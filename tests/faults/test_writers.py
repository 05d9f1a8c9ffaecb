"""What writes files for later: on a full disk it says so in one line, and killed anywhere it leaves no half.

A new writer of files that others read gets a row.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from megatron_noloco.data.corpus import corpus_of, preprocess
from megatron_noloco.data.indexed import read_indexed
from megatron_noloco.data.sources import Split, TextSource
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.files import write_tensors, write_whole
from tests.kit.faults import full_disk, is_killed

LINES = 200


class Writer(NamedTuple):
    """Writes into a folder, beside the folder "input".

    Attributes:
        read: what has been written, once more; None where nothing is.
        line: what it says on a full disk.
    """

    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    line: str


def input_of(folder: Path) -> Path:
    return next(path / "input" for path in folder.parents if (path / "input").exists())


def tensors(folder: Path) -> None:
    write_whole(folder / "a.safetensors", partial(write_tensors, tensors={"a": torch.arange(1000)}))


def cache_entry(folder: Path) -> str:
    source = TextSource(str(input_of(folder)), Split.parse("1,1"), str(folder))
    return str(corpus_of(source, ByteTokenizer()).make().prefix)


def dataset(folder: Path) -> None:
    preprocess([str(input_of(folder) / "a.jsonl")], folder / "out", ByteTokenizer(), append_eod=True)


def tokens_of(folder: Path, pattern: str) -> Any:
    """Of the only dataset that is there."""
    found = [path for path in folder.glob(pattern) if "partial" not in str(path.relative_to(folder))]
    if not found:
        return None
    (index,) = found
    return read_indexed(str(index.with_suffix(""))).tokens.tolist()


def tensors_of(folder: Path) -> Any:
    path = folder / "a.safetensors"
    return load_file(path)["a"].tolist() if path.exists() else None


WRITERS = {
    "tensors of a checkpoint": Writer(tensors, tensors_of, r"File too large: '{folder}/a.safetensors'"),
    "an entry of the data cache": Writer(
        cache_entry,
        partial(tokens_of, pattern="*/*.idx"),
        r"{folder}: cannot be written: .*; give another data.cache",
    ),
    "a dataset by preprocess": Writer(
        dataset, partial(tokens_of, pattern="*.idx"), r"cannot be written: .*; give another --output-prefix"
    ),
}


def visible(folder: Path) -> list[Path]:
    """All but parts of tensors, which go with the folder of their step."""
    return [path for path in folder.rglob("*") if not path.name.startswith(".")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder beside the texts that are read."""
    for name in ("input", "output"):
        (tmp_path / name).mkdir()
    write_input(tmp_path / "output", LINES)
    return tmp_path / "output"


def write_input(folder: Path, lines: int) -> None:
    (input_of(folder) / "a.txt").write_text("a long text\n" * lines)
    (input_of(folder) / "a.jsonl").write_text('{"text": "a long text"}\n' * lines)


@pytest.mark.parametrize("lines", [LINES, 100 * LINES], ids=["at the end", "while it writes"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_one_line_and_leaves_nothing(writer: str, lines: int, folder: Path) -> None:
    write, read, line = WRITERS[writer]
    write_input(folder, lines)
    with full_disk(), pytest.raises((OSError, ValueError)) as caught:
        write(folder)
    assert re.search(line.format(folder=folder) + "$", str(caught.value))
    assert read(folder) is None
    assert not [path for path in visible(folder) if path.is_file() and path.suffix != ".lock"]
    write(folder)
    assert read(folder)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_kill_at_any_touch_leaves_all_or_nothing(writer: str, folder: Path) -> None:
    """And the next write is whole, without what the killed one has left."""
    write, read, _ = WRITERS[writer]
    whole = folder / "whole"
    whole.mkdir()
    write(whole)
    expected, touch, killed = read(whole), 1, True
    while killed:
        there = folder / str(touch)
        there.mkdir()
        killed = is_killed(str(there), touch, lambda there=there: write(there))
        assert read(there) in (expected, None if killed else expected)
        if read(there) is None:
            write(there)
            assert len(visible(there)) == len(visible(whole))
        assert read(there) == expected
        touch += 1
    assert touch > 3
