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

from megatron_noloco.files import read_object
from megatron_noloco.job.activity import line_of

_COMMON_END_TEXTS = ("<|endoftext|>", "</s>", "<|end_of_text|>")  # if no file names the token
_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # beside tokenizer.json
# Keys of tokenizer_config.json for other classes than the export's, or that add tokens at the ends of a text.
_OF_OTHER_CLASSES = ("add_bos_token", "add_eos_token", "add_prefix_space", "auto_map", "legacy", "use_fast")
_DECIDING = ("normalizer", "pre_tokenizer", "model", "added_tokens")
_MORE_TEMPLATES = "additional_chat_templates"  # a folder beside tokenizer.json


class FastTokenizer:
    """The tokenizer in a `tokenizer.json`; adds no special tokens at the ends of a text.

    Only chat templates need transformers.

    Attributes:
        vocab_size: number of ids, gaps included.
        end_of_document: the token that ends each document.
        beginning_of_document: the token that a file names for the beginning of a text (BOS), or None.
        before_document: tokens with which each document begins in training: BOS if asked for, or none.
        splits_special_tokens: whether a special token that a text spells out is text; in a template's it never is.
        folder: where its files are.
    """

    def __init__(self, path: Path, split_special_tokens: bool = True, prepend_bos: bool = False) -> None:
        """Load a tokenizer.json, or the one in a folder; raises ValueError where there is none.

        Args:
            split_special_tokens: whether a special token that a text spells out is text.
            prepend_bos: whether each document begins with the tokenizer's BOS.
        """
        from tokenizers import Tokenizer

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
        self.before_document: tuple[int, ...] = ()
        if prepend_bos:
            if self.beginning_of_document is None:
                raise ValueError(
                    f"prepend_bos: tokenizer_model {path} has no BOS; name one as bos_token in its "
                    "tokenizer_config.json, or leave prepend_bos out"
                )
            self.before_document = (self.beginning_of_document,)
        self.splits_special_tokens = split_special_tokens
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.int32

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of all that decides which tokens a text gets, with the tokens of begin and end."""
        return _sha256([self._content, self.beginning_of_document, self.end_of_document])

    @cached_property
    def template_digest(self) -> str:
        """Hex SHA-256 of the chat template; "" where there is none."""
        return _sha256(self._template) if self._template else ""

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
    def _template(self) -> Any:
        """The chat template, or named templates, as transformers finds them; None where there is none."""
        files = [*(self.folder / _MORE_TEMPLATES).glob("*.jinja"), self.folder / "chat_template.jinja"]
        if texts := {file.name: file.read_text("utf-8") for file in files if file.is_file()}:
            return texts
        return self._read("tokenizer_config.json").get("chat_template")

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def end_of_answer(self) -> int | None:
        """The first special token after an answer in the chat template; None where there is none."""
        question, answer = "a question", "the answer"
        try:
            text = self.render(
                [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            )
        except ValueError:  # no template, or one that takes no such messages
            return None
        _, found, end = text.rpartition(answer)
        tokens = self.encode_with_starts([end], from_template=True)[0][0].tolist() if found else []
        return next((token for token in tokens if token in self.special_tokens.values()), None)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens that a text can spell out, with their ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of `text`, shape [tokens]; nothing is added at either end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text; faster than `encode` for each."""
        self._tokenizer.encode_special_tokens = self.splits_special_tokens
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def encode_with_starts(
        self, texts: list[str], from_template: bool = False
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return of each text its tokens, and the character at which each token begins, both shape [tokens].

        Args:
            from_template: whether special tokens that the texts spell out are these tokens in any case.
        """
        self._tokenizer.encode_special_tokens = self.splits_special_tokens and not from_template
        return [
            (
                np.array(encoding.ids, dtype=self._dtype),
                np.array([start for start, _ in encoding.offsets], dtype=np.int64),
            )
            for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False)
        ]

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

    def chat_template(self, tools: Any = None) -> str:
        """Return the chat template for conversations with these tools; raises ValueError where there is none."""
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
        """Return the text of a conversation in the chat template.

        Raises ValueError where there is no template, or the template refuses the messages.

        Args:
            tools: the tools that the assistant may call, in the form that the template takes.
            add_generation_prompt: whether to append the beginning of an answer.
            template: another chat template; None: that of the tokenizer.
        """
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
        """Write the files that `AutoTokenizer.from_pretrained` reads: it adds a BOS if training does."""
        from tokenizers import Tokenizer, processors

        self._copy_to(folder)
        whole = Tokenizer.from_str(self._tokenizer.to_str())
        for number in self.before_document:
            token = whole.id_to_token(number)
            whole.post_processor = processors.TemplateProcessing(
                single=[token, "$A"], special_tokens=[(token, number)]
            )
        whole.save(str(folder / "tokenizer.json"))
        given = self._read("tokenizer_config.json")
        settings = {
            # The defaults of this class remove spaces, and give inputs that no model here takes.
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            **{name: value for name, value in given.items() if name not in _OF_OTHER_CLASSES},
            # Other classes may build a tokenizer of their own from the vocabulary in tokenizer.json.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self._end_text,
            "model_max_length": max_length,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    def keep_in(self, folder: Path) -> None:
        """Copy the files from which the tokenizer can be built again, unless they are there."""
        try:
            kept = FastTokenizer(folder)
            if (kept.digest, kept.template_digest) == (self.digest, self.template_digest):
                return
        except ValueError:  # none, or a broken one
            pass
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        self._copy_to(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def _copy_to(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._file, folder / "tokenizer.json")
        for name in _FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
        if (self.folder / _MORE_TEMPLATES).is_dir():
            shutil.copytree(self.folder / _MORE_TEMPLATES, folder / _MORE_TEMPLATES, dirs_exist_ok=True)

    def _read(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file beside tokenizer.json, empty where there is none; raises ValueError."""
        path = self.folder / name
        return read_object(path, "copy the tokenizer's files again") if path.is_file() else {}

    def _named(self, role: str) -> str | None:
        """Return the text of the token that a file beside tokenizer.json names, such as "bos_token"; else None."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = self._read(name).get(role)
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


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _without_defaults(content: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a tokenizer.json without what is null or false, which other versions do not write."""
    return {key: held for key, held in content.items() if held is not None and held is not False}
