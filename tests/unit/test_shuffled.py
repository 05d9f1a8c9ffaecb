"""Training samples of indexed datasets: Megatron-core's own, once an epoch, from indices that are made once."""

import os
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from megatron_noloco.data import shuffled
from megatron_noloco.data.indexed import IndexedTokens, IndexedWriter
from megatron_noloco.data.shuffled import ShuffledDataset
from tests.harness import run_ranks

LENGTHS = (3, 9, 1, 30, 7, 7, 2, 12, 5, 40, 4)
SEQ = 8


def write(prefix: Path, lengths: tuple[int, ...] = LENGTHS) -> Path:
    """Documents whose tokens are all different."""
    writer, first = IndexedWriter(prefix, vocab_size=1000), 0
    for length in lengths:
        writer.add(np.arange(first, first + length), ends_document=True)
        first += length
    writer.finish()
    return prefix


def dataset(
    prefix: Path, first: int = 0, stop: int | None = None, seed: int = 7, cache: Path | None = None
) -> ShuffledDataset:
    indexed = IndexedTokens(str(prefix))
    stop = len(indexed.lengths) if stop is None else stop
    made = ShuffledDataset(indexed, first, stop, SEQ, "the data", seed, cache)
    made.load_indices()
    return made


def samples(made: ShuffledDataset) -> list[list[int]]:
    return [made[index].tolist() for index in range(len(made))]


def megatrons(prefix: Path, first: int, stop: int, seed: int, cache: Path) -> list[list[int]]:
    """The samples that Megatron-core makes, used as its own documentation says."""
    tokenizer = SimpleNamespace(vocab_size=1000, eod=0, pad=999, unique_identifiers={})
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=SEQ,
        blend=([str(prefix)], None),
        split="1",
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    indices = np.arange(first, stop, dtype=np.int32)
    theirs = GPTDataset(IndexedDataset(str(prefix)), str(prefix), indices, None, Split.train, config)
    found = [theirs[index] for index in range(len(theirs))]
    return [[*sample["tokens"].tolist(), int(sample["labels"][-1])] for sample in found]


def test_samples_are_megatrons(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data")
    ours = samples(dataset(prefix, 1, 10))
    assert ours == megatrons(prefix, 1, 10, 7, tmp_path / "theirs")
    assert ours != samples(dataset(prefix, 1, 10, seed=8))


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), seed=st.integers(0, 5))
def test_every_token_is_a_label_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int
) -> None:
    """But the first one, and the rest that is shorter than a sample; inputs precede their labels in a document."""
    lengths.append(SEQ + 1)
    made = dataset(write(tmp_path_factory.mktemp("any") / "data", tuple(lengths)), seed=seed)
    found = samples(made)
    labels = Counter(token for sample in found for token in sample[1:])
    assert set(labels.values()) == {1}
    assert sum(labels.values()) == len(made) * SEQ == (sum(lengths) - 1) // SEQ * SEQ
    begins = {0, *np.cumsum(lengths).tolist()}
    for sample in found:
        assert all(label == token + 1 or label in begins for token, label in pairwise(sample))


def test_outside_is_an_index_error(tmp_path: Path) -> None:
    made = dataset(write(tmp_path / "data"))
    for index in (-1, len(made)):
        with pytest.raises(IndexError, match="outside the data"):
            made[index]


def test_indices_are_made_once_and_mapped_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write(tmp_path / "data")
    first = samples(dataset(prefix))
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name.startswith("data-8-seed7-")
    assert len(list(folder.iterdir())) == 4
    monkeypatch.setattr(gpt_dataset, "_build_document_index", pytest.fail)
    again = dataset(prefix)
    assert samples(again) == first
    assert isinstance(again._samples.sample_index, np.memmap)
    # The same data from elsewhere, however its prefix is written.
    monkeypatch.chdir(tmp_path)
    assert samples(dataset(Path("data"), cache=Path("cache"))) == first


def test_data_made_anew_gets_new_indices(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data")
    samples(dataset(prefix))
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}{suffix}").unlink()
    write(prefix, LENGTHS[::-1])
    assert samples(dataset(prefix)) == megatrons(prefix, 0, len(LENGTHS), 7, tmp_path / "theirs")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_half_made_index_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write(tmp_path / "data")
    real, calls = np.save, []

    def dies(path: Any, array: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(path, array)

    monkeypatch.setattr(shuffled.np, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        dataset(prefix)
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.undo()
    assert samples(dataset(prefix)) == megatrons(prefix, 0, len(LENGTHS), 7, tmp_path / "theirs")


def test_two_nodes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes do not see each other's locks: the slower one takes what the faster one has put there."""
    prefix = write(tmp_path / "data")
    real = Path.rename

    def late(path: Path, target: Path) -> Path:
        shutil.copytree(path, target)
        (made,) = (tmp_path / "cache").glob("data-*")
        inodes.append(made.stat().st_ino)
        return real(path, target)

    inodes: list[int] = []
    monkeypatch.setattr(shuffled.Path, "rename", late)
    assert samples(dataset(prefix)) == megatrons(prefix, 0, len(LENGTHS), 7, tmp_path / "theirs")
    (kept,) = (tmp_path / "cache").iterdir()
    assert [kept.stat().st_ino] == inodes


@pytest.mark.parametrize("index", ["document_index", "sample_index", "shuffle_index"])
@pytest.mark.parametrize("kept", [None, 0, 10, 140])
def test_damaged_indices_are_made_anew(tmp_path: Path, index: str, kept: int | None) -> None:
    """A cleaner of scratch folders took a file, or a power cut its end."""
    prefix = write(tmp_path / "data")
    first = samples(dataset(prefix))
    (damaged,) = (tmp_path / "cache").glob(f"*/*{index}.npy")
    if kept is None:
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:kept])
    assert samples(dataset(prefix)) == first
    (folder,) = (tmp_path / "cache").iterdir()
    assert len(list(folder.iterdir())) == 4


def read_all(rank: int, world_size: int, prefix: Path, built: Path) -> list[list[int]]:
    real = gpt_dataset._build_document_index

    def tell(*args: Any) -> Any:
        (built / str(os.getpid())).touch()
        return real(*args)

    gpt_dataset._build_document_index = tell
    return samples(dataset(prefix))


def test_one_process_of_a_node_makes_them(tmp_path: Path) -> None:
    prefix, built = write(tmp_path / "data"), tmp_path / "built"
    built.mkdir()
    found = run_ranks(4, read_all, prefix, built)
    assert all(ours == found[0] for ours in found)
    assert len(list(built.iterdir())) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^data.data_cache_path: cannot write .*file/.*: File exists; give"):
        dataset(prefix, cache=tmp_path / "file")
