"""Whether the ranks of a host fit into the memory that it has."""

from pathlib import Path

import psutil
import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import fullest_stage

LIBRARIES_BYTES = 600_000_000  # of a rank on a CPU, that it shares with no other: measured, 0.55 GB
_CGROUPS = Path("/sys/fs/cgroup")


def shortage(
    config: RunConfig,
    architecture: Architecture,
    topology: Topology,
    ranks: int,
    sharing: int = 1,
    started: bool = False,
) -> str | None:
    """What a person should know where memory is short, in one line; None where there is enough.

    The fullest stage counts for all ranks.

    Args:
        ranks: of this host.
        sharing: ranks of a GPU, where there are any.
        started: whether they are there already: what they have now is not needed again.
    """
    memory = fullest_stage(config, architecture, topology)[2]
    there = psutil.Process().memory_info().rss if started else 0
    on_host = memory.host_bytes + max(0, LIBRARIES_BYTES - there)
    if torch.cuda.is_available():
        needed, free = sharing * memory.device_bytes, torch.cuda.mem_get_info()[0]
        if needed > free:
            return _short(sharing, "a GPU", needed, free, "training may fail for want of it")
    else:
        on_host += memory.device_bytes
    needed, free = ranks * on_host, available_bytes()
    return _short(ranks, "this host", needed, free, "the system may kill one") if needed > free else None


def _short(ranks: int, where: str, needed: int, free: int, then: str) -> str:
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return (
        f"memory for {who} on {where}: some {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB available; {then}. "
        "The command plan shows what needs it"
    )


def shortage_of_all(config: RunConfig, architecture: Architecture, topology: Topology) -> str | None:
    """The same, if all ranks are started on this machine."""
    ranks, devices = topology.world_size, max(1, torch.cuda.device_count())
    return shortage(config, architecture, topology, ranks, -(-ranks // devices))


def available_bytes() -> int:
    """Memory that this process and its neighbours can still take: of the host, or of its cgroup (version 2)."""
    free = int(psutil.virtual_memory().available)
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
    except OSError:
        return free
    folder = _CGROUPS / own.lstrip("/")
    for group in (folder, *folder.parents):
        if group.is_relative_to(_CGROUPS):
            free = min(free, _left_in(group, free))
    return free


def _left_in(group: Path, free: int) -> int:
    """`free` where it has no limit. What it can give back, files that nobody has used lately, is not taken."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return free
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):
        return free
    return max(0, int(limit) - used)
