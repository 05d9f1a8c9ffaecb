"""What a process knows about its launch, and how it joins the others."""

import ipaddress
import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from megatron_noloco.transport import mpi
from megatron_noloco.transport.mpi import MpiTransport
from megatron_noloco.transport.protocol import Transport
from megatron_noloco.transport.torch_dist import TorchTransport

Launcher = Literal["single", "torchrun", "deepspeed", "environment", "mpirun", "srun"]

_PATIENCE = timedelta(minutes=30)  # a cluster does not start all its processes at once
_LOCAL_HOST = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """The place of one process; `environment` is an unknown launcher that sets torch's variables."""

    rank: int
    local_rank: int
    world_size: int
    launcher: Launcher


@dataclass(frozen=True)
class _Names:
    """The environment variables in which a launcher writes a process's place."""

    rank: str
    local_rank: str
    world_size: str


_TORCH = _Names("RANK", "LOCAL_RANK", "WORLD_SIZE")
_OPEN_MPI = _Names("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
_HYDRA = _Names("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE")  # MPICH and Intel MPI
_SLURM = _Names("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")


def read_world(environ: Mapping[str, str]) -> World:
    """The place that the launcher's variables give this process; one alone when there are none.

    Launchers nest (srun starts mpirun's daemons, mpirun may start torchrun), so the innermost is looked for
    first. Raises ValueError when variables are missing or contradict one another.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _read("torchrun", _TORCH, environ)
    if "CROSS_RANK" in environ and "LOCAL_SIZE" in environ:  # only DeepSpeed's own launcher sets these
        return _read("deepspeed", _TORCH, environ)
    if _OPEN_MPI.rank in environ:
        return _agreeing_with_torch(_read("mpirun", _OPEN_MPI, environ), _OPEN_MPI, environ)
    if _HYDRA.rank in environ and _HYDRA.local_rank in environ:
        return _agreeing_with_torch(_read("mpirun", _HYDRA, environ), _HYDRA, environ)
    if _SLURM.rank in environ and _SLURM.world_size in environ:
        # A batch script has SLURM_PROCID as well; only srun counts the tasks of a step.
        return _agreeing_with_torch(_read("srun", _SLURM, environ), _SLURM, environ)
    if _HYDRA.rank in environ:
        return _agreeing_with_torch(_read("mpirun", _HYDRA, environ), _HYDRA, environ)
    if any(name in environ for name in (_TORCH.rank, _TORCH.local_rank, _TORCH.world_size)):
        return _read("environment", _TORCH, environ)
    return World(rank=0, local_rank=0, world_size=1, launcher="single")


def _read(launcher: Launcher, names: _Names, environ: Mapping[str, str]) -> World:
    values = {}
    for name in (names.rank, names.local_rank, names.world_size):
        text = environ.get(name)
        if text is None:
            raise ValueError(
                f"environment: {name} is not set although {_present(names, environ)}; "
                f"set {names.rank}, {names.local_rank} and {names.world_size}, or none of them"
            )
        if not text.isdecimal():
            raise ValueError(f"environment: {name}={text!r} is not a number; it must be 0, 1, 2, ...")
        values[name] = int(text)
    world = World(values[names.rank], values[names.local_rank], values[names.world_size], launcher)
    if world.world_size < 1:
        raise ValueError(f"environment: {names.world_size}=0; a world has at least one rank")
    for name, rank in ((names.rank, world.rank), (names.local_rank, world.local_rank)):
        if rank >= world.world_size:
            raise ValueError(
                f"environment: {name}={rank} but {names.world_size}={world.world_size}; "
                f"{name} must lie between 0 and {world.world_size - 1}"
            )
    return world


def _present(names: _Names, environ: Mapping[str, str]) -> str:
    present = [name for name in (names.rank, names.local_rank, names.world_size) if name in environ]
    return " and ".join(f"{name}={environ[name]}" for name in present)


def _agreeing_with_torch(world: World, names: _Names, environ: Mapping[str, str]) -> World:
    """`world`, unless torch's variables are set too and say otherwise: a leftover of another launch."""
    for theirs, ours, value in (
        (_TORCH.rank, names.rank, world.rank),
        (_TORCH.local_rank, names.local_rank, world.local_rank),
        (_TORCH.world_size, names.world_size, world.world_size),
    ):
        if environ.get(theirs, str(value)) != str(value):
            raise ValueError(
                f"environment: {theirs}={environ[theirs]} but {ours}={value} under {world.launcher}; "
                f"unset {theirs} (it is set for you)"
            )
    return world


def local_device(world: World, devices: int) -> int:
    """Which GPU is this process's; a launcher may show each process its own alone. Raises ValueError."""
    if devices == 1:
        return 0
    if world.local_rank >= devices:
        raise ValueError(
            f"rank {world.rank}: local rank {world.local_rank}, but this host has {devices} GPUs; start one "
            "process per GPU"
        )
    return world.local_rank


def ranks_on_this_host() -> int:
    """A collective over all ranks, for the start only."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return names.count(socket.gethostname())


def join(world: World, backend: str) -> None:
    """Make torch.distributed's default group over `world`, and set the variables that DeepSpeed reads.

    `backend` is "gloo" on the CPU, "cpu:gloo,cuda:nccl" on GPUs. MASTER_ADDR and MASTER_PORT, where the user
    gives them, are kept; under torchrun and deepspeed they are the launcher's. Raises ValueError when the ranks
    cannot be brought together.
    """
    try:
        _join(world, backend)
    except RuntimeError as error:  # a DistError, but not in every torch
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"rank {world.rank} of {world.world_size} cannot join the others ({reason}); is MASTER_PORT free on "
            "rank 0's host, and does MASTER_ADDR lead there?"
        ) from None


def _join(world: World, backend: str) -> None:
    os.environ[_TORCH.rank] = str(world.rank)
    os.environ[_TORCH.local_rank] = str(world.local_rank)
    os.environ[_TORCH.world_size] = str(world.world_size)
    if world.launcher in ("torchrun", "deepspeed", "environment"):
        dist.init_process_group(backend, timeout=_PATIENCE)
        return
    if world.launcher in ("mpirun", "srun") and _mpi_world_fits(world):
        store = _store_found_by_mpi(world)
    elif world.world_size == 1:
        store = dist.TCPStore(_LOCAL_HOST, 0, 1, is_master=True, timeout=_PATIENCE)
    else:
        store = _store_found_by_name(world)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = store.host, str(store.port)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.world_size, timeout=_PATIENCE
    )


def _mpi_world_fits(world: World) -> bool:
    """Whether MPI connects exactly the ranks of `world`.

    Raises ValueError when the launcher says so but MPI itself does not: mpi4py then runs on another MPI
    library than the one mpirun belongs to, and every process believes to be alone.
    """
    if not mpi.mpi_available() or mpi.mpi_world_size() != world.world_size:
        return False
    size = mpi.started_world_size()
    if size != world.world_size:
        raise ValueError(
            f"{world.launcher} started {world.world_size} ranks but MPI sees a world of {size}: mpi4py runs "
            f"on {mpi.mpi_library()}; use the mpirun of that library, or install mpi4py for yours"
        )
    return True


def _store_found_by_mpi(world: World) -> dist.TCPStore:
    """Rank 0 opens a store on a port that the system picks, so none is taken twice, and tells the others."""
    same_host = len(set(mpi.share_with_all(socket.gethostname()))) == 1
    if world.rank == 0:
        address = os.environ.get("MASTER_ADDR") or (_LOCAL_HOST if same_host else _reachable_address())
        store = _serve(world, address, int(os.environ.get("MASTER_PORT", "0")))
        mpi.share_with_all(f"{address} {store.port}")
        return store
    address, port = mpi.share_with_all("")[0].split()
    return _connect(world, address, int(port))


def _store_found_by_name(world: World) -> dist.TCPStore:
    """Without MPI every rank works out alone where rank 0 is: from MASTER_*, or from Slurm's job."""
    address = os.environ.get("MASTER_ADDR") or _first_slurm_host(world)
    job, step = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_STEP_ID", "0")
    # Below the ports that systems hand out by themselves; jobs that share a host get different ones.
    derived = 15000 + (int(job) * 31 + int(step)) % 15000
    port = int(os.environ.get("MASTER_PORT", derived))
    return _serve(world, address, port) if world.rank == 0 else _connect(world, address, port)


def _serve(world: World, address: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(
        address, port, world.world_size, is_master=True, timeout=_PATIENCE, wait_for_workers=False
    )


def _connect(world: World, address: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(
        address, port, world.world_size, is_master=False, timeout=_PATIENCE, wait_for_workers=False
    )


def _first_slurm_host(world: World) -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST")
    if world.launcher != "srun" or not nodes:
        raise ValueError(
            f"rank {world.rank} of {world.world_size} under {world.launcher} cannot find rank 0: MPI does "
            f"not connect these ranks and MASTER_ADDR is not set; export MASTER_ADDR, the host of rank 0"
        )
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        listing = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"`{' '.join(command)}` failed ({error}); export MASTER_ADDR, the host of rank 0, before srun"
        ) from None
    return listing.stdout.split()[0]


def _reachable_address() -> str:
    """An address of this host that other hosts can use, as far as this host can tell; else its name."""
    name = socket.gethostname()
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)]
    except OSError:
        found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))  # sends nothing: only asks which interface leads outside
            found.append(probe.getsockname()[0])
        except OSError:
            pass  # a host without a default route still has its name
    return next((address for address in found if not ipaddress.ip_address(address).is_loopback), name)


def choose_transport(kind: Literal["auto", "mpi", "torch"], world: World) -> Transport:
    """The transport for the exchange; every rank calls this after `join`, at the same place.

    "auto" is MPI where the launcher connected all ranks by MPI, else torch. Raises ValueError when "mpi" is
    asked for and MPI does not connect the ranks of `world`.
    """
    if kind not in ("auto", "mpi", "torch"):
        raise ValueError(f'transport "{kind}" is unknown; it must be "auto", "mpi" or "torch"')
    if kind == "torch":
        return TorchTransport()
    if kind == "auto":
        by_mpi = world.launcher in ("mpirun", "srun") and _mpi_world_fits(world)
        return MpiTransport() if by_mpi else TorchTransport()
    if not mpi.mpi_available():
        raise ValueError(
            'transport "mpi" needs mpi4py, which is not installed; use "torch" or install mpi4py'
        )
    size = mpi.mpi_world_size()
    if size == world.world_size:
        size = mpi.started_world_size()
    if size != world.world_size:
        raise ValueError(
            f'transport "mpi": MPI sees a world of {size} but {world.launcher} started {world.world_size} '
            f'ranks; launch with mpirun, or set the transport to "auto" or "torch"'
        )
    return MpiTransport()
