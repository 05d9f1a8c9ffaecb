"""Whether a Hugging Face model and a run count in the same tokens."""

from pathlib import Path

from megatron_noloco.data.tokenizer import Tokenizer

_PROBE = "Byte by byte, \n\té 中"


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
    other = (
        f"{folder}: its tokenizer is not the one of the data block (byte-level, unless it says otherwise); set "
        'data.tokenizer_type to "HuggingFaceTokenizer" and data.tokenizer_model to a folder with tokenizer.json'
    )
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer as FastTokenizer

        try:
            theirs = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from None
        if theirs.encode(_PROBE, add_special_tokens=False).ids != ours.encode(_PROBE).tolist():
            raise ValueError(other)
    elif (folder / "tokenizer.model").exists():
        raise ValueError(other)
