"""A Hugging Face fast tokenizer, from its files."""

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatron_noloco.data.chat import ChatTemplate
from megatron_noloco.errors import UserError
from megatron_noloco.files import read_object, sha256_of

_COMMON_END_TEXTS = ("<|endoftext|>", "</s>", "<|end_of_text|>")  # if no file names the token
_TOKENIZER, _CONFIG, _TOKENS_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"  # the second is a folder
# Keys of tokenizer_config.json for other classes than the export's, or that add tokens at the ends of a text.
_OF_OTHER_CLASSES = ("add_bos_token", "add_eos_token", "add_prefix_space", "auto_map", "legacy", "use_fast")
_DECIDING = ("normalizer", "pre_tokenizer", "model", "added_tokens")


class FastTokenizer:
    """The tokenizer in a `tokenizer.json`; adds no special tokens at the ends of a text.

    Attributes:
        vocab_size: number of ids, gaps included.
        end_of_document: the token that ends each document.
        beginning_of_document: the token that a file names for the beginning of a text (BOS), or None.
        before_document: tokens with which each document begins in training: BOS if asked for, or none.
        splits_special_tokens: whether a special token that a text spells out is text; in a template's it never is.
        folder: where its files are.
    """

    def __init__(self, folder: Path, split_special_tokens: bool = True, prepend_bos: bool = False) -> None:
        """Load the tokenizer.json in a folder; raises UserError where there is none.

        Args:
            split_special_tokens: whether a special token that a text spells out is text.
            prepend_bos: whether each document begins with the tokenizer's BOS.
        """
        from tokenizers import Tokenizer

        self.folder, file = folder, folder / _TOKENIZER
        if not file.is_file():
            raise UserError(
                f"tokenizer_model {folder}: no folder with a tokenizer.json (looked from cwd {Path.cwd()}); give "
                "that of a Hugging Face fast tokenizer"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(f"tokenizer_model {file}: not a tokenizer ({error})") from None
        # A file may set truncation and padding, which would cut or pad texts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None  # a file's BOS is added only if `prepend_bos` asks for it
        vocabulary = self.vocabulary
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self._end_text = self._find_end_text(vocabulary)
        self.end_of_document = vocabulary[self._end_text]
        beginning = self._named("bos_token")
        self.beginning_of_document = None if beginning is None else vocabulary.get(beginning)
        self.before_document: tuple[int, ...] = ()
        if prepend_bos:
            if self.beginning_of_document is None:
                raise UserError(
                    f"prepend_bos: tokenizer_model {folder} has no BOS; name one as bos_token in its "
                    "tokenizer_config.json, or leave prepend_bos out"
                )
            self.before_document = (self.beginning_of_document,)
        self.splits_special_tokens = split_special_tokens
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.int32

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of all that decides which tokens a text gets, with the tokens of begin and end."""
        return sha256_of([self._content, self.beginning_of_document, self.end_of_document])

    @property
    def files_digest(self) -> str:
        """Hex SHA-256 of the files, of which also depends what a template writes and how tokens are decoded."""
        return sha256_of({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in self._files})

    @property
    def _files(self) -> list[Path]:
        """The files from which the tokenizer can be built again."""
        files = [self.folder / name for name in (_TOKENIZER, _CONFIG, _TOKENS_MAP, _TEMPLATE)]
        files += sorted((self.folder / _MORE_TEMPLATES).glob("*.jinja"))
        return list(filter(Path.is_file, files))

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template, or named templates, as transformers finds them."""
        texts = {file.name: file.read_text("utf-8") for file in self._files if file.suffix == ".jinja"}
        return ChatTemplate(self.folder, texts or self._read(_CONFIG).get("chat_template"))

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

    def extends(self, other: "FastTokenizer") -> bool:
        """Return whether this tokenizer has the ids and rules of the other, with or without further tokens."""
        return other.vocabulary.items() <= self.vocabulary.items() and self._rules == other._rules

    @property
    def _content(self) -> dict[str, Any]:
        """What of a tokenizer.json decides tokens, without the differences between its versions."""
        content = json.loads(self._tokenizer.to_str(), object_hook=_without_defaults)
        # The decoder decides no token; truncation, padding and the like are taken out already.
        return {name: content[name] for name in _DECIDING if name in content}

    @property
    def _rules(self) -> dict[str, Any]:
        """The content without the vocabulary; with it where it has the scores of tokens."""
        content = {name: held for name, held in self._content.items() if name != "added_tokens"}
        if isinstance(content["model"].get("vocab"), dict):
            del content["model"]["vocab"]
        return content

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens that a text can spell out, with their ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, shape [tokens]; nothing is added at either end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str], from_template: bool = False) -> list[np.ndarray]:
        """Return the tokens of each text; faster than `encode` for each.

        Args:
            from_template: whether special tokens that the texts spell out are these tokens in any case.
        """
        self._tokenizer.encode_special_tokens = self.splits_special_tokens and not from_template
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

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

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens and ids past the vocabulary."""
        return self._tokenizer.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)

    def save(self, folder: Path, max_length: int) -> None:
        """Write the files that `AutoTokenizer.from_pretrained` reads: it adds a BOS if training does."""
        from tokenizers import Tokenizer, processors

        self._copy_to(folder)
        (folder / _TOKENS_MAP).unlink(missing_ok=True)  # its tokens are in the settings below
        whole = Tokenizer.from_str(self._tokenizer.to_str())
        for number in self.before_document:
            token = whole.id_to_token(number)
            whole.post_processor = processors.TemplateProcessing(
                single=[token, "$A"], special_tokens=[(token, number)]
            )
        whole.save(str(folder / _TOKENIZER))
        settings = {
            # The defaults of this class remove spaces, and give inputs that no model here takes.
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            **{name: value for name, value in self._settings.items() if name not in _OF_OTHER_CLASSES},
            # Other classes may build a tokenizer of their own from the vocabulary in tokenizer.json.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self._end_text,
            "model_max_length": max_length,
        }
        (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n")

    def copy_to(self, folder: Path) -> None:
        """Copy the files from which the tokenizer can be built again, unless they are there."""
        try:
            if FastTokenizer(folder).files_digest == self.files_digest:
                return
        except UserError:  # none, or a broken one
            pass
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        self._copy_to(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def _copy_to(self, folder: Path) -> None:
        for file in self._files:
            copy = folder / file.relative_to(self.folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)

    def _read(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file beside tokenizer.json, empty where there is none; raises UserError."""
        path = self.folder / name
        return read_object(path, "copy the tokenizer's files again") if path.is_file() else {}

    @property
    def _settings(self) -> dict[str, Any]:
        """What the files beside tokenizer.json say; where both name a token, the one that transformers reads."""
        config = self._read(_CONFIG)
        tokens = {name: _texts_of(held) for name, held in self._read(_TOKENS_MAP).items()}
        return tokens | config if "added_tokens_decoder" in config else config | tokens

    def _named(self, role: str) -> str | None:
        """Return the text of the token that a file beside tokenizer.json names, such as "bos_token"; else None."""
        text = _texts_of(self._settings.get(role))
        return text if isinstance(text, str) else None

    def _find_end_text(self, vocabulary: dict[str, int]) -> str:
        """Return the text of the end-of-document token: the one that a file names, else a common one."""
        for text in (self._named("eos_token"), *_COMMON_END_TEXTS):
            if text in vocabulary:
                return text
        raise UserError(
            f"tokenizer_model {self.folder}: no end-of-document token; name it as eos_token in "
            "tokenizer_config.json"
        )


def _texts_of(tokens: Any) -> Any:
    """Return the text of a token, which may be an object that holds it; of a list of tokens those of each."""
    if isinstance(tokens, list):
        return [_texts_of(token) for token in tokens]
    return tokens.get("content", tokens) if isinstance(tokens, dict) else tokens


def _without_defaults(content: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a tokenizer.json without what is null or false, which other versions do not write."""
    return {key: held for key, held in content.items() if held is not None and held is not False}
