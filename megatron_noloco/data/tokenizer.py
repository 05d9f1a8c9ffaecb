"""Tokenizers: text to token ids and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_noloco.data.sources import TokenizerChoice

BYTES = 256
END_OF_DOCUMENT = "<|endoftext|>"  # as exported; in text it is only text


class Tokenizer(Protocol):
    """What a run, an export and the preprocessing need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`, shape [tokens]; nothing is added at either end."""
        ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """`encode` of each text; faster than one after the other."""
        ...

    def encode_with_starts(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """`encode` of each text, and the character of the text at which each token begins, both [tokens]."""
        ...

    def render(self, messages: list[dict[str, Any]], tools: Any = None, asks: bool = False) -> str:
        """A conversation in the words of the tokenizer's chat template.

        Raises ValueError where it has none, or its template refuses the messages.

        Args:
            tools: what the assistant may call, as the template wants it.
            asks: whether the beginning of an answer follows.
        """
        ...

    def decode(self, ids: np.ndarray | Sequence[int]) -> str: ...

    def save(self, folder: Path, max_length: int) -> None:
        """Write the files that `AutoTokenizer.from_pretrained` reads."""
        ...


def build_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Raises ValueError when the tokenizer cannot be had."""
    if choice.tokenizer_type == "byte":
        return ByteTokenizer()
    from megatron_noloco.data.fast_tokenizer import FastTokenizer

    if choice.tokenizer_model is None:
        raise ValueError(
            f"tokenizer_type {choice.tokenizer_type} needs tokenizer_model: a folder with a tokenizer.json"
        )
    return FastTokenizer(Path(choice.tokenizer_model))


class ByteTokenizer:
    """A tokenizer that needs no file and no training: UTF-8 bytes are tokens 0..255; 256 ends a document."""

    end_of_document = BYTES
    vocab_size = BYTES + 1

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`, uint16, shape [bytes]; no end-of-document token is added."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_with_starts(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (self.encode(text), np.repeat(np.arange(len(text)), [len(c.encode("utf-8")) for c in text]))
            for text in texts
        ]

    def render(self, messages: list[dict[str, Any]], tools: Any = None, asks: bool = False) -> str:
        raise ValueError(
            "the byte tokenizer has no chat template; give prompt and completion, or a tokenizer_model"
        )

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`: what is not UTF-8 becomes U+FFFD, ends of documents are left out.

        Ids past the vocabulary also become U+FFFD: a model whose embedding is padded can emit them.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        tokens = np.minimum(tokens[tokens != self.end_of_document], 0xFF)  # 0xFF never occurs in UTF-8
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, folder: Path, max_length: int) -> None:
        """The same tokenizer as Hugging Face knows it: 256 bytes, no merges, and the end of a document."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {_printable(byte): byte for byte in range(BYTES)}
        vocabulary[END_OF_DOCUMENT] = self.end_of_document
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_DOCUMENT])
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=END_OF_DOCUMENT,
            bos_token=END_OF_DOCUMENT,
            model_max_length=max_length,
        ).save_pretrained(folder)


def _printable(byte: int) -> str:
    """The character that stands for a byte in GPT-2's byte-level alphabet.

    Bytes that print stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printing:
        return chr(byte)
    others = [value for value in range(BYTES) if value not in printing]
    return chr(0x100 + others.index(byte))
