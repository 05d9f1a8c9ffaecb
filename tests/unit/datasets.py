"""Indexed datasets of a test."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_noloco.data.indexed import IndexedWriter


def write_dataset(
    prefix: Path, documents: Iterable[Any], vocab_size: int = 257, tokenizer: Any = None
) -> str:
    """Write a dataset of these documents, each a sequence of tokens; returns its prefix."""
    writer = IndexedWriter(prefix, vocab_size)
    for document in documents:
        writer.add(np.array(document), ends_document=True)
    writer.finish(tokenizer)
    return str(prefix)
