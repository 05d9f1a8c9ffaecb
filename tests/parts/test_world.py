"""What each launcher's variables say, and which contradictions are refused."""

import os
import socket

import pytest

from megatron_noloco.job.launcher import World, local_device, master_port, read_world
from megatron_noloco.job.world import cores_on_this_host, mpi_world_size, threads_among
from tests.kit.ranks import run_ranks

TORCH = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN = TORCH | {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"}
DEEPSPEED = TORCH | {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}
HYDRA = {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8"}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}
SRUN = BATCH | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}
# The daemons that mpirun or torchrun need are themselves a step, of one task per node.
DAEMON = BATCH | {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (TORCHRUN | DAEMON, "torchrun"),
        (TORCHRUN | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "torchrun"),
        (DEEPSPEED, "deepspeed"),
        (TORCH, "environment"),
        (OPEN_MPI, "mpirun"),
        (OPEN_MPI | TORCH, "mpirun"),
        (OPEN_MPI | DAEMON, "mpirun"),
        (HYDRA, "mpirun"),
        (HYDRA | DAEMON, "mpirun"),
        (SRUN, "srun"),
        (SRUN | {"WORLD_SIZE": "8", "MASTER_ADDR": "a"}, "srun"),
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, "srun"),
    ],
)
def test_every_launcher_is_recognised(environ: dict[str, str], launcher: str) -> None:
    assert read_world(environ) == World(rank=5, local_rank=1, world_size=8, launcher=launcher)  # type: ignore[arg-type]


def test_the_port_of_rank_0() -> None:
    assert (master_port({}), master_port(TORCH)) == (0, 1)


@pytest.mark.parametrize("environ", [{}, BATCH, {"MASTER_ADDR": "a"}, {"PMIX_RANK": "0"}])
def test_without_a_launcher_there_is_one_rank(environ: dict[str, str]) -> None:
    assert read_world(environ) == World(rank=0, local_rank=0, world_size=1, launcher="single")


@pytest.mark.parametrize(
    ("environ", "size"), [(OPEN_MPI, 8), (HYDRA, 8), (TORCHRUN | OPEN_MPI, 1), (DEEPSPEED, 1), ({}, 1)]
)
def test_the_mpi_world_is_known_without_starting_mpi(environ: dict[str, str], size: int) -> None:
    assert mpi_world_size(environ) == size


def place(local_rank: int) -> World:
    return World(rank=5, local_rank=local_rank, world_size=8, launcher="srun")


def test_each_process_has_a_gpu_of_its_own() -> None:
    assert [local_device(place(local_rank), 4) for local_rank in range(4)] == [0, 1, 2, 3]
    assert local_device(place(3), 1) == 0, "the launcher shows each process its own alone"
    assert [local_device(place(local_rank), 2, shared=True) for local_rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [([{0, 1, 2, 3}] * 2, [2, 2]), ([{0, 1}, {2, 3, 4}], [2, 3]), ([{0}] * 2, [0.5, 0.5])],
    ids=["all share all cores", "each is bound to its own", "more ranks than cores"],
)
def test_ranks_divide_the_cores_that_they_may_use(ranks: list[set[int]], shares: list[float]) -> None:
    assert [threads_among(own, ranks) for own in ranks] == shares


def cores(rank: int, world_size: int, hosts: list[str]) -> list[set[int]]:
    socket.gethostname = lambda: hosts[rank]
    os.sched_getaffinity = lambda process: {rank}
    return cores_on_this_host()


def test_ranks_on_this_host_and_their_cores() -> None:
    assert run_ranks(4, cores, ["a", "b", "a", "a"]) == [[{0}, {2}, {3}], [{1}], *[[{0}, {2}, {3}]] * 2]
