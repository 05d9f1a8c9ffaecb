"""What each launcher's variables say, and which contradictions are refused."""

import pytest

from megatron_noloco.job.launcher import World, local_device, master_port, read_world
from megatron_noloco.job.world import choose_transport, mpi_world_size, threads_among

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
    for text in ("abc", "-1", "65536", ""):
        with pytest.raises(ValueError, match=f"MASTER_PORT='{text}' is not a port; it must be 0 to 65535"):
            master_port({"MASTER_PORT": text})


@pytest.mark.parametrize("environ", [{}, BATCH, {"MASTER_ADDR": "a"}, {"PMIX_RANK": "0"}])
def test_without_a_launcher_there_is_one_rank(environ: dict[str, str]) -> None:
    assert read_world(environ) == World(rank=0, local_rank=0, world_size=1, launcher="single")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCH | {"WORLD_SIZE": "4"}, "RANK=5 but WORLD_SIZE=4; RANK must lie between 0 and 3"),
        (TORCH | {"LOCAL_RANK": "9"}, "LOCAL_RANK=9 but WORLD_SIZE=8"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE is not set although RANK=0 and LOCAL_RANK=0; set"),
        (TORCH | {"RANK": "-1"}, "RANK='-1' is not a number"),
        (OPEN_MPI | {"RANK": "0"}, "RANK=0 but OMPI_COMM_WORLD_RANK=5 under mpirun; unset RANK"),
        (HYDRA | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4 but PMI_SIZE=8 under mpirun; unset WORLD_SIZE"),
        (SRUN | {"LOCAL_RANK": "0"}, "LOCAL_RANK=0 but SLURM_LOCALID=1 under srun; unset LOCAL_RANK"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set although PMI_RANK=0 and PMI_SIZE=2"),
    ],
)
def test_contradictions_are_refused_in_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_world(environ)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "size"), [(OPEN_MPI, 8), (HYDRA, 8), (TORCHRUN | OPEN_MPI, 1), (DEEPSPEED, 1), ({}, 1)]
)
def test_the_mpi_world_is_known_without_starting_mpi(environ: dict[str, str], size: int) -> None:
    assert mpi_world_size(environ) == size


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "environment"])
def test_mpi_is_refused_where_every_process_is_alone(launcher: str) -> None:
    world = World(rank=0, local_rank=0, world_size=4, launcher=launcher)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"MPI sees a world of 1 but {launcher} started 4 ranks"):
        choose_transport("mpi", world)


def place(local_rank: int) -> World:
    return World(rank=5, local_rank=local_rank, world_size=8, launcher="srun")


def test_each_process_has_a_gpu_of_its_own() -> None:
    assert [local_device(place(local_rank), 4) for local_rank in range(4)] == [0, 1, 2, 3]
    assert local_device(place(3), 1) == 0, "the launcher shows each process its own alone"
    assert [local_device(place(local_rank), 2, shared=True) for local_rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"^rank 5: local rank 2, but this host has 2 GPUs; start one "):
        local_device(place(2), 2)


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [([{0, 1, 2, 3}] * 2, [2, 2]), ([{0, 1}, {2, 3, 4}], [2, 3]), ([{0}] * 2, [0.5, 0.5])],
    ids=["all share all cores", "each is bound to its own", "more ranks than cores"],
)
def test_ranks_divide_the_cores_that_they_may_use(ranks: list[set[int]], shares: list[float]) -> None:
    assert [threads_among(own, ranks) for own in ranks] == shares
