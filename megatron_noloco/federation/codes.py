"""What two partners send of a bucket, phase by phase.

A code is a generator: it yields the next piece to send, and is sent the partner's. In fp32 there is one phase, the
values. In codes (`outer.payload`) there are four: sketches; codes with checksums; the next bits of the blocks that
the codes do not hold, which both sides find to be the same; and in fp32 what these do not hold either.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from megatron_noloco.federation.mesh import Blob
from megatron_noloco.outer.bucket_code import DIGITS, Code, PairCode, blocks_to_code
from megatron_noloco.outer.finite_mean import ExchangeReport, finite_mean
from megatron_noloco.outer.host_codec import codec_for
from megatron_noloco.outer.payload import Codec, UnequalError, signs_of
from megatron_noloco.outer.vectors import Buffers, Ranges

Phases = Generator[Blob, Blob, None]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor on the host."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def fill(places: Sequence[Tensor], blob: Blob) -> None:
    """Fill tensors from a piece. Raises UnequalError for a piece of another length."""
    if len(blob) != sum(place.nbytes for place in places):
        raise UnequalError
    at, view = 0, memoryview(blob)
    for place in filter(len, places):
        bytes_of(place)[:] = view[at : at + place.nbytes]
        at += place.nbytes


def copied(parts: Sequence[Tensor]) -> bytes:
    """Return the bytes of tensors, whose memory may then be used again."""
    return b"".join(map(bytes_of, parts))


class Coding:
    """How the buckets of a round are sent.

    Args:
        bits: of a code; None: fp32. The same for both sides, as `number`, of the round.
        exact: ranges of the canonical vector that are sent in fp32.

    Attributes:
        phases: of a bucket.
        large_phase: the phase with most of the bytes.
    """

    def __init__(self, bits: int | None, number: int, exact: Ranges) -> None:
        self.phases, self.large_phase = (1, 0) if bits is None else (2 + DIGITS, 1)
        self._codec = None if bits is None else codec_for(bits)
        self._signs, self._exact = signs_of(number), exact
        self._shared = Buffers(pinned=False)  # by all buckets: what none needs while it waits

    def exchange(self, bucket: range, own: Tensor, mean: Tensor, report: ExchangeReport) -> Phases:
        """Exchange a bucket, fp32 in host memory, and fill `mean`. Raises UnequalError.

        Args:
            bucket: its elements in the canonical vector.
        """
        if self._codec is None:
            return _in_fp32(own, mean, report)
        return self._in_codes(self._codec, bucket, own, mean, report)

    def _in_codes(
        self, codec: Codec, bucket: range, own: Tensor, mean: Tensor, report: ExchangeReport
    ) -> Phases:
        how = Code(codec, self._signs, blocks_to_code(bucket, self._exact), mean=mean)
        code = PairCode(own, how, self._shared, report)
        code.sketches = code.sketches.clone()
        fill([code.their_sketches[0]], (yield bytes_of(code.sketches)))
        code.find_steps()
        code.steps = code.steps.clone()
        for _ in range(DIGITS):
            fill(code.theirs[0], (yield copied(code.encode())))
            code.average()
        left_over = code.left_over().clone()
        theirs = torch.empty_like(left_over)
        yield from _in_fp32(left_over, theirs, report)
        code.fill(theirs)


def _in_fp32(own: Tensor, mean: Tensor, report: ExchangeReport) -> Phases:
    fill([mean], (yield bytes_of(own)))
    list(finite_mean([own, mean], mean, report))
