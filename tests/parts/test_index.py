"""The index of a dataset is read where it lies: offsets and checksums are as of an array, without its memory."""

import tracemalloc
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_noloco.data import indexed
from megatron_noloco.data.blend import Blend
from megatron_noloco.data.indexed import Offsets, excerpt, read_indexed
from megatron_noloco.data.opening import open_data
from megatron_noloco.data.samples import ShuffledSamples
from megatron_noloco.data.sources import IndexedSource, Needs, Split, parse_prefixes
from megatron_noloco.data.tokenizer import ByteTokenizer
from tests.kit.datasets import write_dataset

SEQUENCES = 1 << 20


def write(prefix: Path, lengths: list[int]) -> str:
    return write_dataset(prefix, (np.arange(length) % 256 for length in lengths))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.data())
def test_offsets_are_those_of_an_array(lengths: list[int], data: st.DataObject) -> None:
    array = np.array([0, *accumulate(lengths)])
    offsets = Offsets(4 * array[:-1], 4 * int(array[-1]), 4)
    first = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(first + 1, len(lengths)))
    for ours, theirs in ((offsets, array), (offsets.part(first, stop), array[first : stop + 1])):
        assert len(ours) == len(theirs)
        assert ours[:].tolist() == theirs.tolist()
        ids = np.array(data.draw(st.lists(st.integers(0, len(theirs) - 1), max_size=5)), dtype=np.int64)
        assert ours[ids].tolist() == theirs[ids].tolist()


def test_samples_and_checksums_are_those_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run is continued with the samples of before."""
    monkeypatch.setattr(indexed, "_PIECE", 7)
    found = read_indexed(write(tmp_path / "a", [*range(1, 40)]))
    array = np.array([0, *accumulate(range(1, 40))])
    needs = Needs(257, 8, seed=3)
    datasets = [
        ShuffledSamples(replace(found.part(5, 30), offsets=offsets), needs)
        for offsets in (found.offsets.part(5, 30), array[5:31])
    ]
    ours, theirs = ([dataset[index].tokens.tolist() for index in range(len(dataset))] for dataset in datasets)
    assert ours == theirs
    for most in (indexed._EXCERPT_TOKENS, 16):
        monkeypatch.setattr(indexed, "_EXCERPT_TOKENS", most)
        assert excerpt(datasets[0].contents[1]).tolist() == excerpt(array[5:31]).tolist()
        assert len({Blend([dataset]).checksum() for dataset in datasets}) == 1


def test_a_long_index_takes_no_memory_of_a_rank(tmp_path: Path) -> None:
    """Nor to check it, or a sixteenth of 8 bytes for each sequence: the ends of blocks of 64."""
    write_long(tmp_path / "long")
    needs = Needs(257, 64, evaluates=True)
    source = IndexedSource(parse_prefixes(str(tmp_path / "long")), None, Split.parse("9,1"))
    open_data(source, ByteTokenizer(), needs)  # numpy imports more of itself
    tracemalloc.start()
    try:
        built = open_data(source, ByteTokenizer(), needs)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(built.training) == (round(0.9 * SEQUENCES) - 1) // 64
    assert held < SEQUENCES / 2
    assert peak < 4 * SEQUENCES, "half of the offsets; the tokens that are checked are 1 byte each"


def write_long(prefix: Path) -> None:
    """A dataset of `SEQUENCES` documents of one token each."""
    np.zeros(SEQUENCES, np.uint8).tofile(f"{prefix}.bin")
    header = indexed._HEADER.pack(indexed._MAGIC, indexed._VERSION, 1, SEQUENCES, SEQUENCES + 1)
    parts = np.ones(SEQUENCES, np.int32), np.arange(SEQUENCES), np.arange(SEQUENCES + 1)
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))


@pytest.mark.parametrize("at", [42, 50])
def test_each_number_of_an_index_is_checked(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that differs by less than a token, or lies at the border of two pieces."""
    monkeypatch.setattr(indexed, "_PIECE", 1)
    prefix = write(tmp_path / "a", [3, 4])  # int32 lengths at 34, int64 bytes at 42: 0 and 6
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[at] += 1
    Path(f"{prefix}.idx").write_bytes(content)
    with pytest.raises(ValueError, match="its sequences or documents do not lie one after the other"):
        read_indexed(prefix)
