"""What turns text into tokens and back: a tokenizer of the library `tokenizers`, or bytes.

A special token that a text spells out, such as <|endoftext|>, is text, unless the choice of the tokenizer says
otherwise. In the text of a chat template it is always the token.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from megatron_noloco.data.chat import ChatTemplate
from megatron_noloco.errors import UserError
from megatron_noloco.files import sha256_of, write_text

BYTES = 256
END_OF_DOCUMENT = "<|endoftext|>"  # name of the byte tokenizer's token in an export; in a text it is bytes
KEPT = "tokenizer_as_read.json"  # name of a copy, from which `auto_tokenizer` builds a tokenizer again
_DECIDING = ("normalizer", "pre_tokenizer", "model", "added_tokens")


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer, and how it reads text.

    Attributes:
        folder: of a Hugging Face fast tokenizer; None: bytes.
        split_special_tokens: whether a special token that a text spells out is text.
        prepend_bos: whether each document begins with BOS; None: if transformers puts it before a text.
        cache: the folder in which hosts keep tokenizers, see `cache.cache_folder`.
    """

    folder: str | None = None
    split_special_tokens: bool = True
    prepend_bos: bool | None = False
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


class Content(TypedDict):
    """All that a tokenizer is made of, as JSON."""

    tokenizer: str  # the text of a tokenizer.json
    special_tokens: dict[str, str]  # by the names of transformers, such as "eos_token"
    chat_template: str | dict[str, str] | None  # several by name; None: there is none
    switched_off: str  # what drew tokens at random, such as "dropout 0.1"; "" if nothing did


def write_copy(kept: str, folder: Path) -> None:
    """Write the copy of a tokenizer into a folder, which then is a tokenizer's; none of bytes."""
    if kept:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / KEPT, kept)


def deciding(tokenizer: Any) -> dict[str, Any]:
    """Return what decides the tokens of a text, as JSON, of an object of `tokenizers`.

    Left out are the decoder, truncation, padding, and what versions of tokenizers write differently.
    """
    content = json.loads(tokenizer.to_str(), object_hook=_without_defaults)
    return {name: content[name] for name in _DECIDING if name in content}


def _rules(tokenizer: Any) -> dict[str, Any]:
    """Return what decides tokens without the vocabulary; with it where it has the scores of tokens."""
    content = {name: held for name, held in deciding(tokenizer).items() if name != "added_tokens"}
    if isinstance(content["model"].get("vocab"), dict):
        del content["model"]["vocab"]
    return content


class Tokenizer:
    """Turns text into tokens; adds no special tokens at the ends of a text.

    Attributes:
        backend: the object of `tokenizers`.
        vocab_size: number of ids, gaps included.
        end_of_document: the token that ends each document.
        beginning_of_document: the token that is named for the beginning of a text (BOS), or None.
        adds_bos: whether transformers puts BOS before a text.
        before_document: tokens with which each document begins in training: BOS if asked for, or none.
        splits_special_tokens: whether a special token that a text spells out is text; in a template's it never is.
        folder: the folder that the user gave; None: bytes.
    """

    def __init__(self, content: Content, choice: TokenizerChoice) -> None:
        """Raise UserError where the content lacks an end-of-document token, or the BOS that is asked for."""
        from tokenizers import Tokenizer as Backend

        self.content, self.folder = content, choice.folder
        self.backend: Any = Backend.from_str(content["tokenizer"])
        vocabulary = self.vocabulary
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        special = content["special_tokens"]
        self.beginning_of_document = bos = vocabulary.get(special.get("bos_token", ""))
        end = vocabulary.get(special.get("eos_token", ""))
        if end is None:
            raise UserError(
                f"tokenizer_model {self.folder}: no end-of-document token; name it as eos_token in its "
                "tokenizer_config.json"
            )
        self.end_of_document = end
        self.adds_bos = bos is not None and self.backend.encode("the").ids[:1] == [bos]
        self.backend.post_processor = None  # BOS is added only if `prepend_bos` asks for it
        prepend_bos = self.adds_bos if choice.prepend_bos is None else choice.prepend_bos
        if prepend_bos and bos is None:
            raise UserError(
                f"prepend_bos: tokenizer_model {self.folder} has no BOS; name one as bos_token in its "
                "tokenizer_config.json, or leave prepend_bos out"
            )
        self.before_document = (bos,) if prepend_bos and bos is not None else ()
        self.splits_special_tokens = choice.split_special_tokens
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.int32
        model = json.loads(self.backend.to_str())["model"]
        self._of_words = model["type"] == "WordLevel"
        # The token for what the vocabulary lacks
        self._unknown = model.get("unk_id", vocabulary.get(model.get("unk_token")))
        self._lost: dict[str, bool] = {}  # the characters met so far

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of all that decides which tokens a text gets, with the tokens of begin and end."""
        return sha256_of([deciding(self.backend), self.beginning_of_document, self.end_of_document])

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template, or named templates; without content where there is none."""
        return ChatTemplate(self.content["chat_template"], self.as_hugging_face)

    def extends(self, other: "Tokenizer") -> bool:
        """Return whether this tokenizer has the ids and rules of another, with or without further tokens."""
        more = other.vocabulary.items() <= self.vocabulary.items()
        return more and _rules(self.backend) == _rules(other.backend)

    @cached_property
    def end_of_answer(self) -> int | None:
        """The first special token after an answer in the chat template; None where there is none."""
        answer = "the answer"
        messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
        try:
            _, found, end = self.chat_template.render(messages).rpartition(answer)
        except UserError:  # no template, or one that takes no such messages
            return None
        tokens = self.encode_batch([end], from_template=True)[0].tolist() if found else []
        return next((token for token in tokens if token in self.special_tokens.values()), None)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return self.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens that a text can spell out, with their ids."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, shape [tokens]; nothing is added at either end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str], from_template: bool = False) -> list[np.ndarray]:
        """Return the tokens of each text; faster than `encode` for each.

        Args:
            from_template: whether special tokens that the texts spell out are these tokens in any case.
        """
        self.backend.encode_special_tokens = self.splits_special_tokens and not from_template
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def count_lost(self, texts: list[str]) -> Counter[str]:
        """Return how often the texts hold each character that no token stands for, spaces aside.

        Alone it is read as an unknown token, or leaves no trace. None is counted for a vocabulary of whole words.
        """
        met = set[str]().union(*texts)
        new = [character for character in met if character not in self._lost]
        read = zip(new, self.encode_batch(new), self.encode_batch([2 * one for one in new]), strict=True)
        for one, tokens, doubled in read:
            traceless = np.array_equal(tokens, doubled)  # written twice it would change the tokens
            self._lost[one] = not one.isspace() and (traceless or self._unknown in tokens)
        lost = {one for one in met if self._lost[one] and not self._of_words}
        return Counter(one for text in texts for one in text if one in lost) if lost else Counter()

    def count_special(self, text: str) -> int:
        """Return how many special tokens `text` spells out."""
        return sum(1 for _ in self._spelled_out.finditer(text)) if self.special_tokens else 0

    @cached_property
    def _spelled_out(self) -> re.Pattern[str]:
        """Matches each special token in a text; of several at one place the longest."""
        longest_first = sorted(self.special_tokens, key=lambda token: (token[:1], -len(token)))
        # By their first character: with hundreds of tokens in one alternation the search took 100 times as long.
        groups = groupby(longest_first, key=lambda token: token[:1])
        return re.compile("|".join(f"(?:{'|'.join(map(re.escape, tokens))})" for _, tokens in groups))

    def split_at_border(self, text: str, from_template: bool) -> tuple[str, str]:
        """Return a text until its last border, and from there on; all of it is the second if there is none.

        A border is a special token of a template, on both sides of which texts are encoded apart, wherever it is.
        """
        tokens = self._spelled_out.finditer(text) if from_template else ()
        places = [match.start() for match in tokens if match[0] in self._borders]
        place = places[-1] if places else 0
        return text[:place], text[place:]

    @cached_property
    def _borders(self) -> set[str]:
        added = self.backend.get_added_tokens_decoder().values()
        return {one.content for one in added if one.special and not (one.normalized or one.single_word)}

    def decode(self, ids: np.ndarray | Sequence[int], special: bool = False) -> str:
        """Return the text of `ids`, without ids past the vocabulary; `special`: with special tokens."""
        numbers = np.asarray(ids, dtype=np.int64).tolist()
        return self.backend.decode(numbers, skip_special_tokens=not special)

    def as_hugging_face(self, **others: Any) -> Any:
        """Return this tokenizer as transformers', of a class that takes tokenizer.json as it is.

        Other classes may build rules of their own from its vocabulary.
        """
        from tokenizers import Tokenizer as Backend
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=Backend.from_str(self.content["tokenizer"]),
            chat_template=self.content["chat_template"],
            model_input_names=["input_ids", "attention_mask"],
            clean_up_tokenization_spaces=False,
            **self.content["special_tokens"],
            **others,
        )

    def save(self, folder: Path, max_length: int) -> None:
        """Write the files that `AutoTokenizer.from_pretrained` reads: it adds a BOS if training does."""
        from tokenizers import processors

        tokenizer = self.as_hugging_face(model_max_length=max_length)
        begin = [(tokenizer.bos_token, token) for token in self.before_document]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(text for text, _ in begin), "$A"], special_tokens=begin
        )
        tokenizer.save_pretrained(folder)

    @property
    def kept(self) -> str:
        """The text of a copy, see `write_copy`; "" for bytes."""
        return "" if self.folder is None else json.dumps(self.content)

    def bytes_of(self, ids: np.ndarray, before: int) -> int:
        """Return the bytes of text that tokens stand for after another, also of a character that is cut."""
        if self._byte_counts is not None:
            return int(self._byte_counts[ids].sum())
        texts = self.decode([before]), self.decode([before, *ids])  # a decoder may strip the first space
        alone, both = (len(text.encode()) - 2 * text.count("\ufffd") for text in texts)  # each is a byte
        return both - alone

    @cached_property
    def _byte_counts(self) -> np.ndarray | None:
        """The bytes of each token, 0 for special tokens; None where characters of a token are not bytes."""
        if '"ByteLevel"' not in json.dumps(json.loads(self.backend.to_str())["decoder"]):
            return None
        counts = np.zeros(self.vocab_size, np.int64)
        for token, number in self.vocabulary.items():
            counts[number] = 0 if token in self.special_tokens else len(token)
        return counts


def _without_defaults(content: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a tokenizer.json without what is null or false, which other versions do not write."""
    return {key: held for key, held in content.items() if held is not None and held is not False}


class ByteTokenizer(Tokenizer):
    """A tokenizer without files or training: tokens 0 to 255 are UTF-8 bytes, 256 ends a document.

    In `tokenizers` it is byte-level BPE without merges. What all text passes is faster here.
    """

    end_of_document = BYTES
    vocab_size = BYTES + 1

    def __init__(self) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        # GPT-2's alphabet: a printable byte is itself; the others, in order, are the characters from U+0100 on.
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        printable = [ord(character) for character in alphabet if ord(character) < BYTES]
        others = sorted({*range(BYTES)} - {*printable})
        vocabulary = dict(zip([*alphabet, END_OF_DOCUMENT], [*printable, *others, BYTES], strict=True))
        backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([END_OF_DOCUMENT])
        special = {"eos_token": END_OF_DOCUMENT}
        content = Content(
            tokenizer=backend.to_str(), special_tokens=special, chat_template=None, switched_off=""
        )
        super().__init__(content, TokenizerChoice())
        self.digest = hashlib.sha256(b"UTF-8 bytes, 256 ends a document").hexdigest()

    def encode_batch(self, texts: list[str], from_template: bool = False) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    def count_special(self, text: str) -> int:
        return 0

    def count_lost(self, texts: list[str]) -> Counter[str]:
        return Counter()
