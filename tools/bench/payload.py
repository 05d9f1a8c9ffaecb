"""The costs of codes for the combined vector of a pair: error, bytes, time to encode and decode on one core.

    python -m tools.bench payload

Two replicas have equal slow weights phi and outer gradients Delta of their own, both normally distributed, phi 30
times as large, and c = 0.7 * (phi + Delta). The error is that of the pull towards the partner, mean - c, over its
true size, in the Euclidean norm. GB are those of the fp32 vector.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_noloco.outer.bucket_code import Code, PairCode
from megatron_noloco.outer.finite_mean import ExchangeReport
from megatron_noloco.outer.host_codec import codec_for
from megatron_noloco.outer.payload import BLOCK, Coded, blocks_in, message_bytes, signs_of
from megatron_noloco.outer.vectors import BUCKET, HOST, Buffers
from megatron_noloco.outer.weights import wait_for
from megatron_noloco.plans.payloads import BITS

RATIO, OUTER_LR = 30, 0.7


class Figures(NamedTuple):
    """The figures of a code; seconds are processor time of one thread."""

    mean: Tensor  # what the first of the two takes for it
    next_bits: float  # share of the elements in blocks that do not fit
    encode_seconds: float
    decode_seconds: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--repeats", type=int, default=5, help="the fastest counts")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    torch.set_num_threads(1)
    elements = options.elements // BLOCK * BLOCK
    return {
        "elements": elements,
        "ways": {f"int{bits}": measure(elements, options.repeats, bits) for bits in BITS},
    }


def measure(elements: int, repeats: int, bits: int) -> dict[str, float]:
    draw = torch.Generator().manual_seed(0)
    phi = RATIO * torch.randn(elements, generator=draw)
    mine, theirs = (OUTER_LR * (phi + torch.randn(elements, generator=draw)) for _ in range(2))
    figures = coded(mine, theirs, repeats, bits)
    pull = (theirs.double() - mine.double()) / 2
    error = figures.mean.double() - mine.double() - pull
    gigabytes, per_element = 4 * elements / 1e9, message_bytes(elements, bits) / elements
    return {
        "error": float(f"{error.norm() / pull.norm():.2g}"),
        "sent_as_next_bits": round(figures.next_bits, 5),
        "bytes_per_element": round(per_element * (1 + figures.next_bits), 4),
        "encode_gb_per_second": round(gigabytes / figures.encode_seconds, 2),
        "decode_gb_per_second": round(gigabytes / figures.decode_seconds, 2),
    }


def coded(mine: Tensor, theirs: Tensor, repeats: int, bits: int) -> Figures:
    """Encode and decode in buckets where the vectors lie, without the messages; only the first digit is timed."""
    codec, signs, spans = (
        codec_for(bits, mine.device),
        signs_of(0).to(mine.device),
        range(0, len(mine), BUCKET),
    )
    memory, reports = (
        [[Buffers() for _ in spans] for _ in range(2)],
        [ExchangeReport((0, 1)) for _ in range(2)],
    )

    def begin(side: int) -> Iterator[PairCode]:
        for start, buffers in zip(spans, memory[side], strict=True):
            bucket = (mine, theirs)[side][start : start + BUCKET]
            mean = buffers.get("mean", torch.float32, len(bucket), device=bucket.device)
            code = Code(codec, signs, torch.ones(blocks_in(len(bucket)), dtype=torch.bool), mean=mean)
            yield PairCode(bucket, code, buffers, reports[side])

    def sketch_and_encode(side: int) -> list[tuple[PairCode, Coded]]:
        found = []
        for code, other in zip(begin(side), sketches[1 - side], strict=True):
            code.their_sketches[0].copy_(other)
            code.find_steps()
            found.append((code, code.encode()))
        return found

    def swapped() -> tuple[list[PairCode], list[PairCode]]:
        """Return both sides when they have received each other's codes."""
        both = [sketch_and_encode(side) for side in range(2)]
        own, other = ([code for code, _ in side] for side in both)
        for codes, sent in ((own, both[1]), (other, both[0])):
            for code, (_, digit) in zip(codes, sent, strict=True):
                receive(code, digit)
        return own, other

    def decode(both: tuple[list[PairCode], list[PairCode]]) -> tuple[list[PairCode], list[PairCode]]:
        for code in both[0]:
            code.average()
        return both

    sketches = [[code.sketches.clone() for code in begin(side)] for side in range(2)]
    _, encode_seconds = fastest(lambda _: sketch_and_encode(0), repeats, mine.device)
    both, decode_seconds = fastest(decode, repeats, mine.device, swapped)
    for own, other in zip(*both, strict=True):
        other.average()
        receive(own, other.encode())
        own.average()
    mean = torch.cat([code.mean for code in both[0]])
    return Figures(mean, reports[0].resent_elements / repeats / len(mine), encode_seconds, decode_seconds)


def receive(code: PairCode, codes: Coded) -> None:
    for place, part in zip(code.theirs[0], codes, strict=True):
        place.copy_(part)


def fastest(
    work: Callable[[Any], Any],
    repeats: int,
    device: torch.device = HOST,
    prepare: Callable[[], Any] = lambda: None,
) -> tuple[Any, float]:
    """Return what the work returns, and the seconds of this thread's processor, or of the device.

    Args:
        prepare: returns what the work is given; is not timed.
    """
    clock = time.thread_time if device == HOST else time.perf_counter
    seconds = []
    for _ in range(repeats):
        prepared = prepare()
        wait_for(device)
        started = clock()
        outcome = work(prepared)
        wait_for(device)
        seconds.append(clock() - started)
    return outcome, min(seconds)
