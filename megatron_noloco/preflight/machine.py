"""Accelerators, network interfaces and limits of this machine."""

import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from megatron_noloco.preflight.finding import Finding

_SHARED_MEMORY = Path("/dev/shm")
_FEW_FILES = 4096
_GB = 1e9
_PATIENCE_SECONDS = 20.0


def check_accelerators() -> Iterator[Finding]:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
        memory = min(torch.cuda.mem_get_info(device)[1] for device in range(len(names)))
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        software = f"{driver()}CUDA {torch.version.cuda}, NCCL {nccl}"
        yield Finding("GPU", "ok", f"{len(names)} x {names[0]}, {memory / _GB:.0f} GB, {software}")
        if len(set(names)) > 1:
            yield Finding(
                "GPU", "note", f"they differ: {', '.join(names)}", "the slowest sets the pace of a replica"
            )
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            yield Finding("GPU", "note", "it computes no bf16", 'use "fp16": {"enabled": true}')
    elif shutil.which("nvidia-smi"):
        yield Finding(
            "GPU",
            "problem",
            f"there is an NVIDIA driver, but torch {torch.__version__} sees no GPU",
            "install torch for the driver's CUDA version (nvidia-smi shows it), see pytorch.org/get-started",
        )
    else:
        yield Finding("GPU", "note", f"none; training runs on {psutil.cpu_count()} CPU cores, over gloo")


def driver() -> str:
    """Such as "driver 570.86, "; empty where nvidia-smi does not tell."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(
            asked, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"driver {told.splitlines()[0].strip()}, " if told.strip() else ""


def check_network() -> Iterator[Finding]:
    """The interfaces that lead outside, and the one to which this host's name leads."""
    states = psutil.net_if_stats()
    found = {
        name: [address.address for address in addresses if address.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    outside = {name: own for name, own in found.items() if own and not own[0].startswith("127.")}
    if not outside:
        yield Finding("network", "note", "no interface leads outside: this host can only train alone")
        return
    shown = ", ".join(
        f"{name} {own[0]}" + (f" ({states[name].speed} Mbit/s)" if states[name].speed else "")
        for name, own in outside.items()
    )
    yield Finding("network", "ok", shown)
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    if not any(address in own for own in outside.values()):
        yield Finding(
            "network",
            "note",
            f"this host's name, {socket.gethostname()}, leads to {address or 'nothing'}: no use for other hosts",
            f"set MASTER_ADDR for several hosts, such as {next(iter(outside.values()))[0]}",
        )
    if len(outside) > 1:
        yield Finding(
            "network",
            "note",
            f"{len(outside)} interfaces: gloo takes the one that this host's name leads to, Open MPI all of them, "
            "NCCL InfiniBand or the first",
            f"NIC={next(iter(outside))} before the launch scripts chooses for all",
        )


def check_limits() -> Iterator[Finding]:
    if _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        yield (
            Finding("limits", "ok", f"{free / _GB:.1f} GB free in {_SHARED_MEMORY}")
            if free > _GB
            else Finding(
                "limits",
                "problem",
                f"{free / 1e6:.0f} MB free in {_SHARED_MEMORY}: MPI and NCCL pass messages through it",
                "start the container with --shm-size=8g or --ipc=host",
            )
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        yield Finding(
            "limits", "note", f"{files} open files: too few for some hundred ranks", "ulimit -n 65536"
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").exists() and locked != resource.RLIM_INFINITY:
        yield Finding(
            "limits",
            "problem",
            f"{locked // 1024} KB of memory may be locked: InfiniBand needs more",
            "ulimit -l unlimited, in /etc/security/limits.conf or Slurm's LimitMEMLOCK",
        )
