"""One suite for all transports: threads, torch.distributed and MPI."""

import gc
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_noloco.transport.interface import ExchangeTimeoutError, Message, RankLostError
from megatron_noloco.transport.mpi import library_name
from megatron_noloco.transport.torch_dist import TorchTransport, _Threads
from tests.kit.loopback import loopback_world
from tests.kit.ranks import RankFailedError, run_mpi, run_ranks, said
from tests.kit.transport_suite import (
    BIG_ELEMENTS,
    CASES,
    DEADLINE_SECONDS,
    WORLD_SIZE,
    pattern,
    run_suite,
    swap,
)

Outcomes = list[dict[str, str]]  # per rank: case -> "passed" or a traceback


def loopback_outcomes() -> Outcomes:
    with ThreadPoolExecutor(WORLD_SIZE) as threads:
        return list(threads.map(run_suite, loopback_world(WORLD_SIZE)))


def torch_outcomes() -> Outcomes:
    return run_ranks(WORLD_SIZE, lambda rank, world_size: run_suite(TorchTransport()), timeout=180)


def mpi_outcomes() -> Outcomes:
    finished = run_mpi(WORLD_SIZE, "tests.kit.transport_suite", timeout=180)
    return [line["outcomes"] for line in sorted(said(finished), key=lambda line: line["rank"])]


TRANSPORTS = {"loopback": loopback_outcomes, "torch": torch_outcomes, "mpi": mpi_outcomes}


@pytest.fixture(scope="module", params=TRANSPORTS)
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    return TRANSPORTS[request.param]()


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_transport(outcomes: Outcomes, case: str) -> None:
    assert len(outcomes) == WORLD_SIZE
    failures = [rank[case] for rank in outcomes if rank[case] != "passed"]
    assert not failures, "\n".join(failures)


def test_loopback_copies_what_is_sent() -> None:
    first, second = loopback_world(2)
    outgoing, incoming = pattern(0, 10), torch.zeros(10)
    first.post([Message(1, outgoing)], [], tag=1)
    outgoing.zero_()
    second.post([], [Message(0, incoming)], tag=1).wait(1.0)
    assert torch.equal(incoming, pattern(0, 10))


def test_loopback_refuses_unequal_lengths() -> None:
    first, second = loopback_world(2)
    first.post([Message(1, torch.zeros(3))], [], tag=1)
    with pytest.raises(ValueError, match="12 bytes where rank 1 expects 8"):
        second.post([], [Message(0, torch.zeros(2))], tag=1)


def _one_leaves(rank: int, world_size: int) -> str:
    transport = TorchTransport()
    if rank == 1:
        swap(transport, 0, 5, tag=1)
        return ""  # and this process ends while rank 0 waits for it
    swap(transport, 2 if rank == 0 else 0, 5, tag=2)
    message = ""
    if rank == 0:
        flight = transport.post([], [Message(1, torch.zeros(BIG_ELEMENTS))], tag=3)
        swap(transport, 1, 5, tag=1)
        with pytest.raises(RankLostError, match="rank 1 has gone") as caught:
            flight.wait(DEADLINE_SECONDS)
        assert caught.value.rank == 1
        message = str(caught.value)
    swap(transport, 2 if rank == 0 else 0, 5, tag=4)  # the survivors go on
    return message


def test_torch_names_the_rank_that_died() -> None:
    assert "rank 1" in run_ranks(3, _one_leaves, timeout=40)[0]


def _raise_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        raise ExchangeTimeoutError(0, 1, 2.0)
    time.sleep(60)


def test_flights_of_torch_use_their_threads_again_and_end_them() -> None:
    before, threads = set(threading.enumerate()), _Threads()
    for _ in range(2):
        together = threading.Barrier(4, timeout=10)  # of three that are busy at once, and this one

        def busy(together: threading.Barrier = together) -> None:
            together.wait()

        for _ in range(3):
            threads.run(busy)
        together.wait()
        for _ in range(3):
            assert threads._idle.acquire(timeout=10)
        threads._idle.release(3)
    assert len(set(threading.enumerate()) - before) == 3
    del threads
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_harness_raises_the_first_failure_and_reaps_the_rest() -> None:
    before = set(multiprocessing.active_children())  # of other tests
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed(.|\n)*no answer from rank 0"):
        run_ranks(2, _raise_on, 1)
    assert set(multiprocessing.active_children()) <= before


def test_harness_enforces_its_timeout() -> None:
    with pytest.raises(RankFailedError, match=r"ranks \[0, 1\] of 2 had not finished after 2 s"):
        run_ranks(2, _raise_on, None, timeout=2)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("Open MPI v5.0.11, package: Open MPI root@host Distribution", "Open MPI v5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25", "MPICH 5.0.2"),
        ("Intel(R) MPI Library 2021.19.0 for Linux* OS\n", "Intel(R) MPI Library 2021.19.0 for Linux* OS"),
    ],
)
def test_an_mpi_library_is_named(version: str, name: str) -> None:
    assert library_name(version) == name
