"""Tokenizers: UTF-8 bytes, or what transformers' AutoTokenizer reads of a folder.

A special token that a text spells out, such as <|endoftext|>, is text, unless the choice of the tokenizer says
otherwise. In the text of a chat template it is always the token.

Importing transformers takes seconds. So the first process of a host that needs a tokenizer imports it, and keeps
in the cache what AutoTokenizer has read: `tokenizer.json`, settings and chat templates. All other processes and
commands read the kept folder with `tokenizers` alone.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from megatron_noloco.data.cache import Recipe, cache_folder, obtain
from megatron_noloco.data.chat import ChatTemplate
from megatron_noloco.data.fast_tokenizer import KEPT_MARK, FastTokenizer, deciding
from megatron_noloco.data.formats import Advance, Input
from megatron_noloco.errors import UserError
from megatron_noloco.files import outside, write_text
from megatron_noloco.job.activity import line_of

BYTES = 256
END_OF_DOCUMENT = "<|endoftext|>"  # name of the token in an export; in a text it is encoded as bytes
_READ = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # suffixes of the files that AutoTokenizer reads
_RANDOM = ("dropout", "alpha", "nbest_size")  # attributes of a model that draws other tokens each time


class ByteTokenizer:
    """A tokenizer without files or training: tokens 0 to 255 are UTF-8 bytes, 256 ends a document.

    `FastTokenizer` describes its attributes and methods, which are the same.
    """

    folder = None
    end_of_document = BYTES
    beginning_of_document = None
    adds_bos = False
    switched_off = ""
    before_document = ()
    end_of_answer = None
    splits_special_tokens = True
    special_tokens: dict[str, int] = {}  # noqa: RUF012 (read only)
    vocab_size = BYTES + 1
    digest = hashlib.sha256(b"UTF-8 bytes, 256 ends a document").hexdigest()
    files_digest = ""
    chat_template = ChatTemplate(None, None)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, uint16, shape [bytes]; no end-of-document token is added."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: list[str], from_template: bool = False) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def from_last_border(self, text: str) -> str:
        return text

    def count_special(self, text: str) -> int:
        return 0

    def count_lost(self, texts: list[str]) -> Counter[str]:
        return Counter()

    def decode(self, ids: np.ndarray | Sequence[int], special: bool = False) -> str:
        """Return the text of `ids`; `special`: with END_OF_DOCUMENT for end-of-document tokens.

        Bytes that are not UTF-8 become U+FFFD, as do ids past the vocabulary, which a padded model can emit.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        if special and (ends := np.flatnonzero(tokens == self.end_of_document)).size:
            return END_OF_DOCUMENT.join(map(self.decode, np.split(tokens, ends)))
        tokens = np.minimum(tokens[tokens != self.end_of_document], 0xFF)  # 0xFF never occurs in UTF-8
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def bytes_of(self, ids: np.ndarray, before: int) -> int:
        return int((ids < BYTES).sum())

    @cached_property
    def backend(self) -> Any:
        """This tokenizer as an object of `tokenizers`: byte-level BPE without merges."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # GPT-2's alphabet: a printable byte is itself; the others, in order, are the characters from U+0100 on.
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        printable = [ord(character) for character in alphabet if ord(character) < BYTES]
        others = sorted({*range(BYTES)} - {*printable})
        vocabulary = dict(
            zip([*alphabet, END_OF_DOCUMENT], [*printable, *others, self.end_of_document], strict=True)
        )
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_DOCUMENT])
        return tokenizer

    def save(self, folder: Path, max_length: int) -> None:
        """Write this tokenizer in Hugging Face's format."""
        _save(folder, self.backend, eos_token=END_OF_DOCUMENT, model_max_length=max_length)

    def copy_to(self, folder: Path) -> None:
        pass


Tokenizer = ByteTokenizer | FastTokenizer


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer, and how it reads text.

    Attributes:
        folder: of a Hugging Face fast tokenizer; None: bytes.
        split_special_tokens: whether a special token that a text spells out is text.
        prepend_bos: whether each document begins with BOS.
        cache: the folder in which hosts keep tokenizers, see `cache_folder`.
    """

    folder: str | None = None
    split_special_tokens: bool = True
    prepend_bos: bool = False
    cache: str | None = None


def choice_problem(kind: str | None, choice: TokenizerChoice) -> str:
    """Return why a choice is none for this tokenizer_type (None: not given); "" where it is."""
    if choice.folder is not None and kind == "byte":
        return 'tokenizer_model does not go together with tokenizer_type "byte"; leave one out'
    if choice.folder is None and kind not in (None, "byte"):
        return f'tokenizer_type "{kind}" needs tokenizer_model, its folder'
    if choice.folder is None and choice.prepend_bos:
        return "prepend_bos: the byte tokenizer has no BOS; leave prepend_bos out"
    return ""


def build_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Build the tokenizer of a run; raises UserError when its files are missing or broken, or it lacks a BOS."""
    if choice.folder is None:
        return ByteTokenizer()
    given = Path(choice.folder)
    kept = _kept_folder(given, choice.cache)
    return FastTokenizer(kept, choice.split_special_tokens, choice.prepend_bos, given)


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
        except UserError as error:
            problems.append(str(error))
            continue
        if digest in ("", found.digest):
            return found
        problems.append(f"{place}: reads other tokens than the run")
    raise UserError("; ".join(problems))


def _kept_folder(folder: Path, cache: str | None) -> Path:
    """Return the folder in `cache` (see `cache_folder`) that keeps a tokenizer; `folder` itself if it is a copy.

    Raises UserError where AutoTokenizer cannot read the folder, or has no fast tokenizer for it.
    """
    if (folder / KEPT_MARK).exists():
        return folder
    found = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
    files = [path for path in sorted(found) if path.suffix in _READ and path.is_file()]
    if not files:
        raise UserError(
            f"tokenizer_model {folder}: no folder with a tokenizer.json (looked from cwd {Path.cwd()}); give "
            "that of a Hugging Face tokenizer"
        )
    inputs = [Input(path, folder) for path in files]

    settings = {"kind": "Tokenizer", "transformers": version("transformers")}
    return obtain(
        cache_folder(cache), Recipe(f"tokenizer {folder}", inputs, settings, partial(_keep, folder))
    ).folder


def load_folder(folder: Path) -> Any:
    """Return the tokenizer that AutoTokenizer reads from a folder; raises anything where it cannot."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of classes that it takes in place of another
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _keep(folder: Path, prefix: Path, _: Advance) -> dict[str, Any]:
    kept = prefix.parent
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
    backend.no_truncation()
    backend.no_padding()
    random = {name: value for name in _RANDOM if (value := getattr(backend.model, name, None))}
    for name in random:
        setattr(backend.model, name, None)
    _save(kept, backend, chat_template=theirs.chat_template, **theirs.special_tokens_map)
    write_text(kept / KEPT_MARK, ", ".join(f"{name} {value:g}" for name, value in random.items()))
    return {}


def _save(folder: Path, backend: Any, **others: Any) -> None:
    """Write a tokenizer of `tokenizers` in Hugging Face's format, of a class that takes tokenizer.json as it is.

    Other classes may build rules of their own from its vocabulary.
    """
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **others,
    ).save_pretrained(folder)


def check_exported(folder: Path) -> str:
    """Return a line where AutoTokenizer does not read an export by its tokenizer.json; "" where it does.

    For some families AutoTokenizer takes a class of its own, whatever the files say.
    """
    from tokenizers import Tokenizer

    theirs, ours = load_folder(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend = getattr(theirs, "backend_tokenizer", None)
    if backend is not None and deciding(backend) == deciding(ours):
        return ""
    return (
        f"{folder}: for this family AutoTokenizer takes {type(theirs).__name__}, which reads other tokens than "
        "training did; load the tokenizer with PreTrainedTokenizerFast.from_pretrained"
    )
