"""Rounds of weights on simulated GPUs are those on CPUs, bit for bit, whatever the order of the streams."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_noloco.outer import Exchange, TorchWeights, exchange, vectors
from megatron_noloco.outer.finite_mean import MeanPiece
from megatron_noloco.outer.payload import BLOCK, message_bytes
from megatron_noloco.settings import PAPER, NolocoSettings
from tests.simulated_gpu import Gpu, Order, installed
from tests.simulated_gpu.rounds import (
    AT_ONCE,
    BUCKET,
    WINDOW,
    after_rounds,
    cost_of_a_round,
    differences,
)

METHODS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "a group of 4": {"group_size": 4},
    "without momentum": {"outer_momentum": 0.0, "outer_lr": 1.0, "consensus_weight": None},
    "a group of 4, int4": {"group_size": 4, "payload": "int4"},
    "three fragments, int8": {"fragments": 3, "payload": "int8"},
}
ALL = [
    {"group_size": group, "payload": payload, "fragments": fragments}
    for group, payload, fragments in itertools.product((2, 4), ("fp32", "int8", "int4", "int3"), (1, 3))
]
where = pytest.mark.parametrize("slow_weights", ["host", "device"])
delay = pytest.mark.parametrize("overlap_steps", [0, 2])


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(Exchange, "bucket", BUCKET)
    monkeypatch.setattr(exchange, "WINDOW", WINDOW)


def check(method: dict[str, Any], orders: tuple[Order, ...]) -> None:
    expected = after_rounds(None, method)
    with installed():
        for order in orders:
            assert not differences(expected, after_rounds(order, method)), order


@where
@delay
@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_those_of_a_cpu(name: str, overlap_steps: int, slow_weights: str) -> None:
    method = {**METHODS[name], "overlap_steps": overlap_steps, "slow_weights": slow_weights}
    check(method, (Order.LATE, Order.SIDE_FIRST))


@pytest.mark.slow
@where
@delay
@pytest.mark.parametrize("method", ALL, ids=str)
def test_all_methods_are_those_of_a_cpu(
    method: dict[str, Any], overlap_steps: int, slow_weights: str
) -> None:
    check({**method, "overlap_steps": overlap_steps, "slow_weights": slow_weights}, tuple(Order))


def test_memory_is_released_after_the_copies_from_it() -> None:
    with installed(), Gpu() as gpu:
        buffers = vectors.Buffers()
        there = torch.empty(3, device="cuda")
        there.copy_(buffers.get("pinned", torch.float32, 3).fill_(1.0), non_blocking=True)
        assert not torch.cuda.current_stream().query()
        buffers.release()
        assert there.tolist() == [1.0, 1.0, 1.0]
        assert gpu.waits


def test_a_forked_process_gets_no_pinned_memory() -> None:
    with installed(), Gpu():
        pinned = vectors.buffer(3, torch.device("cpu"))
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= pinned.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert "dc" in flags.split()


def test_an_outer_step_waits_for_no_local_step() -> None:
    settings = NolocoSettings(**PAPER | {"slow_weights": "device"})
    with installed(), Gpu():
        weights = torch.zeros(3, device="cuda")
        of_rank = vectors.OuterVectors(TorchWeights([weights]), settings, keeps_rounding=False)
        mean = torch.full((3,), 4.0, device="cuda")
        torch.cuda.synchronize()
        weights.add_(1.0)  # a local step
        with of_rank.side.used():
            of_rank.outer_step(vectors.Spans([(0, 3)]), MeanPiece(0, 3, mean), torch.zeros(3, device="cuda"))
        of_rank.side.wait()
        assert not torch.cuda.current_stream().query()
        with torch.cuda.stream(torch.cuda.Stream()):  # for no other stream is waited
            assert of_rank.slow_weights.tolist() == [4.0, 4.0, 4.0]


BLOCKS = 60
WAITS = 3  # for the sketches of a bucket, its codes, and the verdict
OTHER_WAITS = 3  # for c, slow weights, fast weights


@pytest.mark.parametrize("payload", ["fp32", "int8", "int4", "int3"])
def test_codes_cross_the_bus_if_slow_weights_are_on_the_device(payload: str) -> None:
    """Else fast weights have to reach the host, and slow weights the device, whatever is sent."""
    length = BLOCKS * BLOCK
    with installed():
        host, device = (
            cost_of_a_round({"payload": payload, "slow_weights": where}, length)
            for where in ("host", "device")
        )
    assert set(host.crossed.values()) == {4 * length}
    codes = 4 * length if payload == "fp32" else message_bytes(length, int(payload.removeprefix("int")))
    for crossed in device.crossed.values():
        again = 4 * device.report.resent_elements
        assert codes - 16 * BLOCKS <= crossed < 1.1 * codes + 4 * BLOCK + again
    assert sum(host.waits.values()) == -(-length // AT_ONCE) + 1, (
        "for each piece that is formed, and the last"
    )
    if payload != "fp32":
        again = (
            device.report.resent_elements // BLOCK
        )  # codes and the verdict once more, for each bucket at most
        assert sum(device.waits.values()) <= WAITS * BLOCKS * BLOCK // BUCKET + OTHER_WAITS + 2 * again
