"""Tokenizers: UTF-8 bytes, or a Hugging Face fast tokenizer from its files.

A special token that a text spells out, such as <|endoftext|>, is text, unless the choice of the tokenizer says
otherwise. In the text of a chat template it is always the token.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_noloco.data.auto_tokenizer import kept_folder
from megatron_noloco.data.chat import ChatTemplate
from megatron_noloco.data.fast_tokenizer import FastTokenizer
from megatron_noloco.errors import UserError

BYTES = 256
END_OF_DOCUMENT = "<|endoftext|>"  # name of the token in an export; in a text it is encoded as bytes


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

    def save(self, folder: Path, max_length: int) -> None:
        """Write this tokenizer in Hugging Face's format: byte-level BPE without merges."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

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
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=END_OF_DOCUMENT,
            model_max_length=max_length,
            model_input_names=["input_ids", "attention_mask"],
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)

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
    kept = kept_folder(given, choice.cache)
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
