"""Whether a Hugging Face model and a run count in the same tokens."""

from pathlib import Path
from typing import Any

from megatron_noloco.data.fast_tokenizer import FastTokenizer
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer

_PROBE = "Byte by byte, \n\té 中"


def with_tokenizer_of(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The block `data` of a run that starts from a Hugging Face model: in the model's tokens.

    Unchanged where it names a tokenizer itself, and where the model has none or the byte-level one.
    """
    if "tokenizer_type" in data or not (folder / "tokenizer.json").exists():
        return data
    if _same_tokens(FastTokenizer(folder), ByteTokenizer()):
        return data
    return {
        **data,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(folder.resolve()),
    }


def check_tokenizer(folder: Path, ours: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError where the ids of a Hugging Face model are not those of the run's tokenizer.

    A model without a tokenizer may have been trained with ours; one with another was not, and its embeddings
    would be read under the wrong ids.
    """
    if vocab_size < ours.vocab_size:
        raise ValueError(
            f"{folder}: a vocabulary of {vocab_size} is smaller than the run's tokenizer's {ours.vocab_size} "
            "(the byte-level tokenizer has 257)"
        )
    if (folder / "tokenizer.json").exists():
        if not _same_tokens(FastTokenizer(folder), ours):
            raise ValueError(
                f"{folder}: its tokenizer is not the one that the data block names; leave out "
                "data.tokenizer_type to take the model's"
            )
    elif (folder / "tokenizer.model").exists():
        raise ValueError(
            f"{folder}: its tokenizer is a tokenizer.model, and a tokenizer.json is needed; "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
        )


def _same_tokens(theirs: Tokenizer, ours: Tokenizer) -> bool:
    return theirs.encode(_PROBE).tolist() == ours.encode(_PROBE).tolist()
