"""Training samples of an indexed dataset: one epoch of Megatron-core's GPTDataset, its indices kept on disk.

GPTDataset shuffles the sequences of a split, lays them end to end, and cuts samples; which sample is read when is
the plan's (`plans/samples.py`). Its indices are as long as the dataset has sequences and samples: one process of a
node makes them, the others wait for the files, and all map them into memory.
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_noloco.data.dataset import TokenDataset
from megatron_noloco.data.indexed import IndexedTokens

_INDICES = ("document_index", "sample_index", "shuffle_index")  # attributes of a GPTDataset, and its files


class ShuffledDataset(TokenDataset):
    """The samples of sequences `first` to `stop`, which lie end to end in an order drawn from `seed`.

    As many as a TokenDataset of the same tokens has, each token but the first a label exactly once.
    """

    def __init__(
        self,
        indexed: IndexedTokens,
        first: int,
        stop: int,
        seq_length: int,
        name: str,
        seed: int,
        cache: Path | None,
    ) -> None:
        """`cache`: the folder for indices; a folder `cache` beside the dataset if None.

        Raises ValueError for a split without a sample. `load_indices` comes before the first sample.
        """
        super().__init__(indexed.part(first, stop), seq_length, name)
        self._arguments = (indexed.prefix, np.arange(first, stop, dtype=np.int32), seq_length, seed)
        self._folder = (cache or Path(indexed.prefix).parent / "cache") / self._name_of_indices(indexed)
        self._samples: Any = None

    def load_indices(self) -> None:
        """Make them, unless they are there and sound; raises ValueError where they cannot be written."""
        try:
            with _one_process_of_this_node(self._folder):
                if not self._found():
                    self._build()
                    if not self._found():
                        raise OSError("the indices just written cannot be read")
        except OSError as error:
            raise ValueError(
                f"data.data_cache_path: cannot write {self._folder}: {error.strerror or error}; give a folder "
                f"for the indices of {self._arguments[0]}"
            ) from None

    def _found(self) -> bool:
        """Whether the indices on disk could be loaded; with one file missing GPTDataset would write into them."""
        if len(list(self._folder.glob("*"))) != len(_INDICES) + 1:
            return False
        try:
            self._samples = self._gpt_dataset(str(self._folder))
        except (ValueError, EOFError):  # cut short
            return False
        return True

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int64, shape [S + 1]."""
        self._check(index)
        sample = self._samples[index]
        return np.append(sample["tokens"].numpy(), int(sample["labels"][-1]))

    def _name_of_indices(self, indexed: IndexedTokens) -> str:
        """Of these tokens, split, length and seed: a dataset that was made anew gets new indices."""
        prefix, sequences, seq_length, seed = self._arguments
        written = [Path(f"{prefix}{suffix}").stat().st_mtime_ns for suffix in (".idx", ".bin")]
        facts = (len(indexed.tokens), len(indexed.lengths), sequences[0], sequences[-1], *written)
        digest = hashlib.sha256(repr([int(fact) for fact in facts]).encode()).hexdigest()[:12]
        return f"{Path(prefix).name}-{seq_length}-seed{seed}-{digest}"

    def _build(self) -> None:
        """Write the indices elsewhere first: the folder is there with all of them, or not at all."""
        folder = self._folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        built = self._gpt_dataset("")  # no folder: GPTDataset saves nothing
        stem = f"{built.unique_description_hash}-{type(built).__name__}-{built.index_split.name}"
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as building:
            partial = Path(building, "indices")
            partial.mkdir()
            for index in _INDICES:
                with (partial / f"{stem}-{index}.npy").open("wb") as file:
                    np.save(file, getattr(built, index))
                    file.flush()
                    os.fsync(file.fileno())
            (partial / f"{stem}-description.txt").write_text(built.unique_description)
            try:
                if folder.exists() and not self._found():
                    folder.rename(Path(building, "damaged"))
                partial.rename(folder)
            except OSError:
                if not self._found():  # else another node was faster, with the same
                    raise

    def _gpt_dataset(self, cache: str) -> Any:
        with warnings.catch_warnings(action="ignore"):  # that Transformer Engine and apex are not there
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from megatron.core.datasets.indexed_dataset import IndexedDataset
            from megatron.core.datasets.utils import Split

        prefix, sequences, seq_length, seed = self._arguments
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            blend=([prefix], None),
            split="1",
            path_to_cache=cache,
            # No sample is padded, and no mask asks where documents end: samples run across them.
            tokenizer=SimpleNamespace(vocab_size=None, eod=None, pad=-1, unique_identifiers={}),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        return GPTDataset(IndexedDataset(prefix), Path(prefix).name, sequences, None, Split.train, config)


@contextmanager
def _one_process_of_this_node(folder: Path) -> Iterator[None]:
    """The others wait. A lock of this node, since not every file system that nodes share has locks."""
    from filelock import FileLock

    digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir(), f"megatron_noloco-{os.getuid()}-{digest}.lock")
    with FileLock(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # who waits for it finds the folder; who comes later as well
