"""The block `data`: what is read, and how it becomes tokens."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from megatron_noloco.config.blocks import Block

Paths = Annotated[str, Field(min_length=1)] | list[str | float]


class DataConfig(Block):
    text: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description='A file or folder of UTF-8 text, or "python-stdlib": Python\'s own standard library.',
    )
    data_path: Paths | None = Field(
        default=None,
        description="In place of text: the prefix of a Megatron dataset (tools/preprocess_data.py writes them), "
        'or a blend, ["0.3", "prefixA", "0.7", "prefixB"].',
    )
    train_data_path: Paths | None = Field(
        default=None, description="Like data_path, for training alone; split is then not used."
    )
    valid_data_path: Paths | None = Field(
        default=None, description="Like data_path, for validation; goes together with train_data_path."
    )
    tokenizer_type: Literal["byte", "HuggingFaceTokenizer"] = Field(
        default="byte", description='How text becomes tokens: "byte" needs no file.'
    )
    tokenizer_model: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Folder of a Hugging Face fast tokenizer (with a tokenizer.json); null for bytes.",
    )
    split: str = Field(
        default="949,50,1", description="Weights of the train, validation and test parts, Megatron's way."
    )

    @field_validator("data_path", "train_data_path", "valid_data_path")
    @classmethod
    def _weights_and_prefixes(cls, paths: Paths | None) -> Paths | None:
        if paths is not None:
            blend_of(paths)
        return paths

    @field_validator("split")
    @classmethod
    def _three_weights(cls, split: str) -> str:
        parts = split.split(",")
        try:
            weights = [float(part) for part in parts]
        except ValueError:
            weights = []
        if len(weights) != 3 or not all(0 <= weight < float("inf") for weight in weights) or weights[0] == 0:
            raise ValueError(
                "must be three weights >= 0 for train, validation and test, the first > 0, "
                f'such as "949,50,1", got {split!r}'
            )
        return split

    @property
    def split_weights(self) -> tuple[float, float, float]:
        train, validation, test = (float(part) for part in self.split.split(","))
        return train, validation, test


def blend_of(paths: Paths) -> list[tuple[str, float]]:
    """Prefixes and their weights, which add up to 1; raises ValueError."""
    if isinstance(paths, str):
        return [(paths, 1.0)]
    if len(paths) == 1 and isinstance(paths[0], str):
        return [(paths[0], 1.0)]
    try:
        weights = [float(weight) for weight in paths[::2]]
    except ValueError:
        weights = []
    prefixes = [prefix for prefix in paths[1::2] if isinstance(prefix, str) and prefix]
    if (
        not weights
        or len(weights) != len(prefixes)
        or not all(0 < weight < float("inf") for weight in weights)
    ):
        raise ValueError(
            'must be one prefix, or weights > 0 and prefixes in turn, like ["0.3", "prefixA", "0.7", "prefixB"], '
            f"got {paths!r}"
        )
    return [(prefix, weight / sum(weights)) for prefix, weight in zip(prefixes, weights, strict=True)]
