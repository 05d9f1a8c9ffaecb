"""What an indexed dataset holds, in lines for a person."""

from collections.abc import Iterator

import numpy as np

from megatron_noloco.data.indexed import IndexedTokens
from megatron_noloco.data.tokenizer import Tokenizer

_BAR = 40  # characters of the longest bar
_SHOWN_TOKENS = 60  # of a document


def report(indexed: IndexedTokens, tokenizer: Tokenizer, samples: int) -> Iterator[str]:
    lengths = indexed.document_lengths
    yield f"dataset: {indexed.prefix} ({indexed.tokens.nbytes / 1e6:.1f} MB, {indexed.dtype} tokens)"
    yield f"documents: {len(lengths)}, in {len(indexed.lengths)} sequences"
    yield f"tokens: {len(indexed.tokens)}"
    yield (
        f"document length: shortest {lengths.min()}, median {np.median(lengths):.0f}, "
        f"mean {lengths.mean():.1f}, longest {lengths.max()}"
    )
    yield from _histogram(lengths)
    for number in range(min(samples, len(lengths))):
        first, stop = indexed.document_bounds[number : number + 2]
        yield f"document {number}: {_shown(indexed.part(first, stop)[:_SHOWN_TOKENS], tokenizer)}"


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """Documents by length, in powers of two."""
    powers = np.bincount(np.frexp(lengths)[1])  # 2**(power - 1) <= length < 2**power
    present = np.flatnonzero(powers)
    ranges = {
        power: f"{1 << (power - 1)}..{(1 << power) - 1}" if power else "0"
        for power in range(present[0], present[-1] + 1)
    }
    width = max(map(len, ranges.values()))
    for power, range_ in ranges.items():
        bar = "#" * -(-_BAR * int(powers[power]) // int(powers.max()))
        yield f"  {range_:>{width}} tokens: {powers[power]:>8} {bar}".rstrip()


def _shown(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """Their text, or the ids where the tokenizer cannot have made them."""
    if int(tokens.max(initial=0)) >= tokenizer.vocab_size:
        ids = " ".join(map(str, tokens[:12]))
        return f"tokens {ids} ... (not of this tokenizer: --tokenizer-type, --tokenizer-model)"
    return repr(tokenizer.decode(tokens))
