"""Collect four kinds of text that lie on this machine, for replicas that have text of their own.

    python -m tools.texts runs/texts

Writes a folder of files for each kind: modules of Python's standard library, C and C++ headers of PyTorch, English
documents of the installed packages, Perl modules. At most 6 MB of each, drawn by a hash of a file's content; none
longer than 200 kB, equal ones once. What is there differs between machines, and so do losses on it.
"""

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_noloco.data.corpus import files_below, standard_library_files
from tools.options import command_line

MOST_BYTES, LONGEST = 6_000_000, 200_000  # of a kind, of a file

_PACKAGES = Path(sysconfig.get_paths()["purelib"])
_DOCUMENTS = (".md", ".rst", ".txt", "METADATA", "README", "NOTICE", "LICENSE")


class Kind(NamedTuple):
    """Where the files of a kind are, and which are they."""

    files: Callable[[], list[Path]]
    suffixes: tuple[str, ...]


KINDS = {
    "python": Kind(standard_library_files, (".py",)),
    "headers": Kind(lambda: files_below(_PACKAGES / "torch" / "include"), (".h", ".cuh", ".hpp")),
    "documents": Kind(lambda: files_below(_PACKAGES), _DOCUMENTS),
    "perl": Kind(lambda: files_below(Path("/usr/share/perl")), (".pm", ".pl", ".pod")),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("output", type=Path, help="a new folder")
    output = parser.parse_args().output
    for kind in KINDS:
        folder = output / kind
        folder.mkdir(parents=True)
        total = 0
        for name, text in chosen(KINDS[kind]):
            (folder / name).write_bytes(text)
            total += len(text)
        print(f"{folder}: {len(list(folder.iterdir()))} files, {total / 1e6:.1f} MB")


def chosen(kind: Kind) -> Iterator[tuple[str, bytes]]:
    """Yield names for the files of a kind and their text, up to `MOST_BYTES`."""
    found = {}
    for path in kind.files():
        if path.name.endswith(kind.suffixes) and 0 < path.stat().st_size <= LONGEST:
            text = path.read_bytes()
            found[hashlib.sha256(text).hexdigest()[:16] + path.suffix] = text
    total = 0
    for name, text in sorted(found.items()):
        total += len(text)
        if total > MOST_BYTES:
            return
        yield name, text


if __name__ == "__main__":
    main()
