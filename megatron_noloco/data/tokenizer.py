"""Tokenizers: UTF-8 bytes, or a Hugging Face fast tokenizer from its files."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from megatron_noloco.data.sources import TokenizerChoice
from megatron_noloco.job.activity import line_of

BYTES = 256
END_OF_DOCUMENT = "<|endoftext|>"  # name of the token in an export; in a text it is encoded as bytes
_COMMON_END_TEXTS = ("<|endoftext|>", "</s>", "<|end_of_text|>")  # if no file names the token
_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # beside tokenizer.json


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

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, shape [tokens]; nothing is added at either end."""
        ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text; faster than `encode` for each."""
        ...

    def encode_with_starts(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return of each text its tokens, and the character at which each token begins, both shape [tokens]."""
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
        """Write the files that `AutoTokenizer.from_pretrained` reads."""
        ...


def build_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Build the tokenizer of a run; raises ValueError when its files are missing or broken."""
    if choice.tokenizer_type == "byte":
        return ByteTokenizer()
    if choice.tokenizer_model is None:
        raise ValueError(
            f"tokenizer_type {choice.tokenizer_type} needs tokenizer_model: a folder with a tokenizer.json"
        )
    return FastTokenizer(Path(choice.tokenizer_model))


class ByteTokenizer:
    """A tokenizer without files or training: tokens 0 to 255 are UTF-8 bytes, 256 ends a document."""

    end_of_document = BYTES
    end_of_answer = None
    beginning_of_document = None
    vocab_size = BYTES + 1
    digest = hashlib.sha256(b"UTF-8 bytes, 256 ends a document").hexdigest()
    template_digest = ""

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, uint16, shape [bytes]; no end-of-document token is added."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_with_starts(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (self.encode(text), np.repeat(np.arange(len(text)), [len(c.encode("utf-8")) for c in text]))
            for text in texts
        ]

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
    """Return the character for a byte in GPT-2's byte-level alphabet.

    Printable bytes stand for themselves; the others, in order, become the characters from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printing:
        return chr(byte)
    others = [value for value in range(BYTES) if value not in printing]
    return chr(0x100 + others.index(byte))


class FastTokenizer:
    """The tokenizer in a `tokenizer.json`; adds no special tokens at the ends of a text.

    Only chat templates need transformers.
    """

    def __init__(self, path: Path) -> None:
        """Load a tokenizer.json, or the one in a folder; raises ValueError where there is none."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError("Hugging Face tokenizers need a package: pip install tokenizers") from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"tokenizer_model {path}: no tokenizer.json there (looked from cwd {Path.cwd()}); give the "
                "folder of a Hugging Face fast tokenizer"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"tokenizer_model {file}: not a tokenizer ({error})") from None
        # A file may set truncation and padding, which would cut or pad texts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Without special tokens it only changes offsets: a token of spaces may begin after itself.
        self._tokenizer.post_processor = None
        self._file, self.folder = file, file.parent
        vocabulary = self.vocabulary
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self._end_text = self._find_end_text(vocabulary)
        self.end_of_document = vocabulary[self._end_text]
        beginning = self._named("bos_token")
        self.beginning_of_document = None if beginning is None else vocabulary.get(beginning)
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.int32

    @cached_property
    def digest(self) -> str:
        content = json.loads(self._tokenizer.to_str())
        for name in ("version", "decoder"):  # decide no token; truncation and the like are taken out already
            del content[name]
        model = content["model"]
        if "merges" in model:  # before tokenizers 0.20 a text: "a b"
            model["merges"] = [
                merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]
            ]
        ends = [self.beginning_of_document, self.end_of_document]
        text = json.dumps([_without_defaults(content), ends], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def template_digest(self) -> str:
        template = self._template
        return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest() if template else ""

    @property
    def _template(self) -> Any:
        """The chat template, or named templates, as transformers finds them; None where there is none."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text()
        return _read_json(self.folder / "tokenizer_config.json").get("chat_template")

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def end_of_answer(self) -> int | None:
        question, answer = "a question", "the answer"
        try:
            text = self.render(
                [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            )
        except ValueError:  # no template, or one that takes no such messages
            return None
        _, found, end = text.rpartition(answer)
        tokens = self.encode(end).tolist() if found else []
        known = self._tokenizer.get_added_tokens_decoder()
        return next((token for token in tokens if token in known and known[token].special), None)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def encode_with_starts(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (
                np.array(encoding.ids, dtype=self._dtype),
                np.array([start for start, _ in encoding.offsets], dtype=np.int64),
            )
            for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False)
        ]

    def chat_template(self, tools: Any = None) -> str:
        if not self._with_template.chat_template:
            raise ValueError(
                f"tokenizer_model {self.folder} has no chat template (a chat_template.jinja, or chat_template in "
                "tokenizer_config.json)"
            )
        return self._with_template.get_chat_template(tools=tools)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = False,
        template: str | None = None,
    ) -> str:
        chosen = template or self.chat_template(tools)
        try:
            return self._with_template.apply_chat_template(
                messages,
                tools=tools,
                chat_template=chosen,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # templates raise anything for messages that they do not expect
            raise ValueError(f"the chat template refuses the messages: {line_of(error)}") from None

    @cached_property
    def _with_template(self) -> Any:
        """The same tokenizer, loaded by transformers, which renders chat templates."""
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError:
            raise ValueError("chat templates need a package: pip install transformers") from None
        return PreTrainedTokenizerFast.from_pretrained(self.folder, tokenizer_file=str(self._file))

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens and ids past the vocabulary."""
        return self._tokenizer.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)

    def save(self, folder: Path, max_length: int) -> None:
        shutil.copyfile(self._file, folder / "tokenizer.json")
        for name in _FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **_read_json(folder / "tokenizer_config.json"),
            "eos_token": self._end_text,
            "model_max_length": max_length,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    def _named(self, role: str) -> str | None:
        """Return the text of the token that a file beside tokenizer.json names, such as "bos_token"; else None."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = _read_json(self.folder / name).get(role)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                return text
        return None

    def _find_end_text(self, vocabulary: dict[str, int]) -> str:
        """Return the text of the end-of-document token: the one that a file names, else a common one."""
        for text in (self._named("eos_token"), *_COMMON_END_TEXTS):
            if text in vocabulary:
                return text
        raise ValueError(
            f"tokenizer_model {self.folder}: no end-of-document token; name it as eos_token in "
            "tokenizer_config.json"
        )


def _without_defaults(content: Any) -> Any:
    """Return a part of a tokenizer.json without what is null or false, which other versions do not write."""
    if isinstance(content, dict):
        return {
            key: _without_defaults(held)
            for key, held in content.items()
            if held is not None and held is not False
        }
    return [_without_defaults(held) for held in content] if isinstance(content, list) else content


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty where there is no file; raises ValueError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content
