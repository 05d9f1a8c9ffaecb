"""Find the files of an input, each once."""

import os
import sysconfig
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron_noloco.data.formats import Input
from megatron_noloco.errors import UserError
from megatron_noloco.files import outside, read_object

_NAMED = 3  # files of each kind in a summary
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Inputs(NamedTuple):
    """Files to read, and the end of a summary that counts paths from which nothing is read."""

    files: list[Input]
    notes: str = ""


def find_inputs(places: Iterable[str], option: str) -> Inputs:
    """Return the files at `places`, each once; folders are searched recursively, without hidden files.

    Of several names of a file a name of records goes before others, then the file's own path before links.

    Raises UserError, which names the option that gave the places, when a place does not exist.
    """
    found, dead = list[Input](), 0
    for place in places:
        given = Path(place).expanduser()
        if not given.exists():
            prefix = "; a dataset has this prefix, which data.data_path takes" * Path(f"{given}.idx").exists()
            raise UserError(f"{option}: no file or folder at {place} (looked from cwd {Path.cwd()}){prefix}")
        for path in _paths_below(given) if given.is_dir() else [given]:
            dead += not path.exists()
            if path.is_file() or path == given:
                found.append(Input(path, given if given.is_dir() else None))
    best_first = sorted(found, key=lambda item: (item.kind == "text", item.path.is_symlink()))
    chosen = {_identity(item.path): item for item in reversed(best_first)}
    files = [item for item in dict.fromkeys(found) if chosen[_identity(item.path)] == item]
    return Inputs(files, f"; links that lead nowhere, left out: {dead}" * (dead > 0))


def left_out(files: Collection[Input], words: str) -> str:
    """Return files that are left out in words: how many, and the names of the first ones.

    Args:
        words: what they are, with {} for the "s" of several.
    """
    names = [outside(item.name) for item in islice(files, _NAMED)] + ["..."] * (len(files) > _NAMED)
    return f"{len(files)} {words.format('s' * (len(files) > 1))} ({', '.join(names)})"


def find_standard_library() -> Inputs:
    """Return the sources of Python's standard library, without its tests: text that every machine has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = files_below(folder, _SKIPPED_FOLDERS)
    return Inputs([Input(path, folder) for path in paths if path.suffix == ".py" and path.stat().st_size])


def files_below(folder: Path, skipped: Collection[str] = ()) -> list[Path]:
    """Return the files below `folder` by relative POSIX path, without hidden files and `skipped` folders.

    Raises UserError for a folder that cannot be read.
    """
    return list(filter(Path.is_file, _paths_below(folder, skipped)))


def check_outside(outputs: Mapping[str, Path], folder: Path, folder_option: str) -> None:
    """Raise UserError when an output lies in a folder of text, or in one that is linked there.

    Args:
        outputs: by option.
        folder: may be a file, in which nothing lies.
    """
    below = {_identity(parent) for parent, _ in _folders_from(folder, ())} if folder.is_dir() else ()
    for option, output in outputs.items():
        real = output.resolve()
        if any(_identity(path) in below for path in (real, *real.parents) if path.exists()):
            raise UserError(
                f"{option} {output} lies in {folder_option} {folder}: what is written there would be read as "
                f"text; give another {option}"
            )


def _paths_below(folder: Path, skipped: Collection[str] = ()) -> list[Path]:
    """Return the paths below `folder`, without hidden ones and folders, by relative POSIX path."""
    found = (
        parent / name
        for parent, names in _folders_from(folder, skipped)
        for name in names
        if not name.startswith(".")
    )
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


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
            if (identity := _identity(parent)) in seen:
                folders.clear()
                continue
            seen.add(identity)
            hub = "refs" in folders or Path(parent).name.startswith(("models--", "datasets--"))
            if hub and {"blobs", "snapshots"} <= {*folders}:
                folders[:], files = ["snapshots"], []
            elif (main := Path(parent).parent / "refs" / "main").is_file() and Path(
                parent
            ).name == "snapshots":
                revision = main.read_text(errors="replace").strip()
                folders[:], files = ([revision], []) if revision in folders else (folders, files)
            files = _of_datasets(Path(parent), files)
            folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
            starts += [link for name in folders if (link := Path(parent, name)).is_symlink()]
            yield Path(parent), files


def _of_datasets(folder: Path, files: list[str]) -> list[str]:
    """Return the files of a folder, of one that `datasets` has written those with rows; raises UserError."""
    if "dataset_dict.json" in files:  # its rows are in the folders below
        splits = read_object(folder / "dataset_dict.json", "save the dataset again").get("splits", [])
        if len(splits) > 1:
            raise UserError(
                f"{folder}: holds the splits {', '.join(map(str, splits))}; give the folder of one of them"
            )
        return []
    if not any(name.endswith(".arrow") for name in files) or "dataset_info.json" not in files:
        return files
    if "state.json" not in files:  # the cache of `datasets`, which may have the same rows after a `map`
        tables = [name for name in files if name.endswith(".arrow")]
        return [name for name in tables if not name.startswith("cache-")] or tables
    state = folder / "state.json"
    listed = [
        item["filename"] for item in read_object(state, "save the dataset again").get("_data_files", [])
    ]
    if missing := {*listed} - {*files}:
        raise UserError(f"{state}: names {min(missing)}, which is not there; save the dataset again")
    return listed


def _refuse(error: OSError) -> NoReturn:
    remedy = "make the folder readable, or hide it by a name that begins with a dot"
    raise UserError(f"{error.filename}: {error.strerror}; {remedy}") from None


def _identity(path: str | Path) -> tuple[int, int]:
    """Return what all paths to a file or folder have in common, with links and without."""
    status = os.stat(path)
    return status.st_dev, status.st_ino
