"""Reads the environment variables of launchers; no other file names them."""

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_noloco.errors import UserError

Launcher = Literal["single", "torchrun", "deepspeed", "environment", "mpirun", "srun"]
Environ = Mapping[str, str]


@dataclass(frozen=True)
class World:
    """Places one process in its job.

    Attributes:
        launcher: "environment" is an unknown one that sets torch's variables.
    """

    rank: int
    local_rank: int
    world_size: int
    launcher: Launcher

    @property
    def place(self) -> tuple[int, int, int]:
        """Rank, local rank and world size, in the order of `_Names`."""
        return self.rank, self.local_rank, self.world_size


class _Names(NamedTuple):
    """Names the environment variables in which a launcher writes a process's place."""

    rank: str
    local_rank: str
    world_size: str


_TORCH = _Names("RANK", "LOCAL_RANK", "WORLD_SIZE")
_OPEN_MPI = _Names("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
_HYDRA = _Names("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE")  # MPICH and Intel MPI
_SLURM = _Names("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
_LAST_PORT = 65535
# The variable in which `join` gives a job the command that starts it again
STARTS_AGAIN = "NOLOCO_STARTS_AGAIN"
# Launcher, its variables, and those whose presence identifies it. Launchers nest (srun starts mpirun's daemons,
# mpirun may start torchrun), so the order is from the innermost to the outermost.
_LAUNCHERS: tuple[tuple[Launcher, _Names, tuple[str, ...]], ...] = (
    ("torchrun", _TORCH, ("TORCHELASTIC_RUN_ID",)),
    ("deepspeed", _TORCH, ("CROSS_RANK", "LOCAL_SIZE")),  # only its own launcher sets these
    ("mpirun", _OPEN_MPI, (_OPEN_MPI.rank,)),
    ("mpirun", _HYDRA, (_HYDRA.rank, _HYDRA.local_rank)),
    # A batch script has SLURM_PROCID as well; only srun counts the tasks of a step.
    ("srun", _SLURM, (_SLURM.rank, _SLURM.world_size)),
    ("mpirun", _HYDRA, (_HYDRA.rank,)),
    *(("environment", _TORCH, (name,)) for name in _TORCH),
)


def read_world(environ: Environ) -> World:
    """Return the place that the launcher's variables give this process; without any, that of a single process.

    Raises UserError when variables are missing or contradict one another.
    """
    launcher, names = _innermost(environ)
    if launcher == "single":
        return World(rank=0, local_rank=0, world_size=1, launcher=launcher)
    world = _read(launcher, names, environ)
    if names is not _TORCH:
        _check_torch(world, names, environ)
    return world


def _innermost(environ: Environ) -> tuple[Launcher, _Names]:
    """Return the launcher that started this process, and its variables."""
    for launcher, names, identifying in _LAUNCHERS:
        if all(name in environ for name in identifying):
            return launcher, names
    return "single", _TORCH


def _read(launcher: Launcher, names: _Names, environ: Environ) -> World:
    values = {}
    for name in names:
        text = environ.get(name)
        if text is None:
            present = " and ".join(f"{other}={environ[other]}" for other in names if other in environ)
            raise UserError(
                f"environment: {name} is not set although {present}; "
                f"set {names.rank}, {names.local_rank} and {names.world_size}, or none of them"
            )
        if not text.isdecimal():
            raise UserError(f"environment: {name}={text!r} is not a number; it must be 0, 1, 2, ...")
        values[name] = int(text)
    size = values[names.world_size]
    for name in (names.rank, names.local_rank):
        if values[name] >= size:
            raise UserError(
                f"environment: {name}={values[name]} but {names.world_size}={size}; "
                f"{name} must lie between 0 and {size - 1}"
            )
    return World(values[names.rank], values[names.local_rank], size, launcher)


def _check_torch(world: World, names: _Names, environ: Environ) -> None:
    """Raise UserError where torch's variables contradict `world`, left over from another launch."""
    for theirs, ours, value in zip(_TORCH, names, world.place, strict=True):
        if environ.get(theirs, str(value)) != str(value):
            raise UserError(
                f"environment: {theirs}={environ[theirs]} but {ours}={value} under {world.launcher}; "
                f"unset {theirs} (it is set for you)"
            )


def trainer(ranks: int = 1) -> list[str]:
    """Return the command that starts so many ranks of the trainer on this host; arguments of `train` follow it."""
    launcher = ["megatron_noloco.job.torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [sys.executable, "-m", *launcher * (ranks > 1), "megatron_noloco", "train"]


def same_command(environ: Environ) -> str:
    """Return the command that starts a job again, in words; after `join` it is not the one that the user gave."""
    return environ.get(STARTS_AGAIN, "the same command")


def export(world: World, environ: MutableMapping[str, str]) -> None:
    """Set torch's variables, which DeepSpeed reads."""
    environ.update(zip(_TORCH, map(str, world.place), strict=True))


def mpi_world_size(environ: Environ) -> int | None:
    """Return how many ranks MPI connects according to the variables; 1 without an MPI launcher.

    Returns None for a PMIx launcher (`srun --mpi=pmix`), whose variables do not give the number.
    """
    if _innermost(environ)[0] in ("torchrun", "deepspeed"):
        return 1  # mpirun may have started the launcher; its variables then do not describe this process
    for names in (_OPEN_MPI, _HYDRA):
        if names.world_size in environ:
            return int(environ[names.world_size])
    return None if "PMIX_RANK" in environ else 1


def may_be_first(environ: Environ) -> bool:
    """Return whether no variable gives this process a rank above 0; works also where `read_world` fails."""
    return all(rank == "0" for rank in _ranks(environ))


def rank_here(environ: Environ) -> str:
    """Return rank and host in words; works also where `read_world` fails."""
    return f"rank {next(_ranks(environ), '0')} on {socket.gethostname()}"


def _ranks(environ: Environ) -> Iterator[str]:
    """Return this process's rank according to each launcher that gives one."""
    launchers = (_TORCH, _OPEN_MPI, _HYDRA, _SLURM)
    return (environ[names.rank] for names in launchers if names.rank in environ)


def on_a_terminal(environ: Environ) -> bool:
    """Return whether stdout is the user's terminal.

    Open MPI gives every rank a terminal of its own, even where the output of mpirun goes to a file.
    """
    return sys.stdout.isatty() and _OPEN_MPI.rank not in environ


def spared_by_nohup(number: int) -> bool:
    """Return whether this is SIGHUP and ignored, as below nohup: the job is to outlive its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def tell_launch_script(environ: Environ) -> None:
    """Tell `launch/wait.sh` that this rank now handles signals: it counts files in a folder."""
    if folder := environ.get("NOLOCO_LISTENING"):
        Path(folder, str(os.getpid())).touch()


def master_port(environ: Environ) -> int:
    """Return MASTER_PORT; 0, any free one, where it is not set. Raises UserError where it is no port."""
    text = environ.get("MASTER_PORT", "0")
    if not text.isdecimal() or int(text) > _LAST_PORT:
        raise UserError(f"environment: MASTER_PORT={text!r} is not a port; it must be 0 to {_LAST_PORT}")
    return int(text)


def local_device(world: World, devices: int, shared: bool = False) -> int:
    """Return the number of this process's GPU. Raises UserError where the host has too few.

    Args:
        devices: how many GPUs this process sees; a launcher may show each process only its own.
        shared: whether several processes may use one GPU.
    """
    if devices == 1:
        return 0
    if shared:
        return world.local_rank % devices
    if world.local_rank >= devices:
        raise UserError(
            f"rank {world.rank}: local rank {world.local_rank}, but this host has {devices} GPUs; start one "
            "process per GPU"
        )
    return world.local_rank
