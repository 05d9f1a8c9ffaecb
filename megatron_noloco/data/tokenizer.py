"""A tokenizer that needs no file, no download and no training: the bytes themselves."""

from collections.abc import Sequence

import numpy as np

BYTES = 256


class ByteTokenizer:
    """UTF-8 bytes are tokens 0..255; token 256 ends a document."""

    end_of_document = BYTES
    vocab_size = BYTES + 1

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`, uint16, shape [bytes]; no end-of-document token is added."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`: what is not UTF-8 becomes U+FFFD, ends of documents are left out.

        Ids past the vocabulary also become U+FFFD: a model whose embedding is padded can emit them.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        tokens = np.minimum(tokens[tokens != self.end_of_document], 0xFF)  # 0xFF never occurs in UTF-8
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
