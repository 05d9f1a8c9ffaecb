"""Does a run fit: into this machine, now; and which changes of the config would save memory where it does not."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.config.deepspeed_block import MICRO, STEPS, TRAIN
from megatron_noloco.errors import UserError
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import fullest_stage

# Memory of a rank on a CPU that it shares with no other rank: measured, 0.55 GB.
LIBRARIES_BYTES = 600_000_000
_CGROUPS = Path("/sys/fs/cgroup")


def shortage(
    config: RunConfig,
    architecture: Architecture,
    topology: Topology,
    ranks: int,
    sharing: int = 1,
    started: bool = False,
) -> str | None:
    """Return one line that says where memory is short; None where there is enough.

    All ranks count as ranks of the stage that needs most.

    Args:
        ranks: number of ranks on this host.
        sharing: number of ranks that share a GPU, where there are GPUs.
        started: whether the ranks run already; what they have now is then not needed again.
    """
    memory = fullest_stage(config, architecture, topology)
    present = psutil.Process().memory_info().rss if started else 0
    on_host = memory.host_bytes + max(0, LIBRARIES_BYTES - present)
    if torch.cuda.is_available():
        needed, free = sharing * memory.gpu_bytes, torch.cuda.mem_get_info()[0]
        on_host += memory.saved_bytes
        if needed > free:
            return _short(sharing, "a GPU", needed, free, "training may run out of it")
    else:
        on_host += memory.device_bytes
    needed, free = ranks * on_host, available_bytes()
    return _short(ranks, "this host", needed, free, "the kernel may kill a rank") if needed > free else None


def _short(ranks: int, where: str, needed: int, free: int, risk: str) -> str:
    return (
        f"memory for {ranks} rank{'s' * (ranks > 1)} on {where}: about {needed / 1e9:.1f} GB needed, "
        f"{free / 1e9:.1f} GB available; {risk}. The command plan lists what needs it"
    )


def shortage_of_all(config: RunConfig, architecture: Architecture, topology: Topology) -> str | None:
    """Return `shortage` for all ranks of the run on this machine."""
    ranks, devices = topology.world_size, max(1, torch.cuda.device_count())
    return shortage(config, architecture, topology, ranks, -(-ranks // devices))


def available_bytes() -> int:
    """Return the memory that is free on the host, or in this process's cgroup (version 2) where that is less."""
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
    """Return the bytes left in a cgroup, `free` where it has no limit. Cached files count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return free
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):
        return free
    return max(0, int(limit) - used)


def changes_that_save(
    config: RunConfig, architecture: Architecture, topology: Topology
) -> Iterator[tuple[str, int, int]]:
    """Yield changes of the config that save GPU memory: the change, ranks of a replica, bytes of the fullest rank.

    Each is a change by itself. Those that the config's checks refuse are left out.
    """
    now = fullest_stage(config, architecture, topology).gpu_bytes
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    changes: list[tuple[str, dict[str, Any]]] = [
        ("noloco", {"slow_weights": "host"}),
        ("model", recompute),
        # Half of an odd microbatch would change the batch.
        *[("", {MICRO: config.micro_batch_size // 2, STEPS: 2 * config.microbatches})]
        * (config.micro_batch_size % 2 == 0),
        ("parallel", {"data_parallel_size": 2 * topology.dp}),
        (
            "parallel",
            {
                "data_parallel_size": math.lcm(topology.dp, 2 * topology.ep),
                "expert_model_parallel_size": 2 * topology.ep,
            },
        ),
        ("parallel", {"pipeline_model_parallel_size": 2 * topology.pp}),
        ("parallel", {"tensor_model_parallel_size": 2 * topology.tp}),
    ]
    # For any number of replicas, of as many microbatches.
    batch = {TRAIN: None, MICRO: config.micro_batch_size, STEPS: config.microbatches}
    config = config.replace(parallel=config.parallel.replace(replicas="auto"), **batch)
    for block, change in changes:
        try:
            changed = config.replace(
                **({block: getattr(config, block).replace(**change)} if block else change)
            )
            layout = changed.topology(topology.replicas * changed.parallel.replica_size)
        except UserError:
            continue
        needed = fullest_stage(changed, architecture, layout).gpu_bytes
        if needed < now:
            fields = (f"{block}.{field} {value}".lstrip(".") for field, value in change.items())
            yield ", ".join(fields), layout.replica_size, needed
