"""One maker of each kind of tokenizer."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megatron_noloco.data.auto_tokenizer import build_tokenizer
from megatron_noloco.data.tokenizer import TokenizerChoice

TEXT = ["The fox went, the fox came again.", "def fox(the):\n    return the + 1\n"]


def _learnt(texts: list[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer that has learnt from these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_tokenizer(folder: Path, vocab_size: int = 300) -> None:
    """Write a tokenizer of numbers, whose end of documents is the only special token."""
    tokenizer = _learnt(["two three four five six seven eight nine ten"] * 9, vocab_size, ["<end>"])
    _save(tokenizer, folder, eos_token={"__type": "AddedToken", "content": "<end>", "special": True})


def write_tokenizer(folder: Path, pieces: int = 20, **config: Any) -> Path:
    """Write a tokenizer of `TEXT` that names a BOS, and that adds it by its post-processor."""
    special = ["<s>", "</s>", "<|im_end|>"]
    tokenizer = _learnt(TEXT, 256 + len(special) + pieces, special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _save(tokenizer, folder, **{"bos_token": "<s>", "eos_token": "</s>", **config})


def tokenizer_at(folder: Path | str, split_special_tokens: bool = True, prepend_bos: bool = False) -> Any:
    """The tokenizer of a run that names this folder."""
    return build_tokenizer(TokenizerChoice(str(folder), split_special_tokens, prepend_bos))
