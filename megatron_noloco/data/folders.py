"""Folders of text and records: the files below, each once, and what their names say that they hold."""

import contextlib
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from megatron_noloco.errors import UserError

JSON_LINES, PARQUET = (".jsonl", ".json", ".ndjson"), ".parquet"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


def files_below(folder: Path, skipped: Collection[str] = ()) -> list[Path]:
    """Return the files below `folder` by relative POSIX path, without hidden files and `skipped` folders.

    Raises UserError for a folder that cannot be read.
    """
    found = filter(Path.is_file, _paths_below(folder, skipped))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def dead_links(paths: Iterable[Path]) -> str:
    """Return the end of a summary that counts links below folders that lead nowhere; "" where there are none."""
    number = sum(
        not path.exists() for folder in paths if folder.is_dir() for path in _paths_below(folder, ())
    )
    return f"; links that lead nowhere, left out: {number}" * (number > 0)


def _paths_below(folder: Path, skipped: Collection[str]) -> Iterator[Path]:
    for parent, names in _folders_from(folder, skipped):
        yield from (parent / name for name in names if not name.startswith("."))


def once(paths: Collection[Path]) -> dict[Path, int]:
    """Return one path to each file, in their order, and the number of further paths to it, such as links.

    A name that says that a file holds records goes before others, then the file's own path before links.
    """
    groups: dict[tuple[int, int], list[Path]] = {}
    for path in sorted(paths, key=lambda path: (not holds_records(path), path.is_symlink())):
        groups.setdefault(_identity(path), []).append(path)
    further = {first: len(others) for first, *others in groups.values()}
    return {path: further[path] for path in paths if path in further}


def read_once(further: int) -> str:
    """Return the end of a summary that counts further paths to files; "" where there are none."""
    return f"; further paths to files that are read once: {further}" * (further > 0)


def plain_name(path: Path) -> str:
    """Return the name of a file in small letters, without the suffix of a compression."""
    name = path.name.lower()
    return next((name.removesuffix(suffix) for suffix in COMPRESSIONS if name.endswith(suffix)), name)


def holds_records(path: Path) -> bool:
    """Return whether a file has the name of JSON lines or Parquet, compressed or not."""
    return plain_name(path).endswith((*JSON_LINES, PARQUET))


def _folders_from(folder: Path, skipped: Collection[str]) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder from `folder` on, and the names of its files.

    Links are followed after all else: a folder that is reached twice, as in a loop, comes once, by its own path.
    Of a cache of the Hugging Face Hub only `snapshots` is read, whose links name the files in `blobs`. If the
    revision that `refs/main` names is there, others are not read.
    """
    seen, starts = set(), deque([folder])
    while starts:
        for parent, folders, files in os.walk(starts.popleft(), onerror=_refuse):
            identity = _identity(parent)
            if identity in seen:
                folders.clear()
                continue
            seen.add(identity)
            if {"blobs", "snapshots"} <= {*folders} and ("refs" in folders or _is_of_the_hub(parent)):
                folders[:], files = ["snapshots"], []
            if (revision := _main_revision(Path(parent))) in folders:
                folders[:], files = [revision], []
            folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
            starts += [link for name in folders if (link := Path(parent, name)).is_symlink()]
            yield Path(parent), files


def _is_of_the_hub(folder: str) -> bool:
    """Return whether the library of the Hugging Face Hub names folders of its cache so."""
    return Path(folder).name.startswith(("models--", "datasets--"))


def _main_revision(snapshots: Path) -> str:
    """Return what `refs/main` of a cache of the Hub names; "" where there is none, or for another folder."""
    with contextlib.suppress(OSError, ValueError):
        if snapshots.name == "snapshots":
            return (snapshots.parent / "refs" / "main").read_text().strip()
    return ""


def _refuse(error: OSError) -> NoReturn:
    remedy = "make the folder readable, or hide it by a name that begins with a dot"
    raise UserError(f"{error.filename}: {error.strerror}; {remedy}") from None


def _identity(path: str | Path) -> tuple[int, int]:
    """Return what all paths to a file or folder have in common, with links and without."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def check_outside(outputs: Mapping[str, Path], folder: Path, folder_option: str) -> None:
    """Raise UserError when an output lies in a folder of text, or in one that is linked there.

    Args:
        outputs: by option.
        folder: may be a file, in which nothing lies.
    """
    if not folder.is_dir():
        return
    below = {_identity(parent) for parent, _ in _folders_from(folder, ())}
    for option, output in outputs.items():
        real = output.resolve()
        if any(_identity(path) in below for path in (real, *real.parents) if path.exists()):
            raise UserError(
                f"{option} {output} lies in {folder_option} {folder}: what is written there would be read as "
                f"text; give another {option}"
            )
