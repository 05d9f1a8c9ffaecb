"""A folder that several machines can write: of a file system, or with a prefix of a bucket.

What is relied on, and nothing more:

- A file appears whole. On a file system it is renamed into place. An object store does so with every object.
- Who has seen that a file was written can read it.
- A list of names has all files that were there before it began, in any order.

No conditional write, no lock, no rename in a bucket, no clock, and no order of two files that are written.
"""

import errno
import os
import random
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from megatron_noloco.errors import UserError
from megatron_noloco.files import outside

_LOCAL = "file://"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_NAMES = 20_000  # of a list, which may have names of strangers
_Result = TypeVar("_Result")


class Store:
    """A folder. Methods block; each raises OSError, whose text says what cannot be done, where and why.

    FileNotFoundError and PermissionError stay what they are; a read-only file system gives PermissionError.

    Attributes:
        url: such as "file:///shared/run" or "s3://bucket/run".
        is_local: whether it is a folder of a file system, where calls cost nothing.
        calls: how often each kind of call was made: of a bucket, requests.
    """

    def __init__(
        self, url: str, files: Any, path: str, calls: Counter[str], inner: tuple[str, ...] = ()
    ) -> None:
        self.url = url
        self.is_local = url.startswith(_LOCAL)
        self.calls = calls
        self._files, self._root, self._inner = files, path, inner
        self._path = "/".join((path, *inner))

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
        inner = (*self._inner, *name.split("/"))
        return Store(f"{self.url}/{name}", self._files, self._root, self.calls, inner)

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
            with self._folder_of(name) as (folder, last):
                partial = f"{last}.{secrets.token_hex(4)}"
                try:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    with open(os.open(partial, flags, 0o666, dir_fd=folder), "wb") as file:
                        file.write(content)
                    os.replace(partial, last, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    with suppress(OSError):
                        os.unlink(partial, dir_fd=folder)
                    raise

        self._call("put", "write", name, write)

    def get(self, name: str, most: int) -> bytes:
        """Return a file of so many bytes at most: of a larger object in a bucket, its beginning."""
        path = f"{self._path}/{name}"

        def read() -> bytes:
            if self.is_local:
                with self._folder_of(name) as (folder, last):
                    return _read_file(last, folder, most)
            return bytes(self._files.cat_file(path, start=0, end=most))

        return self._call("get", "read", name, read)

    def names(self) -> list[str]:
        """Return names, [] for a folder that is missing; of too many, others each time."""

        def look() -> list[str]:
            with suppress(FileNotFoundError):
                if self.is_local:
                    with _opened(self._root, self._inner) as folder:
                        os.utime(folder)  # on NFS, brings what other machines have changed
                        return os.listdir(folder)
                found = self._files.ls(self._path, detail=False)
                return [path.rstrip("/").rpartition("/")[2] for path in found]
            return []

        names = self._call("list", "list", "", look)
        return sorted(names if len(names) <= _MOST_NAMES else random.sample(names, _MOST_NAMES))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they are there, in one request for a thousand."""
        files = list(names)

        def remove() -> None:
            if self.is_local:
                self._remove_files(files)
            else:
                with suppress(FileNotFoundError):
                    self._files.rm([f"{self._path}/{name}" for name in files])

        if files:
            self._call("remove", "remove files", "", remove)

    def remove_all(self) -> None:
        """Remove the folder with all that is in there."""

        def remove() -> None:
            with suppress(FileNotFoundError):
                if not self._inner and self.is_local:
                    shutil.rmtree(self._path)
                elif self.is_local:
                    with _opened(self._root, self._inner[:-1]) as folder:
                        shutil.rmtree(self._inner[-1], dir_fd=folder)
                else:
                    self._files.rm(self._path, recursive=True)

        self._call("remove", "remove files", "", remove)

    @contextmanager
    def _folder_of(self, name: str) -> Iterator[tuple[int, str]]:
        """Open the folder of a file; give its descriptor, and the name in there."""
        *folders, last = name.split("/")
        with _opened(self._root, (*self._inner, *folders)) as folder:
            yield folder, last

    def _remove_files(self, names: Iterable[str]) -> None:
        """Remove all that can be removed; raise the first error."""
        errors = []
        for name in names:
            try:
                with self._folder_of(name) as (folder, last):
                    os.unlink(last, dir_fd=folder)
            except (FileNotFoundError, IsADirectoryError):
                pass
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

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


@contextmanager
def _opened(root: str, inner: Iterable[str]) -> Iterator[int]:
    """Open a folder; below the root, which the user has named, no link: another user may have made it."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in inner:
            outer, folder = folder, os.open(name, _FOLDER, dir_fd=folder)
            os.close(outer)
        yield folder
    finally:
        os.close(folder)


def _read_file(name: str, folder: int, most: int) -> bytes:
    """Read a regular file: opening a pipe or following a link could block, or lead anywhere."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("is not a regular file")
        if status.st_size > most:
            raise OSError(f"is larger than {most} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(descriptor)
