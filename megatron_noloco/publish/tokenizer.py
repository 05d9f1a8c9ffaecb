"""The byte-level tokenizer as Hugging Face knows it: 256 bytes, no merges, and the end of a document."""

from pathlib import Path

from megatron_noloco.data.tokenizer import ByteTokenizer

END_OF_DOCUMENT = "<|endoftext|>"
_PROBE = "Byte by byte, \n\té 中"


def save_tokenizer(folder: Path, max_length: int) -> None:
    """Write the files `AutoTokenizer.from_pretrained` reads; ids agree with `ByteTokenizer`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ours = ByteTokenizer()
    vocabulary = {_printable(byte): byte for byte in range(256)}
    vocabulary[END_OF_DOCUMENT] = ours.end_of_document
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
    """The character that stands for a byte in GPT-2's byte-level alphabet.

    Bytes that print stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printing:
        return chr(byte)
    others = [value for value in range(256) if value not in printing]
    return chr(0x100 + others.index(byte))


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise ValueError where the ids of a Hugging Face model are not those of `ByteTokenizer`.

    One without a tokenizer may have been trained on bytes; one with another was not, and its
    embeddings would be read under the wrong ids.
    """
    ours = ByteTokenizer()
    if vocab_size < ours.vocab_size:
        raise ValueError(
            f"{folder}: a vocabulary of {vocab_size} is smaller than the byte-level tokenizer's {ours.vocab_size}"
        )
    other = f"{folder}: its tokenizer is not the byte-level one, the only one that can be used yet"
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        try:
            theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from None
        if theirs.encode(_PROBE, add_special_tokens=False).ids != ours.encode(_PROBE).tolist():
            raise ValueError(other)
    elif (folder / "tokenizer.model").exists():
        raise ValueError(other)
