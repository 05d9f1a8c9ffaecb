"""Is this machine ready: GPUs, network interfaces and shared memory. `mpi` tests MPI."""

import os
import platform
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from megatron_noloco.errors import UserError
from megatron_noloco.federation.store import Store
from megatron_noloco.settings import TCP

_SHARED_MEMORY = Path("/dev/shm")
_BUFFERS = {f"net.ipv4.{name}": Path("/proc/sys/net/ipv4") / name for name in ("tcp_wmem", "tcp_rmem")}
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_LONG_LINK_BYTES = 5e5  # under way, from which congestion control makes a visible difference
_GB = 1e9

State = Literal["ok", "note", "problem"]


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
    state: State
    what: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        advice = f"\n{'':20}-> {self.advice}" if self.advice else ""
        return f"{self.state:8}{self.area:12}{self.what}{advice}"


def verdict(findings: Sequence[Finding]) -> str:
    """Return what to fix first."""
    for state, found in (("problem", "Fix first"), ("note", "Ready. Improve next")):
        for finding in findings:
            if finding.state == state and finding.advice:
                return f"{found}: {finding.area}: {finding.what}. {finding.advice}"
    return "Ready."


def is_ready(findings: Sequence[Finding]) -> bool:
    """Return whether there is no problem."""
    return all(finding.state != "problem" for finding in findings)


def check_machine(link: tuple[float, float] | None = None, is_separate: bool = False) -> Iterator[Finding]:
    """Report packages, GPUs, network interfaces, shared memory, and buffers for a link.

    Args:
        link: bytes per second, and seconds one way.
        is_separate: whether its job is one of separate jobs, which do not look for hosts by their names.
    """
    yield from check_packages()
    yield from check_gpus()
    yield from check_network(is_separate)
    yield from check_shared_memory()
    if link is not None:
        yield from check_buffers(*link)


def check_folder(url: str) -> Finding:
    """Use a shared folder as a federation does. Raises UserError for a URL that names no folder."""
    if "://" not in url or url.startswith(TCP):
        raise UserError(f"--rendezvous {url}: neither file://FOLDER nor a bucket such as s3://bucket/run")
    try:
        folder = Store.of(url)
        is_new = folder.create()
        seconds = seconds_of_calls(folder)
    except OSError as error:
        advice = "every job must be able to write, list, read and remove files there"
        return Finding("rendezvous", "problem", str(error), advice)
    took = ", ".join(f"{verb} {duration * 1e3:.1f} ms" for verb, duration in seconds.items())
    tried = f"{folder.url}{', made now' * is_new}, a file of 1 MiB: {took}"
    advice = "on each further machine it must be there already: else it is another folder, or not mounted"
    return Finding("rendezvous", "note" if is_new else "ok", tried, advice * is_new, seconds)


def seconds_of_calls(folder: Store) -> dict[str, float]:
    """Write a file, list it, read it and remove it; return the seconds of each. Raises OSError.

    The folder must exist.
    """
    name, content = f"try-{uuid.uuid4().hex}", os.urandom(2**20)
    calls = {
        "write": (lambda: folder.put(name, content), None, ""),
        "list": (lambda: name in folder.names(), True, "not listed"),
        "read": (lambda: folder.get(name, len(content)), content, "read otherwise"),
        "remove": (lambda: folder.remove([name]), None, ""),
    }
    seconds = {}
    try:
        for verb, (call, expected, problem) in calls.items():
            began = time.perf_counter()
            if call() != expected:
                raise OSError(f"a file that was written is {problem} in {folder.url}")
            seconds[verb] = time.perf_counter() - began
    except OSError:
        with suppress(OSError):
            folder.remove([name])
        raise
    return seconds


def check_packages() -> Iterator[Finding]:
    """Report the versions of the engines. Raises ModuleNotFoundError where one is missing."""
    found = [f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed", "megatron-core")]
    yield Finding("packages", "ok", ", ".join([f"Python {platform.python_version()}", *found]))


def check_gpus() -> Iterator[Finding]:
    """Report the GPUs that torch sees."""
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
    elif shutil.which("nvidia-smi"):
        what = f"there is an NVIDIA driver, but torch {torch.__version__} sees no GPU"
        advice = (
            "install torch for the driver's CUDA version (nvidia-smi shows it), see pytorch.org/get-started"
        )
        yield Finding("GPU", "problem", what, advice)
    else:
        yield Finding("GPU", "note", f"none; training runs on {psutil.cpu_count()} CPU cores, over gloo")


def check_network(is_separate: bool) -> Iterator[Finding]:
    """Report the interfaces that reach other hosts, and whether this host's name resolves to one of them."""
    states = psutil.net_if_stats()
    found = {
        name: [
            address.address
            for address in sorted(addresses, key=lambda one: one.family)
            if _leaves_host(address.address)
        ]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    outside = {name: own for name, own in found.items() if own}
    if not outside:
        yield Finding("network", "note", "no interface reaches other hosts: this host can only train alone")
        return
    shown = ", ".join(
        f"{name} {own[0]}" + (f" ({states[name].speed} Mbit/s)" if states[name].speed else "")
        for name, own in outside.items()
    )
    yield Finding("network", "ok", shown)
    if is_separate:
        return
    host = socket.gethostname()
    try:
        resolved = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        resolved = set()
    if not any(resolved & {*own} for own in outside.values()):
        address = ", ".join(sorted(resolved)) or "no address"
        what = f"this host's name, {host}, resolves to {address}: of no use to other hosts"
        address = next(iter(outside.values()))[0]
        advice = f"set MASTER_ADDR for one job on several hosts, such as {address}"
        yield Finding("network", "note", what, advice)
    if len(outside) > 1:
        what = (
            f"{len(outside)} interfaces: gloo takes the one that this host's name resolves to, Open MPI all of "
            "them, NCCL InfiniBand or the first"
        )
        advice = f"NIC={next(iter(outside))} before the launch scripts chooses one for all"
        yield Finding("network", "note", what, advice)


def _leaves_host(address: str) -> bool:
    """Return whether an address of an interface is of IPv4 or IPv6, and known beyond the host and the link."""
    try:
        found = ip_address(address)
    except ValueError:  # that of a network card, or of IPv6 on a link
        return False
    return not found.is_loopback and not (found.version == 6 and found.is_link_local)


def check_buffers(bytes_per_second: float, latency: float) -> Iterator[Finding]:
    """Report whether the kernel lets a TCP connection fill a link.

    What is under way in a round trip waits in a buffer on both sides until it is acknowledged. Most kinds of
    congestion control take a lost packet for a full link, and begin slowly after the pause between two rounds.
    BBR does neither (Cardwell et al., "BBR: Congestion-based congestion control", ACM Queue 14(5), 2016).

    Args:
        latency: seconds, one way.
    """
    under_way = bytes_per_second * 2 * latency
    control = _CONGESTION.read_text().strip() if _CONGESTION.exists() else "bbr"
    if under_way >= _LONG_LINK_BYTES and not control.startswith("bbr"):
        what = f"TCP: its congestion control, {control}, is slow on this link after pauses and lost packets"
        yield Finding("network", "note", what, "sysctl -w net.ipv4.tcp_congestion_control=bbr")
    limits = {name: int(path.read_text().split()[2]) for name, path in _BUFFERS.items() if path.exists()}
    if not limits:
        return
    # The kernel keeps about half of a receiver's buffer for its own accounting (tcp_adv_win_scale 1).
    name, usable = min(
        ((name, limit / 2 if "rmem" in name else limit) for name, limit in limits.items()),
        key=lambda one: one[1],
    )
    what = (
        f"TCP: {under_way / 1e6:.1f} MB are under way on this link; {name} lets one connection have "
        f"{usable / 1e6:.1f}"
    )
    if usable >= under_way:
        yield Finding("network", "ok", what)
        return
    yield Finding("network", "note", what, f"raise the last number of {', '.join(limits)}")


def check_shared_memory() -> Iterator[Finding]:
    """Report a container's small shared memory. The ranks of a host need it, a single rank does not."""
    if _SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(_SHARED_MEMORY).free) < _GB:
        what = f"{free / 1e6:.0f} MB free in {_SHARED_MEMORY}: the ranks of a host pass messages through it"
        state: State = "problem" if torch.cuda.device_count() > 1 else "note"
        yield Finding("limits", state, what, "start the container with --shm-size=8g or --ipc=host")
