"""The block `data`: what is read, how it becomes tokens, and the rules between its fields."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import field_validator

from megatron_noloco.config.blocks import EvaluationConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.config.optimizer_block import Share
from megatron_noloco.data.sources import (
    IndexedSource,
    RecordSource,
    Source,
    Split,
    TextSource,
    parse_prefixes,
)
from megatron_noloco.data.tokenizer import TokenizerChoice, choice_problem
from megatron_noloco.fields import FilePath, Settings, field, offered_field, shared_field

SOURCES = (
    "text",
    "data_path",
    "train_data_path",
    "valid_data_path",
    "sft_data_path",
)  # which say what is read
_MOST_FOR_BYTES = 2048  # a vocabulary; a larger one is that of another tokenizer

Paths = FilePath | list[FilePath | float]


class DataConfig(Settings):
    """The data: their place, the tokenizer, and what is done at the borders of documents."""

    text: FilePath | None = field(
        None,
        "A file or folder of text, JSON lines, Parquet or Arrow; of rows the text under the key text is read. "
        'Or "python-stdlib": Python\'s own standard library.',
    )
    data_path: Paths | None = field(
        None,
        "In place of text: a dataset that is tokenized already, as `data preprocess` and Megatron-LM write it. "
        "Give its path without .bin or .idx. A list of paths is a blend; a weight before each path is its share: "
        '["0.3", "first", "0.7", "second"].',
    )
    train_data_path: Paths | None = field(None, "Like data_path, for training alone; split is then not used.")
    valid_data_path: Paths | None = field(
        None, "Like data_path, for validation; goes together with train_data_path."
    )
    sft_data_path: FilePath | None = field(
        None,
        "In place of text, for fine-tuning: a file or folder of JSON lines, Parquet or Arrow, whose rows have "
        "messages, or prompt and completion. Only answers have a loss.",
    )
    sft_packing: bool = offered_field(
        True,
        "With sft_data_path: whether a sample holds several records, kept apart; false: one record each.",
    )
    tokenizer_type: Literal["byte", "HuggingFaceTokenizer"] = offered_field(
        "byte",
        'How text becomes tokens: "byte" needs no file. Left out, it is "HuggingFaceTokenizer" where '
        "tokenizer_model is given.",
    )
    tokenizer_model: FilePath | None = field(
        None, "Folder of a Hugging Face fast tokenizer (with a tokenizer.json); null for bytes."
    )
    split_special_tokens: bool = shared_field(
        True,
        "Whether a special token that a text spells out, such as <|endoftext|>, is read as text; false: as the "
        "token. In the text of a chat template it is always the token.",
    )
    prepend_bos: bool = shared_field(
        False,
        "Whether each document begins with the tokenizer's BOS, which the exported tokenizer then adds. A dataset "
        "in data_path must have been made with --prepend-bos.",
    )
    max_lost_characters: Share = offered_field(
        0.05,
        "Largest share of the characters of a text that the tokenizer may lose, since no token stands for them.",
    )
    split: str = offered_field(
        "949,50,1",
        "Weights of the training, validation and test parts, as in Megatron; a missing weight is 0.",
    )
    cache: FilePath | None = field(
        None,
        "A folder for the datasets that are made of text and records, once per host; `data cache` shows and "
        "clears it. null: megatron_noloco/data in the user's cache folder.",
    )

    reset_attention_mask: bool = offered_field(
        False,
        "Whether documents in one sample do not attend to each other; each ends with the tokenizer's "
        "end-of-document token.",
    )
    eod_mask_loss: bool = offered_field(False, "Whether the token after the end of a document has no loss.")

    @classmethod
    def left_out(cls, given: dict[str, Any]) -> dict[str, Any]:
        has_type = "tokenizer_type" in given or given.get("tokenizer_model") is None
        return {} if has_type else {"tokenizer_type": "HuggingFaceTokenizer"}

    @field_validator("data_path", "train_data_path", "valid_data_path")
    @classmethod
    def _is_a_blend(cls, paths: Paths | None) -> Paths | None:
        if paths is not None:
            parse_prefixes(paths)
        return paths

    @field_validator("split")
    @classmethod
    def _is_a_split(cls, split: str) -> str:
        Split.parse(split)
        return split

    def rules(self) -> Iterator[str]:
        names = ("text", "data_path", "train_data_path", "sft_data_path")
        given = [name for name in names if getattr(self, name) is not None]
        if not given:
            others = ", ".join(f"data.{name}" for name in names)
            yield f"text is missing: set one of {others}"
        elif len(given) > 1:
            yield f"{given[0]} and data.{given[1]} both say what is read; give one of them"
        if self.valid_data_path is not None and self.train_data_path is None:
            yield "valid_data_path goes together with data.train_data_path, which is missing"
        if self.train_data_path is not None and self.split != DataConfig.model_fields["split"].default:
            yield f'split "{self.split}" has no effect: data.train_data_path is read whole; leave it out'
        if problem := choice_problem(self.tokenizer_type, self.tokenizer):
            yield problem
        if self.sft_data_path is None and not self.sft_packing:
            yield "sft_packing has a meaning only with data.sft_data_path"
        for name in ("reset_attention_mask", "eod_mask_loss"):
            if self.sft_data_path is not None and getattr(self, name):
                yield (
                    f"{name} does not go together with data.sft_data_path, whose records are told apart by "
                    "data.sft_packing, and whose answers alone have a loss; leave it out"
                )

    def reading(self, paths: Mapping[str, str]) -> Self:
        """Return this block with other data, by field; raises UserError."""
        others = {name: getattr(self, name) for name in self.model_fields_set if name not in SOURCES}
        return type(self)(**{**others, **paths})

    @property
    def source(self) -> Source:
        """Return what is read, of the fields that say it."""
        if self.text is not None:
            return TextSource(self.text, Split.parse(self.split), self.cache, self.max_lost_characters)
        if self.data_path is not None:
            return IndexedSource(parse_prefixes(self.data_path), None, Split.parse(self.split))
        if self.sft_data_path is not None:
            split, lost = Split.parse(self.split), self.max_lost_characters
            return RecordSource(self.sft_data_path, split, self.cache, lost, packed=self.sft_packing)
        assert self.train_data_path is not None  # one of the four is there
        validation = None if self.valid_data_path is None else parse_prefixes(self.valid_data_path)
        return IndexedSource(parse_prefixes(self.train_data_path), validation, None)

    @property
    def separate_documents(self) -> bool:
        """Return whether the documents or records in one sample are kept apart."""
        return self.reset_attention_mask or (self.sft_data_path is not None and self.sft_packing)

    @property
    def tokenizer(self) -> TokenizerChoice:
        return TokenizerChoice(self.tokenizer_model, self.split_special_tokens, self.prepend_bos, self.cache)


def check_validation(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[str]:
    """Yield why there is nothing to evaluate on."""
    if not evaluation.iters:
        return
    if data.train_data_path is not None and data.valid_data_path is None:
        yield (
            f"data.valid_data_path is missing, and evaluation.iters is {evaluation.iters}; set it to 0 "
            "or give text for validation"
        )
    elif data.train_data_path is None and Split.parse(data.split).validation == 0:
        yield (
            f'data.split "{data.split}" leaves no text for validation, and evaluation.iters is '
            f"{evaluation.iters}; set it to 0 or give validation a weight"
        )


def check_tokenizer(data: DataConfig, vocab_size: int | None) -> Iterator[str]:
    """Yield why bytes cannot be what a model with a large vocabulary reads."""
    if data.tokenizer_type == "byte" and (vocab_size or 0) > _MOST_FOR_BYTES:
        yield (
            f'data.tokenizer_type "byte" has 257 tokens, model.vocab_size is {vocab_size:,}; give '
            "data.tokenizer_model, the folder of its tokenizer.json, or leave vocab_size out"
        )


def check_documents(data: DataConfig, model: ModelConfig) -> Iterator[str]:
    """Yield why documents, or records for fine-tuning, cannot be told apart as the file asks."""
    if data.separate_documents and model.transformer_impl == "transformer_engine":
        name = "sft_packing" if data.sft_data_path is not None else "reset_attention_mask"
        yield (
            f'data.{name} needs model.transformer_impl "local" (or "auto"): the mask is that of our own attention'
        )
