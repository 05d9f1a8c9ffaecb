"""The tokenizer of a run: bytes, or what transformers' AutoTokenizer reads of a folder.

Importing transformers takes seconds. So the first process of a host that needs a tokenizer imports it, and keeps
in the cache what AutoTokenizer has read. All other processes and commands build it from there with `tokenizers`
alone.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_noloco.data.cache import Made, Recipe, cache_folder, obtain
from megatron_noloco.data.formats import Advance, Input
from megatron_noloco.data.tokenizer import (
    KEPT,
    ByteTokenizer,
    Content,
    Tokenizer,
    TokenizerChoice,
    deciding,
    write_copy,
)
from megatron_noloco.errors import UserError
from megatron_noloco.files import outside, read_object
from megatron_noloco.job.activity import line_of

# Files of which AutoTokenizer needs one, and what it may read beside them
_TOKENS = "tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json"
_BESIDE = "*.json", "*.txt", "*.jinja", "*templates/*"
_RANDOM = ("dropout", "alpha", "nbest_size")  # attributes of a model that draws other tokens each time


def build_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Build the tokenizer of a run; raises UserError when its files are missing or broken, or it lacks a BOS."""
    if choice.folder is None:
        return ByteTokenizer()
    return Tokenizer(_content_of(Path(choice.folder), choice.cache), choice)


def find_tokenizer(choice: TokenizerChoice, places: Iterable[Path], digest: str = "") -> Tokenizer:
    """Build a run's tokenizer from the first of `places`, or from its own, that has the run's tokens.

    Raises UserError, which says what is wrong with each place, where none has.

    Args:
        digest: of the run's tokenizer; "": not known, so that the first place with a tokenizer is taken.
    """
    if choice.folder is None:
        return ByteTokenizer()
    problems = []
    for place in (*places, Path(choice.folder)):
        try:
            found = build_tokenizer(replace(choice, folder=str(place)))
            if digest in ("", found.digest):
                return found
            raise UserError(f"{place}: reads other tokens than the run")
        except UserError as error:
            problems.append(str(error))
    raise UserError("; ".join(problems))


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer, sound or not."""
    return bool(_files(folder, _TOKENS))


def _files(folder: Path, patterns: Iterable[str]) -> list[Input]:
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return [Input(path, folder) for path in sorted(paths)]


def _content_of(folder: Path, cache: str | None) -> Content:
    """Return what a folder holds: a copy, or what AutoTokenizer reads, once per host.

    Raises UserError where AutoTokenizer cannot read the folder, or has no fast tokenizer for it.

    Args:
        cache: see `cache_folder`.
    """
    if not has_tokenizer(folder):
        raise UserError(
            f"tokenizer_model {folder}: no folder with a tokenizer.json (looked from cwd {Path.cwd()}); give "
            "that of a Hugging Face tokenizer"
        )
    if not (folder / KEPT).exists():
        settings = {"kind": "content of a tokenizer", "transformers": version("transformers")}
        inputs = _files(folder, (*_TOKENS, *_BESIDE))
        recipe = Recipe(f"tokenizer {folder}", inputs, settings, partial(_read, folder))
        folder = obtain(cache_folder(cache), recipe).folder
    content: Any = read_object(folder / KEPT, "copy the tokenizer again")
    return content


def load_folder(folder: Path) -> Any:
    """Return the tokenizer that AutoTokenizer reads from a folder; raises anything where it cannot."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of classes that it takes in place of another
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _read(folder: Path, entry: Path, _: Advance) -> Made:
    """Write a copy of what AutoTokenizer reads, without what draws tokens at random; see `_content_of`."""
    try:
        theirs = load_folder(folder)
    except ImportError:  # a missing package, which the command names
        raise
    except Exception as error:  # it raises anything for files that it does not expect
        reason = outside(f"{type(error).__name__}: {line_of(error)}")
        raise UserError(f"tokenizer_model {folder}: transformers cannot read it ({reason})") from None
    backend = getattr(theirs, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"tokenizer_model {folder}: {type(theirs).__name__} of transformers has no fast tokenizer; give a "
            "folder with a tokenizer.json"
        )
    # A file may set truncation and padding, which would cut or pad texts.
    backend.no_truncation()
    backend.no_padding()
    random = {name: value for name in _RANDOM if (value := getattr(backend.model, name, None))}
    for name in random:
        setattr(backend.model, name, None)
    content = Content(
        tokenizer=backend.to_str(),
        special_tokens=theirs.special_tokens_map,
        chat_template=theirs.chat_template,
        switched_off=", ".join(f"{name} {value:g}" for name, value in random.items()),
    )
    write_copy(json.dumps(content), entry)
    return Made(f"tokenizer {folder}")


def check_exported(folder: Path, ours: Tokenizer) -> str:
    """Return a line where AutoTokenizer reads other tokens of an export than the tokenizer of its run; else "".

    For some families AutoTokenizer takes a class of its own, whatever the files say.
    """
    theirs = load_folder(folder)
    backend = getattr(theirs, "backend_tokenizer", None)
    if backend is not None and deciding(backend) == deciding(ours.backend):
        return ""
    return (
        f"{folder}: for this family AutoTokenizer takes {type(theirs).__name__}, which reads other tokens than "
        "training did; load the tokenizer with PreTrainedTokenizerFast.from_pretrained"
    )
