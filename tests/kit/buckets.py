"""An object store inside this process."""

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from megatron_noloco.federation.store import Store


class FakeBucket(MemoryFileSystem):
    """An object store: calls take time, a list has no order, and calls can be made to fail or to wait."""

    cachable = False

    def __init__(self, delay: float = 0.005) -> None:
        super().__init__()
        self.store, self.pseudo_dirs = dict[str, Any](), [""]  # of this one alone
        self._draws, self._lock = random.Random(0), threading.RLock()
        self.delay = delay
        self.fails = frozenset[str]()
        self.is_open = threading.Event()
        self.is_open.set()

    @contextmanager
    def _call(self, kind: str) -> Iterator[None]:
        time.sleep(self._draws.uniform(0, self.delay))
        self.is_open.wait()
        if kind in self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        with self._lock:
            yield

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        with self._call("write"):
            super().pipe_file(path, value, **options)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        with self._call("read"):
            return super().cat_file(path, start, end, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        with self._call("list"):
            found = super().ls(path, detail, **options)
            return self._draws.sample(found, len(found))

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        with self._call("remove"):
            for one in path if isinstance(path, list) else [path]:
                with suppress(FileNotFoundError):
                    super().rm(one, recursive, maxdepth)


def bucket(files: Any = None, url: str = "fake://bucket/run") -> Store:
    return Store(url, files or FakeBucket(), url.partition("://")[2], Counter())
