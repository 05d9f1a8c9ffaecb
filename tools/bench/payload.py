"""The costs of codes for the combined vector of a pair: error, bytes, time to encode and decode on one core.

    python -m tools.bench payload

Two replicas have equal slow weights phi and outer gradients Delta of their own, both normally distributed, and
c = 0.7 * (phi + Delta). The error is that of the pull towards the partner, mean - c, over its true size, in the
Euclidean norm. fp16, bf16 and "plain int16 /256" (a scale for every 256 elements) round c itself, and both
replicas use the mean of two rounded vectors. "int8" and "int4" are payloads of `NolocoSettings`.
GB are those of the fp32 vector.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_noloco.outer.payload import (
    BLOCK,
    CELLS,
    Codec,
    blocks_in,
    find_steps,
    message_bytes,
    pieces,
    signs_of,
)
from megatron_noloco.outer.vectors import HOST, Buffers
from megatron_noloco.outer.weights import wait_for

RATIOS = (3, 30, 300)
OUTER_LR = 0.7
SCALED = 256  # elements with one scale in the plain int16 code


class Figures(NamedTuple):
    """The figures of one way to send a vector; seconds are processor time of one thread."""

    mean: Tensor  # what the first of the two takes for it
    sent_again: float  # share of the elements
    encode_seconds: float
    decode_seconds: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--repeats", type=int, default=5, help="the fastest counts")
    parser.add_argument("--tails", choices=["normal", "laplace"], default="normal", help="of Delta")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    torch.set_num_threads(1)
    elements, repeats = options.elements // BLOCK * BLOCK, options.repeats

    ways: dict[str, tuple[float, Callable[[Tensor, Tensor], Figures]]] = {
        "fp16": (2, lambda c, d: plain(c, d, repeats, torch.Tensor.half)),
        "bf16": (2, lambda c, d: plain(c, d, repeats, torch.Tensor.bfloat16)),
        "plain int16 /256": (2 + 4 / SCALED, lambda c, d: plain(c, d, repeats, scaled)),
    }
    for bits in (8, 4):
        per_element = message_bytes(elements, bits) / elements
        ways[f"int{bits}"] = (per_element, partial(coded, repeats=repeats, bits=bits))
    report = {name: measure(elements, options.tails, *way) for name, way in ways.items()}
    return {"elements": elements, "tails": options.tails, "ways": report}


def measure(
    elements: int, tails: str, bytes_per_element: float, way: Callable[[Tensor, Tensor], Figures]
) -> dict[str, object]:
    errors = {}
    for ratio in RATIOS:
        draw = torch.Generator().manual_seed(ratio)
        phi = ratio * torch.randn(elements, generator=draw)
        mine, theirs = (OUTER_LR * (phi + outer_gradient(elements, tails, draw)) for _ in range(2))
        figures = way(mine, theirs)
        pull = (theirs.double() - mine.double()) / 2
        error = figures.mean.double() - mine.double() - pull
        errors[str(ratio)] = float(f"{error.norm() / pull.norm():.2g}")
    gigabytes = 4 * elements / 1e9
    return {
        "error_at_phi_over_delta": errors,
        "sent_again_in_fp32": round(figures.sent_again, 5),
        "bytes_per_element": round(bytes_per_element + 4 * figures.sent_again, 4),
        "encode_gb_per_second": round(gigabytes / figures.encode_seconds, 2),
        "decode_gb_per_second": round(gigabytes / figures.decode_seconds, 2),
    }


def outer_gradient(elements: int, tails: str, draw: torch.Generator) -> Tensor:
    """Draw an outer gradient of variance 1."""
    if tails == "normal":
        return torch.randn(elements, generator=draw)
    uniform = torch.rand(elements, generator=draw).sub_(0.5)
    return uniform.sign() * (1 - 2 * uniform.abs()).clamp_(min=1e-30).log() / -(2**0.5)


def scaled(vector: Tensor) -> Tensor:
    """Round to 16 bits with a scale. The result is in fp32, since it is multiplied by the scale."""
    rows = vector.view(-1, SCALED)
    scale = rows.abs().amax(dim=1, keepdim=True) / (2**15 - 1)
    return ((rows / scale).round_().to(torch.int16) * scale).view(-1)


def plain(mine: Tensor, theirs: Tensor, repeats: int, code: Callable[[Tensor], Tensor]) -> Figures:
    my_code, encode_seconds = fastest(lambda: code(mine), repeats)
    their_code = code(theirs)
    mean, decode_seconds = fastest(lambda: (my_code.float() + their_code.float()) / 2, repeats)
    return Figures(mean, 0.0, encode_seconds, decode_seconds)


def coded(mine: Tensor, theirs: Tensor, repeats: int, bits: int) -> Figures:
    """Encode and decode where the vectors lie, as `CodedExchange` does, without the messages."""
    device, blocks = mine.device, blocks_in(len(mine))
    codec, signs, get = Codec(bits, device), signs_of(0).to(device), Buffers().get
    sketches = [get(f"sketches {side}", torch.float32, blocks, CELLS) for side in range(2)]
    in_host_memory = get("steps", torch.float32, blocks)
    steps, mean = torch.empty(blocks, device=device), torch.empty_like(mine)
    codes = torch.empty(2, blocks, codec.block_bytes, dtype=torch.uint8, device=device)
    checksums = torch.empty(2, blocks, dtype=torch.int32, device=device)
    right = torch.empty(blocks, dtype=torch.bool, device=device)

    def encode() -> None:
        codec.sketch(mine, signs, sketches[0])
        wait_for(device)
        find_steps(sketches, bits, in_host_memory)
        steps.copy_(in_host_memory, non_blocking=True)
        codec.encode(mine, steps, codes[0], checksums[0])

    def decode() -> None:
        for piece, at in pieces(mine, codec.at_once):
            coded = [(codes[side, at], checksums[side, at]) for side in range(2)]
            m, right[at], _ = codec.differences(steps[at], coded[0], coded[1])
            moved, _ = codec.from_difference(piece, m, steps[at] * right[at] / 2)
            mean[at.start * BLOCK : at.stop * BLOCK] = moved

    codec.sketch(theirs, signs, sketches[1])
    _, encode_seconds = fastest(encode, repeats, device)
    codec.encode(theirs, steps, codes[1], checksums[1])
    _, decode_seconds = fastest(decode, repeats, device)
    again = ~right.repeat_interleave(BLOCK)
    mean[again] = (mine[again] + theirs[again]) / 2
    return Figures(mean, float(again.float().mean()), encode_seconds, decode_seconds)


def fastest(work: Callable[[], Any], repeats: int, device: torch.device = HOST) -> tuple[Any, float]:
    """Return what the work returns, and the seconds of this thread's processor, or of the device."""
    clock = time.thread_time if device == HOST else time.perf_counter
    seconds = []
    for _ in range(repeats):
        wait_for(device)
        started = clock()
        outcome = work()
        wait_for(device)
        seconds.append(clock() - started)
    return outcome, min(seconds)
