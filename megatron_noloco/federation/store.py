"""A folder that several machines can write: of a file system, or with a prefix of a bucket.

What is relied on, and nothing more:

- A file appears whole. On a file system it is renamed into place. An object store does so with every object.
- Who has seen that a file was written can read it.
- A list of names has all files that were there before it began, in any order.

No conditional write, no lock, no rename in a bucket, no clock, and no order of two files that are written.
"""

import asyncio
import errno
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from megatron_noloco.errors import UserError
from megatron_noloco.files import outside

_LOCAL = "file://"
_THREADS = 32  # calls under way; a large file must not keep a small one waiting
_Result = TypeVar("_Result")


class Store:
    """A folder. Methods block; each raises OSError, whose text says what cannot be done, where and why.

    FileNotFoundError and PermissionError stay what they are; a read-only file system gives PermissionError.

    Attributes:
        url: such as "file:///shared/run" or "s3://bucket/run".
        is_local: whether it is a folder of a file system, where calls cost nothing.
        calls: how often each kind of call was made: of a bucket, requests.
    """

    def __init__(self, url: str, files: Any, path: str, calls: Counter[str]) -> None:
        self.url = url
        self.is_local = url.startswith(_LOCAL)
        self.calls = calls
        self._files, self._path = files, path

    @classmethod
    def of(cls, url: str) -> "Store":
        """Return the folder at a URL; "~" is the home folder. Raises UserError."""
        import fsspec  # seconds

        try:
            if url.startswith(_LOCAL):
                path = str(Path(url.removeprefix(_LOCAL)).expanduser().absolute())
                return cls(f"{_LOCAL}{path}", fsspec.filesystem("file"), path, Counter())
            files, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError, RuntimeError) as error:
            raise UserError(f'"{url}": {error}') from None
        return cls(url.rstrip("/"), files, path.rstrip("/"), Counter())

    def below(self, name: str) -> "Store":
        """Return a folder in this one, whose calls count as calls of this one."""
        return Store(f"{self.url}/{name}", self._files, f"{self._path}/{name}", self.calls)

    def create(self) -> bool:
        """Make the folder, if there is none. A bucket needs none. Return whether it was made now."""
        is_new = self.is_local and not os.path.exists(self._path)
        if self.is_local:
            self._call("create", "write", "", lambda: os.makedirs(self._path, exist_ok=True))
        return is_new

    def put(self, name: str, content: bytes) -> None:
        """Write a file, over another of that name. On a file system its folder must exist."""
        path = f"{self._path}/{name}"

        def write() -> None:
            if not self.is_local:
                self._files.pipe_file(path, content)
                return
            partial = Path(f"{path}.{uuid.uuid4().hex}.partial")
            try:
                partial.write_bytes(content)
                partial.replace(path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise

        self._call("put", "write", name, write)

    def get(self, name: str, most: int) -> bytes:
        """Return the first `most` bytes of a file that is not empty."""
        path = f"{self._path}/{name}"
        return self._call("get", "read", name, lambda: bytes(self._files.cat_file(path, start=0, end=most)))

    def names(self) -> list[str]:
        """Return the names of the files and folders here, sorted; [] for a folder that is missing."""

        def look() -> list[str]:
            try:
                if self.is_local:
                    os.utime(self._path)  # on NFS, brings what other machines have changed
                    return sorted(os.listdir(self._path))
                found = self._files.ls(self._path, detail=False)
                return sorted(path.rstrip("/").rpartition("/")[2] for path in found)
            except FileNotFoundError:
                return []

        return self._call("list", "list", "", look)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they are there, in one request for a thousand."""
        paths = [f"{self._path}/{name}" for name in names]

        def remove() -> None:
            for batch in [[path] for path in paths] if self.is_local else [paths]:
                with suppress(FileNotFoundError):
                    self._files.rm(batch)

        if paths:
            self._call("remove", "remove files", "", remove)

    def remove_all(self) -> None:
        """Remove the folder with all that is in there."""

        def remove() -> None:
            with suppress(FileNotFoundError):
                if self.is_local:
                    shutil.rmtree(self._path)
                else:
                    self._files.rm(self._path, recursive=True)

        self._call("remove", "remove files", "", remove)

    def _call(self, kind: str, verb: str, name: str, call: Callable[[], _Result]) -> _Result:
        self.calls[kind] += 1
        try:
            return call()
        except Exception as error:  # the packages behind fsspec raise what they like
            # An OSError of the system says its reason without the path.
            why = outside(getattr(error, "strerror", None) or str(error) or type(error).__name__)
            kinds = FileNotFoundError, PermissionError
            kind_of_error = next((kept for kept in kinds if isinstance(error, kept)), OSError)
            if getattr(error, "errno", None) == errno.EROFS:
                kind_of_error = PermissionError
            url = self.url.removeprefix(_LOCAL)
            place = f"{url}/{name}" if name else url
            raise kind_of_error(f"cannot {verb} {'in ' if not name else ''}{place}: {why}") from None


def seconds_of_calls(folder: Store) -> dict[str, float]:
    """Write a file, list it, read it and remove it; return the seconds of each. Raises OSError.

    The folder is there.
    """
    name, content = f"try-{uuid.uuid4().hex}", os.urandom(2**20)

    def found() -> None:
        if name not in folder.names():
            raise OSError(f"a file that was written is not listed in {folder.url}")

    def read() -> None:
        if folder.get(name, len(content)) != content:
            raise OSError(f"a file that was written is read otherwise in {folder.url}")

    def remove() -> None:
        folder.remove([name])

    seconds = {}
    calls = {"write": lambda: folder.put(name, content), "list": found, "read": read, "remove": remove}
    try:
        for verb, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[verb] = time.perf_counter() - began
    except OSError:
        with suppress(OSError):
            remove()
        raise
    return seconds


class Caller:
    """Calls what may block, in threads, for one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "store")

    async def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        """Wait for no call that is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)
