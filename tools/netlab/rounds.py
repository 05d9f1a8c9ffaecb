"""How long a round takes on a slow network, and all-reduces of the same vector."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.netlab.lab import NIC, REPOSITORY, Lab, Tcp, lab
from tools.netlab.network import Link

_SECONDS = 600.0  # for all repeats of one way


class Launch(NamedTuple):
    """A way of `rank`, and options of mpirun for it."""

    way: str
    options: tuple[str, ...] = ()


def _algorithm(number: int) -> Launch:
    choice = ("coll_tuned_use_dynamic_rules", "1", "coll_tuned_allreduce_algorithm", str(number))
    return Launch("allreduce", ("--mca", *choice[:2], "--mca", *choice[2:]))


LAUNCHES = {
    "round": Launch("round"),
    "exchange of new partners": Launch("new partners"),
    "MPI_Allreduce": Launch("allreduce"),
    "MPI_Allreduce, ring": _algorithm(4),
    "MPI_Allreduce, recursive doubling": _algorithm(3),
    "MPI_Allreduce, tree": _algorithm(2),  # a reduction to one rank, and a broadcast
    "gloo all_reduce": Launch("gloo"),
}


def measure(
    hosts: Sequence[int], link: Link, ways: Sequence[str], length: int, repeats: int, pause_seconds: float,
    options: Sequence[str], tcp: Tcp,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row per number of hosts and way: seconds of the mean and of the slowest rank, medians over the repeats.

    Args:
        length: bytes of the fp32 vector.
        repeats: of which the first is left out.
        pause_seconds: of silence before each.
        options: more options of mpirun.

    Raises LabUnavailableError, and RuntimeError with what mpirun said when it fails.
    """
    for number in hosts:
        for way in ways:
            with (
                tempfile.TemporaryDirectory() as folder,
                lab(Path(folder), [link] * number, tcp=tcp) as there,
            ):
                arguments = [str(length), str(repeats), str(pause_seconds), folder]
                figures = mpirun(there, LAUNCHES[way], arguments, options)
            yield {"hosts": number, "way": way, **figures}


def mpirun(there: Lab, launch: Launch, arguments: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Run `rank` on each host; what it printed."""
    environ = {
        **os.environ, **there.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "GLOO_SOCKET_IFNAME": NIC, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    command = there.on(
        there.names[0], str(Path(sys.executable).parent / "mpirun"), "--hostfile", str(there.hostfile),
        "-n", str(len(there.names)), "--bind-to", "none",
        "--mca", "mpi_yield_when_idle", "1", "--mca", "pml", "ob1", "--mca", "btl", "tcp,self",
        "--mca", "btl_tcp_if_include", NIC, "-x", "PYTHONPATH", "-x", "GLOO_SOCKET_IFNAME",
        "-x", "OMP_NUM_THREADS",
        *options, *launch.options, sys.executable, "-m", "tools.netlab.rank", launch.way, *arguments,
    )  # fmt: skip
    finished = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_SECONDS)
    if finished.returncode:
        raise RuntimeError(f"mpirun ended with exit code {finished.returncode}:\n{finished.stderr}")
    figures: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return figures
