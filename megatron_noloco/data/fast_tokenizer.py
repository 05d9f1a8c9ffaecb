"""Hugging Face fast tokenizers, read from their files; transformers is needed for chat templates only."""

import json
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>")  # where no file names the end-of-document token
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class FastTokenizer:
    """The tokenizer of a `tokenizer.json`, without the tokens that its template puts around a text."""

    def __init__(self, path: Path) -> None:
        """`path` is a folder with a tokenizer.json, or that file; raises ValueError where there is none."""
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
        # What a file remembers of how its model was fed; it would cut texts short, or fill them up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.folder = file.parent
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self._end_text = self._find_end(vocabulary)
        self.end_of_document = vocabulary[self._end_text]
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.int32

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def encode_with_starts(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            (
                np.array(encoding.ids, dtype=self._dtype),
                np.array([start for start, _ in encoding.offsets], dtype=np.int64),
            )
            for encoding in encodings
        ]

    def render(self, messages: list[dict[str, Any]], tools: Any = None, asks: bool = False) -> str:
        if not self._templated.chat_template:
            raise ValueError(
                f"tokenizer_model {self.folder} has no chat template (a chat_template.jinja, or chat_template in "
                "tokenizer_config.json)"
            )
        try:
            return self._templated.apply_chat_template(
                messages, tools=tools, add_generation_prompt=asks, tokenize=False
            )
        except Exception as error:  # whatever a template does with messages it does not expect
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template refuses the messages: {reason}") from None

    @cached_property
    def _templated(self) -> Any:
        """The same tokenizer in transformers, which knows templates."""
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError:
            raise ValueError("chat templates need a package: pip install transformers") from None
        return PreTrainedTokenizerFast.from_pretrained(self.folder)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`; special tokens, and ids past the vocabulary, are left out."""
        return self._tokenizer.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)

    def save(self, folder: Path, max_length: int) -> None:
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

    def _find_end(self, vocabulary: dict[str, int]) -> str:
        named = [
            _read_json(self.folder / name).get("eos_token")
            for name in ("tokenizer_config.json", "special_tokens_map.json")
        ]
        texts = [token.get("content") if isinstance(token, dict) else token for token in named]
        for text in (*texts, *_USUAL_ENDS):
            if isinstance(text, str) and text in vocabulary:
                return text
        raise ValueError(
            f"tokenizer_model {self.folder}: no end-of-document token; name it as eos_token in "
            "tokenizer_config.json"
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content
