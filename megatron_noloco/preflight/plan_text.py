"""The lines and tables of `plan`."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from megatron_noloco.config import RunConfig
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of
from megatron_noloco.monitor.figures import megabytes, percent
from megatron_noloco.preflight.accelerators import Accelerator
from megatron_noloco.preflight.fit import changes_that_save
from megatron_noloco.preflight.memory import USABLE
from megatron_noloco.preflight.plan import Plan, PreemptionCost
from megatron_noloco.preflight.schemes import NEGLIGIBLE
from megatron_noloco.settings import TCP

# Calls of a round of few weights, and of so many more; on a local S3 server (python -m tools.bench federation). A
# store that takes no time got up to half as many more: what waits for a write shares the next file.
_WRITES, _READS, _CALLS_OF_WEIGHTS, _WEIGHTS = 5, 7, 3, 4e6


def fits(plan: Plan, accelerator: Accelerator) -> bool:
    """Return whether a rank fits into the memory of an accelerator."""
    return plan.memory.gpu_bytes / 1e9 <= USABLE * accelerator.gigabytes


def memory_lines(plan: Plan) -> Iterator[str]:
    """Yield the memory of the rank that needs most."""
    topology, memory = plan.topology, plan.memory
    yield (
        f"{topology.in_words(topology.replicas)}; a rank of stage {memory.held.stage}, which needs most, has "
        f"{memory.held.parameters:,} weights and exchanges {memory.held.owned:,}"
    )
    yield ""
    small = memory.device_bytes < 1e9
    shown = megabytes if small else _gigabytes
    yield _table(
        ("memory of this rank", "MB" if small else "GB"),
        [
            *((part, shown(size)) for part, size in memory.device.items() if size),
            ("total on its device", shown(memory.device_bytes)),
            ("beside it on a GPU, NCCL", shown(memory.nccl)),
            *((f"{part}, in host memory", shown(size)) for part, size in memory.host.items()),
        ],
    )


def fit_lines(
    plan: Plan, config: RunConfig, architecture: Architecture, accelerator: Accelerator
) -> Iterator[str]:
    """Yield whether a rank fits, and what would help."""
    name, size = accelerator.words, accelerator.gigabytes
    yield ""
    if fits(plan, accelerator):
        yield f"fits {name} of {size:g} GB; libraries and the allocator take some GB besides"
        return
    yield f"too much for {name} of {size:g} GB, of which libraries and the allocator take a tenth"
    rows = [
        (change, str(ranks), _gigabytes(needed))
        for change, ranks, needed in changes_that_save(config, architecture, plan.topology)
    ]
    if rows:
        yield "Changes that help:"
        yield _table(("change", "ranks of a replica", "GB"), rows)


def folder_lines(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    """Yield the requests of a round where jobs have no port, and exchange through a folder or a bucket."""
    place = config.federation.rendezvous or TCP
    if config.federation.listen == "off" and not place.startswith(TCP):
        more = _CALLS_OF_WEIGHTS * math.ceil(table_of(architecture).exported_count / _WEIGHTS)
        yield ""
        calls = f"about {_WRITES + more} writes, {_READS + more} reads, and up to 10 lists a second"
        yield f"a round through {place} has {calls}"
        yield "    the seconds of this plan leave them out; `megatron-noloco doctor --rendezvous URL` times them"


def time_lines(plan: Plan, on_gpu: bool) -> Iterator[str]:
    """Yield the times of a step and of a round, and the table of schemes."""
    step, network = plan.step_seconds, plan.network
    if step is not None:
        yield ""
        yield f"a local step computes for {step:.3g} s"
    if plan.round_core_seconds and plan.topology.total_replicas != 1:
        seconds = f"{plan.round_core_seconds:.2g}"
        yield f"a round takes {seconds} s of one core of the host, less if a rank has more cores"
        if on_gpu:
            to_host, to_gpu = map(megabytes, plan.bus_bytes)
            yield f"    and moves {to_host} MB from the GPU to the host, {to_gpu} MB back"
    if plan.gathered_bytes:
        yield (
            f"rank 0 of a replica exchanges for all of its ranks: in a round they send it "
            f"{megabytes(plan.gathered_bytes)} MB, and get back as much"
        )
    if network is not None and network.ranks_per_node > 1:
        yield f"{network.ranks_per_node} ranks share a node's link (--gpus-per-node)"
    if plan.routed_bytes:
        yield f"routing sends {megabytes(plan.routed_bytes)} MB of each replica to others in a local step"
    if plan.routed_seconds is not None:
        without = "" if not _routing_decides(plan) else ", more than any number of local steps makes up for"
        yield f'    which takes {plan.routed_seconds:.3g} s here{without}; noloco.routing "off" saves it'
    yield from _scheme_lines(plan)


def _routing_decides(plan: Plan) -> bool:
    """Return whether routing alone takes more of the time than exchanges should."""
    step, routed = plan.step_seconds, plan.routed_seconds
    return bool(step and routed and routed > NEGLIGIBLE * (step + routed))


def _scheme_lines(plan: Plan) -> Iterator[str]:
    step = plan.step_seconds
    if not plan.schemes:
        if plan.network is not None:
            yield ""
            yield "nothing is exchanged: there is one replica"
        return
    head = ["", "every", f"MB per {'replica' if plan.topology.separate_jobs else 'rank'}", "seconds"]
    across = any(scheme.bytes_across is not None for scheme in plan.schemes)
    head += ["MB from site to site"] * across
    head += [] if step is None else ["time lost", "< 1 % from k ="]
    rows = []
    for scheme in plan.schemes:
        row = [scheme.name, str(scheme.local_steps)]
        row += [megabytes(scheme.bytes_per_exchange), f"{scheme.seconds_per_exchange:.3g}"]
        if across:
            row.append("" if scheme.bytes_across is None else megabytes(scheme.bytes_across))
        if step is not None:
            has_none = scheme.name == "synchronous" or _routing_decides(plan)
            enough = "" if has_none else f"{scheme.enough_steps(step):,}"
            row += [percent(plan.share_lost(scheme, step)), enough]
        rows.append(row)
    yield ""
    yield _table(head, rows)


def departure_lines(
    departures: Sequence[PreemptionCost], notice: float, leave_seconds: float
) -> Iterator[str]:
    """Yield the costs of machines that are taken away, without notice and with seconds of notice."""
    rows = [
        (name, f"{found.lost_steps:.2f}", percent(found.share_lost))
        for name, found in zip(("without notice", f"{notice:g} s of notice"), departures, strict=True)
        if name == "without notice" or notice
    ]
    yield ""
    yield _table(("machines that are taken away", "local steps lost each time", "of all local steps"), rows)
    if notice > leave_seconds:
        yield f"of the notice federation.leave_seconds uses {leave_seconds:g} s"
    yield f"a replica that comes back without its disk takes over {megabytes(departures[0].state_bytes)} MB"


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
