"""What a run needs: memory of a rank, seconds of a local step, exchanges in its way and in others."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_noloco.config import RunConfig
from megatron_noloco.data.auto_tokenizer import build_tokenizer
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of, training_flops
from megatron_noloco.monitor.figures import megabytes, percent
from megatron_noloco.outer.vectors import BUCKET
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import Memory, fullest_stage, parameters_of_stages
from megatron_noloco.preflight.schemes import Network, Scheme, schemes
from megatron_noloco.settings import TCP

USABLE = 0.9  # of a GPU's memory; libraries, NCCL and the allocator take the rest


@dataclass(frozen=True)
class Plan:
    """The needs of a run.

    Attributes:
        memory: the memory of a rank of the pipeline stage whose ranks need most.
        step_seconds: seconds of a local step without exchanges; None: not known.
        schemes: the config's own scheme, then others in its place; empty where the network is not known.
    """

    topology: Topology
    memory: Memory
    step_seconds: float | None
    schemes: list[Scheme]

    def as_json(self) -> dict[str, Any]:
        """Return the plan for scripts."""
        return {
            "ranks": self.topology.world_size,
            "replicas": self.topology.total_replicas,
            "stage": self.memory.held.stage,
            "weights_of_rank": asdict(self.memory.held),
            "memory_bytes": self.memory.device,
            "host_memory_bytes": self.memory.host,
            "step_seconds": self.step_seconds,
            "ways": [asdict(scheme) | self._lost(scheme) for scheme in self.schemes],
        }

    def _lost(self, scheme: Scheme) -> dict[str, float]:
        step = self.step_seconds
        if step is None:
            return {}
        return {"share_lost": scheme.share_lost(step), "enough_steps": scheme.enough_steps(step)}


def architecture_of_run(config: RunConfig) -> Architecture:
    """Return the model of a config; the tokenizer is read only where its vocabulary decides. Raises UserError."""
    known = config.model.vocab_size is not None
    return config.architecture(0 if known else build_tokenizer(config.data.tokenizer).vocab_size)


def plan_of(
    config: RunConfig,
    architecture: Architecture,
    topology: Topology,
    network: Network | None = None,
    step_seconds: float | None = None,
) -> Plan:
    """Return the plan of a run.

    Args:
        step_seconds: seconds of a local step, if they are known.
    """
    largest = max(parameters_of_stages(config, architecture, topology), key=lambda each: each.owned)
    if topology.separate_jobs:  # the table counts bytes of a replica; its leader exchanges for all its ranks
        table = table_of(architecture)
        largest = replace(largest, parameters=table.parameter_count, owned=table.exported_count, copied=0)
        if network is not None:
            replicas_of_node = max(1, network.ranks_per_node // topology.replica_size)
            network = replace(network, ranks_per_node=replicas_of_node)
    found = [] if network is None else schemes(config, topology, largest, network, step_seconds)
    return Plan(topology, fullest_stage(config, architecture, topology), step_seconds, found)


def computing_seconds(
    config: RunConfig, architecture: Architecture, tflops: float, utilisation: float
) -> float:
    """Return the seconds of a local step: its floating-point operations, shared by the ranks of a replica.

    Args:
        tflops: peak of a rank's device.
        utilisation: share of the peak that is reached (MFU).
    """
    flops = config.replica_batch * training_flops(architecture)
    return flops / (config.parallel.replica_size * tflops * 1e12 * utilisation)


def fits(memory: Memory, gigabytes: float) -> bool:
    """Return whether a rank fits into the memory of a GPU."""
    return memory.device_bytes / 1e9 <= USABLE * gigabytes


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the layout and memory, then the time of a step and the table of schemes, as far as they are known."""
    topology, held, step = plan.topology, plan.memory.held, plan.step_seconds
    yield (
        f"{topology.in_words(topology.replicas)}; a rank of stage {held.stage}, which needs most, has "
        f"{held.parameters:,} weights and exchanges {held.owned:,}"
    )
    yield from ("", memory_table(plan.memory))
    if step is not None:
        yield from ("", f"a local step computes for {step:.3g} s")
    if not plan.schemes:
        return
    head = ["", "every", f"MB per {'replica' if topology.separate_jobs else 'rank'}", "seconds"]
    head += [] if step is None else ["time lost", "< 1 % from k ="]
    rows = []
    for scheme in plan.schemes:
        row = [scheme.name, str(scheme.local_steps)]
        row += [megabytes(scheme.bytes_per_exchange), f"{scheme.seconds_per_exchange:.3g}"]
        if step is not None:
            enough = "" if scheme.name.startswith(("sync", "routing")) else f"{scheme.enough_steps(step):,}"
            row += [percent(scheme.share_lost(step)), enough]
        rows.append(row)
    yield from ("", _table(head, rows))


def memory_table(memory: Memory, more: Sequence[tuple[str, int]] = ()) -> str:
    """Return the memory of a rank by part, with rows below it."""
    small = memory.device_bytes < 1e9
    rows = [*memory.device.items(), ("total on its device", memory.device_bytes)]
    rows += [("outer state, in host memory", memory.host), *more]
    shown = megabytes if small else _gigabytes
    head = ("memory of this rank", "MB" if small else "GB")
    return _table(head, [(part, shown(size)) for part, size in rows if size])


def fit_line(memory: Memory, gigabytes: float) -> str:
    """Return whether a rank fits into the memory of a GPU, in words."""
    rest = "libraries, NCCL and the allocator take a tenth"
    return (
        f"{'fits' if fits(memory, gigabytes) else 'does not fit'} a GPU of {gigabytes:g} GB, of which {rest}"
    )


def folder_lines(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    """Yield the requests of a round where jobs have no port, and exchange through a folder or a bucket."""
    place = config.federation.rendezvous or TCP
    if config.federation.listen == "off" and not place.startswith(TCP):
        buckets = math.ceil(table_of(architecture).exported_count / BUCKET)
        # As on a local S3 server (python -m tools.bench federation): sketches and codes are files of their own.
        writes, reads = (2, 1) if config.noloco.payload == "fp32" else (5, 4)
        calls = (
            f"about {1 + writes * buckets} writes, {1 + reads * buckets} reads, and up to 5 lists a second"
        )
        yield f"a round through {place} has {calls}"
        yield "    stores charge some 12 times as much for a write or a list (class A) as for a read (class B)"
        yield "    the seconds of this plan leave them out; `megatron-noloco doctor --rendezvous URL` times them"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, title in enumerate(head):
        table.add_column(title, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(width=140, highlight=False, no_color=True)
    with console.capture() as written:
        console.print(table)
    return written.get().rstrip("\n")


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.3f}"
