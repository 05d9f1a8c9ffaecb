"""Collect kinds of text that lie on this machine: for studies on several, and for replicas with text of their own.

    python -m tools.texts runs/texts

Writes a folder of files for each kind: modules of Python's standard library, C and C++ headers of PyTorch, English
documents of the installed packages, Perl modules, German messages of the system's programs, and a table of
Unicode's characters with their names. At most 6 MB of each, drawn by a hash of a file's content; none longer than
200 kB, equal ones once. What is there differs between machines, and so do losses on it; a kind that is not there
has no folder.
"""

import gettext
import hashlib
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_noloco.data.inputs import files_below, find_inputs
from megatron_noloco.data.sources import STANDARD_LIBRARY
from tools.options import command_line

MOST_BYTES, LONGEST = 6_000_000, 200_000  # of a kind, of a file

_PACKAGES = Path(sysconfig.get_paths()["purelib"])
_DOCUMENTS = (".md", ".rst", ".txt", "METADATA", "README", "NOTICE", "LICENSE")

Texts = Iterator[tuple[str, bytes]]
"""Suffixes of files, and what the files hold."""


def files_of(paths: Callable[[], list[Path]], *suffixes: str) -> Texts:
    """Yield the files whose names end so."""
    for path in paths():
        if path.name.endswith(suffixes):
            yield path.suffix, path.read_bytes()


def messages(language: str) -> Texts:
    """Yield what programs say in a language: 100 messages of one program in a file."""
    for path in files_below(Path("/usr/share/locale") / language):
        with path.open("rb") as file:
            try:
                catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            except (OSError, UnicodeDecodeError):  # no catalogue, or not in the encoding that it names
                continue
        said = [text for message, text in catalogue.items() if message and text]
        for start in range(0, len(said), 100):
            yield ".txt", "".join(f"{text}\n" for text in said[start : start + 100]).encode()


def characters() -> Texts:
    """Yield a table of Unicode's characters that have names of their own: a block of 256 codes in a file."""
    for start in range(0, 0x110000, 256):
        rows = [
            f"{code:04X};{name};{unicodedata.category(chr(code))};{unicodedata.bidirectional(chr(code))};"
            f"{unicodedata.decomposition(chr(code))}\n"
            for code in range(start, start + 256)
            if (name := unicodedata.name(chr(code), "")) and not name.endswith(f"-{code:04X}")
        ]
        yield ".txt", "".join(rows).encode()


KINDS: dict[str, Callable[[], Texts]] = {
    "python": lambda: files_of(lambda: [item.path for item in find_inputs([STANDARD_LIBRARY], "")], ".py"),
    "headers": lambda: files_of(lambda: files_below(_PACKAGES / "torch" / "include"), ".h", ".cuh", ".hpp"),
    "documents": lambda: files_of(lambda: files_below(_PACKAGES), *_DOCUMENTS),
    "perl": lambda: files_of(lambda: files_below(Path("/usr/share/perl")), ".pm", ".pl", ".pod"),
    "german": lambda: messages("de"),
    "characters": characters,
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("output", type=Path, help="a new folder")
    output = parser.parse_args().output
    for kind, texts in KINDS.items():
        files = list(chosen(texts()))
        if files:
            folder = output / kind
            folder.mkdir(parents=True)
        for name, text in files:
            (folder / name).write_bytes(text)
        print(f"{kind}: {len(files)} files, {sum(len(text) for _, text in files) / 1e6:.1f} MB")


def chosen(texts: Texts) -> Iterator[tuple[str, bytes]]:
    """Yield names for files and their text, up to `MOST_BYTES`."""
    found = {
        hashlib.sha256(text).hexdigest()[:16] + suffix: text
        for suffix, text in texts
        if 0 < len(text) <= LONGEST
    }
    total = 0
    for name, text in sorted(found.items()):
        total += len(text)
        if total > MOST_BYTES:
            return
        yield name, text


if __name__ == "__main__":
    main()
