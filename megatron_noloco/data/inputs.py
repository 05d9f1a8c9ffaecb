"""Find the files of an input, each once, and say which of them hold nothing to read."""

import os
import re
import sysconfig
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from glob import glob
from itertools import islice
from pathlib import Path
from typing import NoReturn

from megatron_noloco.data.formats import (
    OTHER_KEY,
    Input,
    first_bytes,
    first_object,
    text_problem,
    unpacked_name,
)
from megatron_noloco.data.sources import STANDARD_LIBRARY
from megatron_noloco.errors import UserError
from megatron_noloco.files import outside, read_object, without_mark

POINTERS = "pointer{} of Git LFS, `git lfs pull` fetches the files"  # reason of files that are not read
_NAMED = 3  # files of each kind in a summary
_UNPACK = {".xz": "xz -d", ".lzma": "unlzma", ".lz4": "lz4 -d", ".zip": "unzip", ".7z": "7z x"}
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
OTHERS = "others"  # in place of the split of a file that names none
_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def find_inputs(places: Iterable[str], option: str) -> list[Input]:
    """Return the files at `places`, each once; folders are searched recursively, without hidden files.

    In place of a path may stand STANDARD_LIBRARY, or a pattern such as data/train-*.parquet.
    Of several names of a file a name of records goes before others, then the file's own path before links.

    Raises UserError, which names the option that gave the places, when a place does not exist.
    """
    found = list[Input]()
    for place in places:
        if place == STANDARD_LIBRARY:
            found += _standard_library()
            continue
        given = Path(place).expanduser()
        if not (paths := paths_at(given)):
            prefix = "; a dataset has this prefix, which data.data_path takes" * Path(f"{given}.idx").exists()
            raise UserError(f"{option}: no file or folder at {place} (looked from cwd {Path.cwd()}){prefix}")
        for path in paths:
            below = files_below(path) if path.is_dir() else []
            found += [Input(file, path) for file in below] or [Input(path, None)] * (not path.is_dir())
    best_first = sorted(found, key=lambda item: (item.kind == "text", item.path.is_symlink()))
    chosen = {_identity(item.status): item for item in reversed(best_first)}
    return [item for item in dict.fromkeys(found) if chosen[_identity(item.status)] == item]


def paths_at(given: Path) -> list[Path]:
    """Return what is at a path, or what a pattern matches: nothing where nothing is there."""
    matching = [given] if given.exists() else map(Path, sorted(glob(str(given))))
    return [path for path in matching if path.exists()]


def why_left_out(item: Input, keys: Collection[str], rows_alone: bool) -> str:
    """Return why a file is not read, with {} for the "s" of several files; "" for a file that is.

    Raises UserError for a file that was given itself, if it has no reader, which would say what is wrong.

    Args:
        keys: of rows, one of which is read.
        rows_alone: whether texts are not read.
    """
    if not item.path.exists():
        return "link{} to nowhere"
    head = first_bytes(item.path, len(_LFS_POINTER))
    if not without_mark(head):
        return "empty file{}"
    reason = next(filter(None, _reasons(item, head, keys, rows_alone)), "")
    if reason and item.folder is None:
        raise UserError(f"{item.path}: {reason.format('')}")
    return reason


def _reasons(item: Input, head: bytes, keys: Collection[str], rows_alone: bool) -> Iterator[str]:
    """Yield why a file with content is not read, "" for what does not hold; see `why_left_out`."""
    path, name, found = item.path, unpacked_name(item.path), item.folder is not None
    other = "" if rows_alone else f", {OTHER_KEY}"
    if command := _UNPACK.get(path.suffix.lower()):
        yield f"file{{}} of {path.suffix}, which `{command}` unpacks"
    yield "file{} of CSV or TSV, write the rows as JSON lines or Parquet" * name.endswith((".csv", ".tsv"))
    yield POINTERS * (head == _LFS_POINTER)
    if item.kind == "text":
        yield "file{} without records" * (found and rows_alone)
        yield "file{} not in UTF-8" * (found and text_problem(path) != "")
        yield "file{} of JSON lines, to be named *.jsonl" * (first_object(path) is not None)
    elif found and name.endswith(".json") and not {*keys} & (first_object(path) or {}).keys():
        yield f"file{{}} of JSON whose first line is no object with {', '.join(keys)}{other}"


def split_of(item: Input) -> str | None:
    """Return the split of a published dataset that a file has by its path, OTHERS where the path names none.

    None for a text whose name does not end with .txt: in a folder of programs `test` is a word as others.
    """
    if item.kind == "text" and not unpacked_name(item.path).endswith(".txt"):
        return None
    words = re.split("[^a-z]+", item.name.lower())
    return next((word for word in reversed(words) if word in _SPLITS), OTHERS)


def in_words(files: Collection[Input], reason: str) -> str:
    """Return the files that are left out for a reason: how many, and the names of the first ones."""
    names = [outside(item.name) for item in islice(files, _NAMED)] + ["..."] * (len(files) > _NAMED)
    return f"{len(files)} {reason.replace('{}', 's' * (len(files) > 1))} ({', '.join(names)})"


def _standard_library() -> list[Input]:
    """Return the sources of Python's standard library, without its tests: text that every machine has."""
    paths = (path for path in files_below(_LIBRARY, _SKIPPED_FOLDERS) if path.suffix == ".py")
    return [Input(path, _LIBRARY) for path in paths if path.is_file() and path.stat().st_size]


def files_below(folder: Path, skipped: Collection[str] = ()) -> list[Path]:
    """Return the files below `folder`, and links to nowhere, by relative POSIX path.

    Hidden files and `skipped` folders are left out. Raises UserError for a folder that cannot be read.
    """
    paths = (
        parent / name
        for parent, names in _folders_from(folder, skipped)
        for name in names
        if not name.startswith(".")
    )
    found = (path for path in paths if path.is_file() or not path.exists())
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def check_outside(outputs: Mapping[str, Path], inputs: Iterable[Input], option: str) -> None:
    """Raise UserError when an output lies in a given folder, or in one that is linked there.

    Args:
        outputs: by their options.
        option: of the inputs.
    """
    for folder in {item.folder for item in inputs if item.folder not in (None, _LIBRARY)}:
        below = {_identity(os.stat(parent)) for parent, _ in _folders_from(folder, ())}
        for name, output in outputs.items():
            real = output.resolve()
            if any(_identity(path.stat()) in below for path in (real, *real.parents) if path.exists()):
                place = f"{name} {output} lies in {option} {folder}"
                raise UserError(f"{place}: what is written there would be read as text; give another {name}")


def hub_repository_of(path: Path) -> Path | None:
    """Return the repository in a cache of the Hugging Face Hub that has a file; None: it is elsewhere."""
    places = (parent.parent for parent in path.absolute().parents if parent.name == "snapshots")
    return next(filter(_is_hub_repository, places), None)


def _is_hub_repository(folder: Path) -> bool:
    named = folder.name.startswith(("models--", "datasets--")) or (folder / "refs").is_dir()
    return named and (folder / "blobs").is_dir() and (folder / "snapshots").is_dir()


def _folders_from(folder: Path, skipped: Collection[str]) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder from `folder` on, and the names of its files.

    Links are followed after all else: a folder that is reached twice, as in a loop, comes once, by its own path.
    Of a cache of the Hugging Face Hub only `snapshots` is read, whose links name the files in `blobs`. If the
    revision that `refs/main` names is there, others are not read. Of the folders of `datasets` the files are read
    that its `state.json` names.
    """
    seen, starts = set(), deque([folder])
    while starts:
        for parent, folders, files in os.walk(starts.popleft(), onerror=_refuse):
            if (identity := _identity(os.stat(parent))) in seen:
                folders.clear()
                continue
            seen.add(identity)
            here = Path(parent).absolute()
            if _is_hub_repository(here):
                folders[:], files = ["snapshots"], []
            elif here.name == "snapshots" and (main := here.parent / "refs" / "main").is_file():
                revision = main.read_text(errors="replace").strip()
                folders[:], files = ([revision], []) if revision in folders else (folders, files)
            files = _of_datasets(Path(parent), files)
            folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
            starts += [link for name in folders if (link := Path(parent, name)).is_symlink()]
            yield Path(parent), files


def _of_datasets(folder: Path, files: list[str]) -> list[str]:
    """Return the files of a folder, of one that `datasets` has written those with rows; raises UserError."""
    if "dataset_dict.json" in files:  # its rows are in the folders below, one for each split
        return []
    if not any(name.endswith(".arrow") for name in files) or "dataset_info.json" not in files:
        return files
    if "state.json" not in files:  # the cache of `datasets`, which may have the same rows after a `map`
        tables = [name for name in files if name.endswith(".arrow")]
        return [name for name in tables if not name.startswith("cache-")] or tables
    state = folder / "state.json"
    content = read_object(state, "save the dataset again")
    try:
        listed: list[str] = [item["filename"] for item in content["_data_files"]]
    except (KeyError, TypeError):
        raise UserError(f"{state}: does not name the files of the dataset; save it again") from None
    if missing := {*listed} - {*files}:
        raise UserError(f"{state}: names {min(missing)}, which is not there; save the dataset again")
    return listed


def _refuse(error: OSError) -> NoReturn:
    remedy = "make the folder readable, or hide it by a name that begins with a dot"
    raise UserError(f"{error.filename}: {error.strerror}; {remedy}") from None


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Return what all paths to a file or folder have in common, with links and without."""
    return status.st_dev, status.st_ino
