"""Joining for real, under every launcher that one machine has."""

import socket
import subprocess
import sys

import pytest

from megatron_noloco.job.join import ranks_on_this_host
from tests.harness import run_mpi, run_ranks, run_torchrun, said

MODULE = "tests.distributed.join_world"


def lines(finished: subprocess.CompletedProcess[str], ranks: int) -> list[dict[str, str]]:
    """What each rank printed, in rank order."""
    found = sorted(said(finished), key=lambda line: line["RANK"])
    assert [line["RANK"] for line in found] == [str(rank) for rank in range(ranks)]
    assert all(line["size"] == ranks and line["WORLD_SIZE"] == str(ranks) for line in found)
    return found


@pytest.mark.parametrize(("kind", "transport"), [("auto", "mpi"), ("torch", "torch")])
def test_under_mpirun(kind: str, transport: str) -> None:
    for line in lines(run_mpi(2, MODULE, [kind], timeout=180), ranks=2):
        assert (line["launcher"], line["outcome"], line["MASTER_ADDR"]) == ("mpirun", transport, "127.0.0.1")


def test_under_torchrun() -> None:
    for line in lines(run_torchrun(2, MODULE, ["auto"], timeout=180), ranks=2):
        assert (line["launcher"], line["outcome"]) == ("torchrun", "torch")


def test_under_torchrun_mpi_is_refused() -> None:
    for line in lines(run_torchrun(2, MODULE, ["mpi"], timeout=180), ranks=2):
        assert "MPI sees a world of 1 but torchrun started 2 ranks" in line["outcome"]


def test_alone() -> None:
    command = [sys.executable, "-m", MODULE, "auto"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=180)
    (line,) = lines(finished, ranks=1)
    assert (line["launcher"], line["outcome"]) == ("single", "torch")


def counted(rank: int, world_size: int, hosts: list[str]) -> int:
    socket.gethostname = lambda: hosts[rank]
    return ranks_on_this_host()


def test_ranks_on_this_host() -> None:
    assert run_ranks(4, counted, ["a", "b", "a", "a"]) == [3, 1, 3, 3]
