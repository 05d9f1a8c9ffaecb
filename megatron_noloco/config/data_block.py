"""The block `data`: what is read, and how it becomes tokens."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from megatron_noloco.config.blocks import Block
from megatron_noloco.data.sources import (
    Blend,
    IndexedSource,
    RecordSource,
    Source,
    Split,
    TextSource,
    TokenizerChoice,
)

Paths = Annotated[str, Field(min_length=1)] | list[str | float]


class DataConfig(Block):
    """What is read."""

    text: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description='A file or folder of UTF-8 text, or "python-stdlib": Python\'s own standard library.',
    )
    data_path: Paths | None = Field(
        default=None,
        description="In place of text: the prefix of a Megatron dataset (`data preprocess` writes them), "
        'or a blend, ["0.3", "prefixA", "0.7", "prefixB"].',
    )
    train_data_path: Paths | None = Field(
        default=None, description="Like data_path, for training alone; split is then not used."
    )
    valid_data_path: Paths | None = Field(
        default=None, description="Like data_path, for validation; goes together with train_data_path."
    )
    sft_data_path: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="In place of text, for fine-tuning: a file or folder of JSON lines with messages, or with "
        "prompt and completion. Only answers have a loss.",
    )
    sft_packing: bool = Field(
        default=True,
        description="With sft_data_path: several records in one sample, told apart; false: one in each.",
    )
    tokenizer_type: Literal["byte", "HuggingFaceTokenizer"] = Field(
        default="byte", description='How text becomes tokens: "byte" needs no file.'
    )
    tokenizer_model: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Folder of a Hugging Face fast tokenizer (with a tokenizer.json); null for bytes.",
    )
    split: str = Field(
        default="949,50,1",
        description="Weights of the train, validation and test parts, Megatron's way; left-out ones are zero.",
    )

    reset_attention_mask: bool = Field(
        default=False,
        description="Whether documents in one sample do not attend to each other; each ends with the tokenizer's "
        "end-of-document token.",
    )
    reset_position_ids: bool = Field(
        default=False,
        description="Whether positions restart in each document. Rotary embeddings know differences of positions "
        "only: with reset_attention_mask, which this needs, they restart anyway.",
    )
    eod_mask_loss: bool = Field(
        default=False, description="Whether the token after the end of a document has no loss."
    )

    @field_validator("data_path", "train_data_path", "valid_data_path")
    @classmethod
    def _is_a_blend(cls, paths: Paths | None) -> Paths | None:
        if paths is not None:
            Blend.parse(paths)
        return paths

    @field_validator("split")
    @classmethod
    def _is_a_split(cls, split: str) -> str:
        Split.parse(split)
        return split

    @property
    def source(self) -> Source:
        """What is read, of the fields that say it."""
        if self.text is not None:
            return TextSource(self.text, Split.parse(self.split))
        if self.data_path is not None:
            return IndexedSource(Blend.parse(self.data_path), None, Split.parse(self.split))
        if self.sft_data_path is not None:
            return RecordSource(self.sft_data_path, Split.parse(self.split), self.sft_packing)
        assert self.train_data_path is not None  # one of the four is there: checks.check_data
        validation = None if self.valid_data_path is None else Blend.parse(self.valid_data_path)
        return IndexedSource(Blend.parse(self.train_data_path), validation, None)

    @property
    def separate_documents(self) -> bool:
        """Whether what lies in one sample is told apart."""
        return self.reset_attention_mask or (self.sft_data_path is not None and self.sft_packing)

    @property
    def tokenizer(self) -> TokenizerChoice:
        return TokenizerChoice(self.tokenizer_type, self.tokenizer_model)
