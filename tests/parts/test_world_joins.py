"""Joining for real, under every launcher that one machine has."""

import os
import socket
import subprocess
from typing import Any

from megatron_noloco.job.world import cores_on_this_host
from tests.kit.ranks import run_mpi, run_python, run_ranks, run_torchrun, said

MODULE = "tests.kit.join_world"


def lines(finished: subprocess.CompletedProcess[str], ranks: int) -> list[dict[str, Any]]:
    """What each rank printed, in rank order."""
    found = sorted(said(finished), key=lambda line: line["RANK"])
    assert [line["RANK"] for line in found] == [str(rank) for rank in range(ranks)]
    assert all(line["size"] == ranks and line["WORLD_SIZE"] == str(ranks) for line in found)
    return found


def test_under_mpirun() -> None:
    for line in lines(run_mpi(2, MODULE, ["auto", "torch"], timeout=180), ranks=2):
        assert (line["launcher"], line["MASTER_ADDR"]) == ("mpirun", "127.0.0.1")
        assert line["outcomes"] == {"auto": "mpi", "torch": "torch"}


def test_under_torchrun() -> None:
    for line in lines(run_torchrun(2, MODULE, ["auto", "mpi"], timeout=180), ranks=2):
        assert line["launcher"] == "torchrun"
        assert line["outcomes"]["auto"] == "torch"
        assert "MPI sees a world of 1 but torchrun started 2 ranks" in line["outcomes"]["mpi"]


def test_alone() -> None:
    (line,) = lines(run_python("-m", MODULE, "auto", timeout=180), ranks=1)
    assert (line["launcher"], line["outcomes"]) == ("single", {"auto": "torch"})


def cores(rank: int, world_size: int, hosts: list[str]) -> list[set[int]]:
    socket.gethostname = lambda: hosts[rank]
    os.sched_getaffinity = lambda process: {rank}
    return cores_on_this_host()


def test_ranks_on_this_host_and_their_cores() -> None:
    assert run_ranks(4, cores, ["a", "b", "a", "a"]) == [[{0}, {2}, {3}], [{1}], *[[{0}, {2}, {3}]] * 2]
