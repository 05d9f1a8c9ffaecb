"""Tokenizers: UTF-8 bytes, or a Hugging Face fast tokenizer from its files.

A special token that a text spells out, such as <|endoftext|>, is text, unless the choice of the tokenizer says
otherwise. In the text of a chat template it is always the token.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, Protocol

import numpy as np

from megatron_noloco.data.fast_tokenizer import FastTokenizer
from megatron_noloco.data.sources import TokenizerChoice

BYTES = 256
END_OF_DOCUMENT = "<|endoftext|>"  # name of the token in an export; in a text it is encoded as bytes


class Tokenizer(Protocol):
    """A tokenizer as training, export and preprocessing use it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    @property
    def end_of_answer(self) -> int | None:
        """The first special token after an answer in the chat template; None where there is none."""
        ...

    @property
    def beginning_of_document(self) -> int | None:
        """The token that the tokenizer names for the beginning of a text (BOS); None where there is none."""
        ...

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all that decides which tokens a text gets, with the tokens of begin and end."""
        ...

    @property
    def template_digest(self) -> str:
        """Hex SHA-256 of the chat template; "" where there is none."""
        ...

    @property
    def before_document(self) -> tuple[int, ...]:
        """Tokens with which each document begins in training: BOS where the choice says so, or none."""
        ...

    @property
    def splits_special_tokens(self) -> bool:
        """Whether a special token that a text spells out is text; in a template's text it never is."""
        ...

    @property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens that a text can spell out, with their ids."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, shape [tokens]; nothing is added at either end."""
        ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text; faster than `encode` for each."""
        ...

    def encode_with_starts(
        self, texts: list[str], from_template: bool = False
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return of each text its tokens, and the character at which each token begins, both shape [tokens].

        Args:
            from_template: whether special tokens that the texts spell out are these tokens in any case.
        """
        ...

    def count_special(self, text: str) -> int:
        """Return how many special tokens `text` spells out."""
        ...

    def chat_template(self, tools: Any = None) -> str:
        """Return the chat template for conversations with these tools; raises ValueError where there is none."""
        ...

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Return the text of a conversation in the tokenizer's chat template.

        Raises ValueError where there is no template, or the template refuses the messages.

        Args:
            tools: the tools that the assistant may call, in the form that the template takes.
            add_generation_prompt: whether to append the beginning of an answer.
            template: another chat template; None: that of the tokenizer.
        """
        ...

    def decode(self, ids: np.ndarray | Sequence[int]) -> str: ...

    def save(self, folder: Path, max_length: int) -> None:
        """Write the files that `AutoTokenizer.from_pretrained` reads: it adds a BOS if training does."""
        ...

    def keep_in(self, folder: Path) -> None:
        """Copy the files, if it has some, from which the tokenizer can be built again, unless they are there."""
        ...


def build_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Build the tokenizer of a run; raises ValueError when its files are missing or broken, or it lacks a BOS."""
    if choice.tokenizer_type == "byte":
        if choice.prepend_bos:
            raise ValueError("prepend_bos: the byte tokenizer has no BOS; leave prepend_bos out")
        return ByteTokenizer()
    if choice.tokenizer_model is None:
        raise ValueError(
            f"tokenizer_type {choice.tokenizer_type} needs tokenizer_model: a folder with a tokenizer.json"
        )
    return FastTokenizer(Path(choice.tokenizer_model), choice.split_special_tokens, choice.prepend_bos)


def find_tokenizer(choice: TokenizerChoice, places: Iterable[Path], digest: str) -> Tokenizer:
    """Build a saved run's tokenizer from the first of `places`, or from its own, that has the run's tokens.

    Raises ValueError where none has.

    Args:
        digest: of the run's tokenizer; "": not known, so that the first place with a tokenizer is taken.
    """
    if choice.tokenizer_model is None:
        return build_tokenizer(choice)
    problems = []
    for place in (*places, Path(choice.tokenizer_model)):
        try:
            found = build_tokenizer(replace(choice, tokenizer_model=str(place)))
        except ValueError as error:
            problems.append(str(error))
            continue
        if digest in ("", found.digest):
            return found
        problems.append(f"{place}: reads other tokens than the run")
    raise ValueError(f"the run's tokenizer is not found (give --tokenizer FOLDER): {'; '.join(problems)}")


class ByteTokenizer:
    """A tokenizer without files or training: tokens 0 to 255 are UTF-8 bytes, 256 ends a document."""

    end_of_document = BYTES
    end_of_answer = None
    beginning_of_document = None
    before_document = ()
    splits_special_tokens = True
    special_tokens: dict[str, int] = {}  # noqa: RUF012 (read only)
    vocab_size = BYTES + 1
    digest = hashlib.sha256(b"UTF-8 bytes, 256 ends a document").hexdigest()
    template_digest = ""

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, uint16, shape [bytes]; no end-of-document token is added."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_with_starts(
        self, texts: list[str], from_template: bool = False
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (self.encode(text), np.repeat(np.arange(len(text)), [len(c.encode("utf-8")) for c in text]))
            for text in texts
        ]

    def count_special(self, text: str) -> int:
        return 0

    def chat_template(self, tools: Any = None) -> NoReturn:
        raise ValueError(
            "the byte tokenizer has no chat template; give prompt and completion, or a tokenizer_model"
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = False,
        template: str | None = None,
    ) -> NoReturn:
        self.chat_template(tools)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of `ids`, without end-of-document tokens.

        Bytes that are not UTF-8 become U+FFFD, as do ids past the vocabulary, which a padded model can emit.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        tokens = np.minimum(tokens[tokens != self.end_of_document], 0xFF)  # 0xFF never occurs in UTF-8
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, folder: Path, max_length: int) -> None:
        """Write this tokenizer in Hugging Face's format: byte-level BPE without merges."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {_printable(byte): byte for byte in range(BYTES)}
        vocabulary[END_OF_DOCUMENT] = self.end_of_document
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_DOCUMENT])
        with TemporaryDirectory() as made:
            tokenizer.save(f"{made}/tokenizer.json")
            FastTokenizer(Path(made)).save(folder, max_length)

    def keep_in(self, folder: Path) -> None:
        pass


def _printable(byte: int) -> str:
    """Return the character for a byte in GPT-2's byte-level alphabet.

    Printable bytes stand for themselves; the others, in order, become the characters from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printing:
        return chr(byte)
    others = [value for value in range(BYTES) if value not in printing]
    return chr(0x100 + others.index(byte))
