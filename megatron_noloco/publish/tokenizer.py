"""The byte-level tokenizer as Hugging Face knows it: 256 bytes, no merges, and the end of a document."""

from pathlib import Path

from megatron_noloco.data.tokenizer import ByteTokenizer

END_OF_DOCUMENT = "<|endoftext|>"


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
