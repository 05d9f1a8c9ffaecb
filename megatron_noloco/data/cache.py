"""The cache of what is made once per host: datasets of text and records, and tokenizers.

An entry is a folder with `data.facts.json`, and the indexed dataset `data` or a tokenizer. Its name is a digest of
what decides the entry: the tokenizer, the settings, and of each file its name below the given folder, size and
times of the last changes. As in git's index these stand for the content, since every start would have to read
all of it. The system sets the second time (ctime) at each change, also if a program restores the first.

An entry gets its name when it is complete. A lock keeps two processes of a host from making the same entry; what a
killed process leaves is removed when the entry is made again. A dataset with a name of the user's (`write_named`)
is an entry until it is complete.
"""

import fcntl
import glob
import json
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron_noloco.data.formats import Advance, Input
from megatron_noloco.errors import UserError
from megatron_noloco.files import put_in_place, sha256_of, write_text, writing
from megatron_noloco.job import activity

_FORMAT = 11  # of entries; another one where the same files would become other tokens or facts
_DIGITS = 32  # of a digest
_FACTS = "data.facts.json"
_FIRST_SECONDS = 2.0  # nothing is shown of what takes less
_TERMINAL_SECONDS, _LINE_SECONDS = 0.5, 30.0  # between two lines; on a terminal each replaces the one before


class Made(NamedTuple):
    """What is known of an entry, and kept as `_FACTS`; all but `source` of a dataset only."""

    source: str  # for the user
    tokenizer: str = ""  # digest of what made the tokens
    files: int = 0
    bytes: int = 0  # of the files
    documents: int = 0  # of a text
    tokens: int = 0  # of a text
    records: int = 0  # for fine-tuning
    lost_share: float = 0.0  # of the characters, for which no token stands
    lost: str = ""  # the same in words, with examples
    notes: str = ""  # the end of a summary: what is read otherwise than it looks


class Recipe(NamedTuple):
    """What an entry is made of."""

    source: str  # for the user
    inputs: Sequence[Input]
    settings: dict[str, Any]  # what decides the dataset beside the inputs; JSON
    write: Callable[[Path, Advance], Made]  # fills a folder with what is made, synced
    option: str = "data.cache"  # says where it is made

    @property
    def digest(self) -> str:
        stats = [(item.name, item.status) for item in self.inputs]
        files = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
        return sha256_of([_FORMAT, files, self.settings])[:_DIGITS]


class Entry(NamedTuple):
    """One complete entry."""

    folder: Path
    made: Made

    @property
    def prefix(self) -> str:
        return str(self.folder / "data")

    @property
    def used(self) -> float:
        """When it was used last, in seconds since 1970."""
        return (self.folder / _FACTS).stat().st_mtime

    @property
    def bytes(self) -> int:
        return _bytes_in(self.folder)


def cache_folder(setting: str | None) -> Path:
    """Return the folder that `data.cache` names; None: the user's cache folder. Raises UserError."""
    if setting is not None:
        return Path(setting).expanduser()
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        raise UserError("data.cache: this user has no home folder; set data.cache to a folder") from None
    return caches / "megatron_noloco" / "data"


def find_entry(folder: Path, digest: str) -> Entry | None:
    """Return the entry with this digest; None if it is not there."""
    made = made_at(str(folder / digest / "data"))
    return made and Entry(folder / digest, made)


def made_at(prefix: str) -> Made | None:
    """Return what is known of a dataset; None of one that was not made here, or if the file is damaged."""
    with suppress(OSError, ValueError, TypeError):
        content = json.loads(Path(f"{prefix}.facts.json").read_text())
        return Made(**{name: content[name] for name in Made._fields if name in content})
    return None


def obtain(folder: Path, recipe: Recipe) -> Entry:
    """Return the entry of a recipe, which is made if it is not there, or when another process has made it.

    Raises UserError if nothing can be written in the folder, or if an input changes meanwhile.
    """
    digest = recipe.digest
    if found := find_entry(folder, digest):
        with suppress(OSError):  # a folder that this user may only read
            os.utime(found.folder / _FACTS)
        return found
    with _alone(folder, digest, recipe):
        if found := find_entry(folder, digest):
            return found
        with _made(folder, digest, recipe) as entry:
            try:
                put_in_place(entry.folder, folder / digest)
            except OSError:  # without locks, another process may have been faster
                if find_entry(folder, digest) is None:
                    raise
        return Entry(folder / digest, entry.made)


@contextmanager
def _alone(folder: Path, name: str, recipe: Recipe) -> Iterator[None]:
    """Keep other processes from making what will have this name, and remove what a killed process has left of it.

    On a file system without locks several processes may make the same. Raises UserError if nothing can be written.
    """
    path, locked = folder / f"{name}.lock", False
    activity.now.part(f"waiting for another process, which prepares {recipe.source}")
    with writing(folder, recipe.option):
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            locked = True
        if locked and not _is_at(path, lock):  # the process before has removed the file
            with _alone(folder, name, recipe):
                yield
            return
        try:
            for left in folder.glob(f"{glob.escape(name)}.partial-*") if locked else ():
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            path.unlink(missing_ok=True)


def _is_at(path: Path, file: IO[str]) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


@contextmanager
def _shown(what: str, total: int) -> Iterator[Advance]:
    """Show on stderr how many of `total` bytes are read, and when all will be; tell the watchdog."""
    done, on_terminal, began = 0, sys.stderr.isatty(), time.monotonic()
    following = began + _FIRST_SECONDS

    def advance(read_bytes: int) -> None:
        nonlocal done, following
        done, now = done + read_bytes, time.monotonic()
        left = f", {(now - began) * (total - done) / done:.0f} s left" if done else ""
        line = f"{what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB{left}"
        activity.now.part(line)
        if now >= following:
            following = now + (_TERMINAL_SECONDS if on_terminal else _LINE_SECONDS)
            sys.stderr.write(f"\r\x1b[K{line}" if on_terminal else f"{line}\n")
            sys.stderr.flush()

    activity.now.part(what)
    try:
        yield advance
    finally:
        if on_terminal:
            sys.stderr.write("\r\x1b[K")


@contextmanager
def _made(folder: Path, name: str, recipe: Recipe) -> Iterator[Entry]:
    """Make an entry under a name of its own; it is removed in the end, if it has not got another."""
    partial, digest = folder / f"{name}.partial-{uuid.uuid4().hex}", recipe.digest
    total = sum(item.bytes for item in recipe.inputs)
    try:
        # Inputs that cannot be read are UserErrors.
        with writing(folder, recipe.option), _shown(f"preparing {recipe.source}", total) as advance:
            partial.mkdir()
            made = recipe.write(partial, advance)
            write_text(partial / _FACTS, json.dumps(made._asdict()))
        if recipe.digest != digest:
            raise UserError(f"{recipe.source}: changed while it was read; start again when it is complete")
        yield Entry(partial, made)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_named(prefix: Path, recipe: Recipe, check: Callable[[Made], None]) -> Made:
    """Make a dataset, `PREFIX.bin` and `.idx`, and `PREFIX.facts.json`; return what the latter says.

    The files get their names when they are complete, the index last. Raises UserError if the dataset exists, or if
    nothing can be written.

    Args:
        check: raises UserError for a dataset that is not to be kept.
    """
    with _alone(prefix.parent, prefix.name, recipe):
        if Path(f"{prefix}.idx").exists():
            raise UserError(f"{prefix}.idx exists already; remove it or give another {recipe.option}")
        with _made(prefix.parent, prefix.name, recipe) as entry:
            check(entry.made)
            for suffix in ("bin", "facts.json", "idx"):
                put_in_place(Path(f"{entry.prefix}.{suffix}"), Path(f"{prefix}.{suffix}"))
        return entry.made


def entries(folder: Path) -> list[Entry]:
    """Return the entries, the one that was used last first."""
    names = (path.parent.name for path in folder.glob(f"*/{_FACTS}") if _is_of_cache(path.parent))
    found = (find_entry(folder, name) for name in names)
    return sorted(filter(None, found), key=lambda entry: -entry.used)


def clear(folder: Path, digests: Sequence[str] = ()) -> int:
    """Remove entries whose digests begin so, all if none is given, and what is not finished; return the bytes.

    Runs that have an entry open keep it until they end, on a local disk. An entry that is being made stays.
    Raises UserError for an empty name, such as a variable of a shell that is not set.
    """
    if "" in digests:
        raise UserError('--clear "": an empty name; name entries, or give --clear alone to remove all')
    freed = 0
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        chosen = _is_of_cache(path) and path.name.startswith(tuple(digests) or "")
        if chosen and not _is_being_made(folder, path.name[:_DIGITS]):
            if path.is_dir():
                freed += _bytes_in(path)
                shutil.rmtree(path)
            else:
                path.unlink()
    return freed


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _is_being_made(folder: Path, digest: str) -> bool:
    try:
        with (folder / f"{digest}.lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # other errors: there is no such file, or the file system has no locks
        return isinstance(error, BlockingIOError)
    return False


def _is_of_cache(path: Path) -> bool:
    return re.match(rf"[0-9a-f]{{{_DIGITS}}}($|\.lock$|\.partial-)", path.name) is not None
