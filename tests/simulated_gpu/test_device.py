"""The simulated GPU shows the faults that it is for, and nothing where there is none."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_noloco.outer.vectors import buffer
from tests.simulated_gpu import Gpu, Order, RaceError, installed


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    with installed():
        yield


def test_a_copy_from_memory_that_is_gone_is_a_race() -> None:
    """Memory that the program itself has pinned; torch keeps its own for the copies from it."""
    with Gpu():
        there = torch.empty(2, device="cuda")
        there.copy_(buffer(2, torch.device("cpu")), non_blocking=True)
        with pytest.raises(RaceError, match="memory of the host was freed before this had run"):
            torch.cuda.synchronize()


def pinned(*values: float) -> Tensor:
    return torch.tensor(values).pin_memory()


def test_a_tensor_says_where_it_lies() -> None:
    with Gpu():
        there = torch.zeros(3, device="cuda")
        assert [str(one.device) for one in (there, there[1:], there + 1, there.cpu())] == ["cuda:0"] * 3 + [
            "cpu"
        ]
        assert there.is_cuda
        assert torch.empty_like(there, device="cpu").device.type == "cpu"
        assert torch.nn.Linear(2, 2).to("cuda").weight.is_cuda
        with pytest.raises(RuntimeError, match="found at least two devices"):
            there + torch.ones(3)
        with pytest.raises(TypeError, match="cuda:0 device type tensor to numpy"):
            there.numpy()


@pytest.mark.parametrize("order", Order)
def test_what_is_waited_for_is_what_a_cpu_computes(order: Order) -> None:
    def gradient(device: str) -> Tensor:
        weight = torch.nn.Parameter(torch.arange(6.0, device=device).view(2, 3))
        (torch.tanh(weight) @ weight.T).square().sum().backward()
        assert weight.grad is not None
        return weight.grad.cpu()

    with Gpu(order):
        found = gradient("cuda")
    assert torch.equal(found, gradient("cpu"))


def test_a_result_that_is_not_waited_for_is_not_there() -> None:
    with Gpu() as gpu:
        out = pinned(0, 0)
        out.copy_(torch.ones(2, device="cuda") * 3, non_blocking=True)
        assert out.tolist() == [0, 0]
        torch.cuda.synchronize()
        assert out.tolist() == [3, 3]
        (wait,) = gpu.waits
        assert wait.file == "tests/simulated_gpu/test_device.py"
        assert "torch.cuda.synchronize()" in str(wait)


def test_early_write_to_pinned_memory_changes_copy() -> None:
    def copied(wait: bool) -> list[float]:
        with Gpu():
            source = pinned(1, 2)
            there = source.to("cuda", non_blocking=True)
            if wait:
                torch.cuda.current_stream().synchronize()
            source.zero_()
            return there.tolist()

    assert copied(True) == [1, 2]
    assert copied(False) == [0, 0]


def test_pageable_copy_reads_at_once_blocking_copy_waits() -> None:
    with Gpu() as gpu:
        source = torch.tensor([1.0, 2.0])
        there = source.to("cuda", non_blocking=True)
        source.zero_()
        assert not gpu.waits
        assert there.tolist() == [1, 2]
        source.to("cuda")
        assert sum(gpu.waits.values()) == 2


@pytest.mark.parametrize("ordered", [True, False])
def test_a_stream_that_does_not_wait_for_another_reads_too_early(ordered: bool) -> None:
    for order in (Order.LATE, Order.SIDE_FIRST):
        with Gpu(order):
            side = torch.cuda.Stream()
            numbers = torch.ones(2, device="cuda")
            if ordered:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                doubled = numbers * 2
            side.synchronize()
            with torch.cuda.stream(side):
                assert (doubled.tolist() == [2, 2]) == ordered, order


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_in_use_is_an_error(recorded: bool) -> None:
    with Gpu():
        side = torch.cuda.Stream()
        numbers = torch.ones(2, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = numbers * 2
        if recorded:
            numbers.record_stream(side)
        del numbers
        if recorded:
            side.synchronize()
            assert doubled.tolist() == [2, 2]
        else:
            with pytest.raises(RaceError, match=r"aten\.mul"):
                side.synchronize()


def test_the_host_waits_where_cuda_needs_a_number() -> None:
    with Gpu() as gpu:
        numbers = torch.arange(4.0, device="cuda")
        mask = numbers > 1
        numbers.masked_fill_(mask, 0.0)
        assert not gpu.waits
        for count, read in enumerate(
            (numbers.sum().item, lambda: numbers[mask], lambda: bool(mask.any()), mask.nonzero, numbers.cpu),
            1,
        ):
            read()
            assert sum(gpu.waits.values()) == count


def test_random_numbers_follow_generator_at_call() -> None:
    def drawn(order: Order) -> list[float]:
        with Gpu(order):
            torch.manual_seed(1)
            first = torch.nn.functional.dropout(torch.ones(64, device="cuda"))
            state = torch.cuda.get_rng_state()
            second = torch.empty(64, device="cuda").normal_()
            torch.cuda.set_rng_state(state)
            assert torch.equal(torch.empty(64, device="cuda").normal_(), second)
            on_host = torch.rand(1)
            return [*first.tolist(), *second.tolist(), float(on_host)]

    assert drawn(Order.LATE) == drawn(Order.AT_ONCE)
