"""Bytes that should be UTF-8 text, as programs of other systems write it: with a byte order mark, or as UTF-16."""

import codecs
import json
from collections.abc import Iterable
from itertools import chain

_UTF_8 = ("utf-8", "utf-8-sig")


def without_mark(content: bytes) -> bytes:
    """Return UTF-8 text without the byte order mark at its beginning, which is no part of it."""
    return content.removeprefix(codecs.BOM_UTF8)


def check_whole_characters(text: str) -> None:
    """Raise ValueError for half a character, which JSON can escape and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "holds half a character (a surrogate such as \\ud83d without its other half)"
        ) from None


def check_utf_8(content: bytes) -> None:
    """Raise ValueError for text of UTF-16 or UTF-32, which the mark or zeros among its first 4 bytes show."""
    encoding = json.detect_encoding(content[:4])
    if encoding not in _UTF_8:
        name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")  # as iconv has them
        raise ValueError(
            f"not UTF-8 text: it begins as {name} does (iconv -f {name} -t UTF-8 would convert it)"
        )


def is_utf_8(pieces: Iterable[bytes]) -> bool:
    """Return whether pieces of bytes, one after the other, are UTF-8 text."""
    rest = iter(pieces)
    first = next(rest, b"")
    try:
        check_utf_8(first)
        return all(True for _ in codecs.iterdecode(chain([first], rest), "utf-8"))
    except ValueError:
        return False
