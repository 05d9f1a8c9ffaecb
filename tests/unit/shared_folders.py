"""Folders between two carriers: of this machine, or of a store that is slow."""

import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from megatron_noloco.federation.folder import FolderCarrier
from megatron_noloco.federation.keys import Checksum, Cipher, Sealing
from megatron_noloco.federation.store import Store
from megatron_noloco.federation.streams import Carrier

FOLDERS = ["folder", "encrypted folder", "bucket"]


class FakeBucket(MemoryFileSystem):
    """An object store.

    Args:
        failures: share of calls that fail. A write that fails was made.
        delay: seconds that a call takes at most.
    """

    cachable = False

    def __init__(self, seed: int = 0, failures: float = 0.0, delay: float = 0.02) -> None:
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]  # of this one alone
        self._draws, self._lock = random.Random(seed), threading.RLock()
        self.failures, self.delay = failures, delay

    def _draw(self) -> None:
        with self._lock:
            delay, fails = self._draws.uniform(0, self.delay), self._draws.random() < self.failures
        time.sleep(delay)
        if fails:
            raise OSError("503 Slow Down")

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        with self._lock:
            super().pipe_file(path, value, **options)
        self._draw()

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        self._draw()
        with self._lock:
            return super().cat_file(path, start, end, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        with self._lock:
            found = super().ls(path, detail, **options)
            self._draws.shuffle(found)
        self._draw()
        return found

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        self._draw()
        with self._lock:
            super().rm(path, recursive, maxdepth)


def bucket(files: Any = None, url: str = "fake://bucket/run", **options: Any) -> Store:
    return Store(url, files or FakeBucket(**options), url.partition("://")[2], Counter())


def two_in_a_folder(kind: str) -> tuple[list[Carrier], str]:
    """Two carriers in a new folder, and the endpoint of the second one."""
    sealing: Sealing = Cipher(b"key") if kind == "encrypted folder" else Checksum()
    store = bucket() if kind == "bucket" else Store.of(Path(tempfile.mkdtemp()).as_uri())
    here, there = (FolderCarrier(store, slot, sealing, print) for slot in range(2))
    return [here, there], there.endpoint
