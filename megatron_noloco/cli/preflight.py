"""The commands before a run: `plan`, what it needs, and `doctor`, whether this machine is ready."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_noloco.cli.exit_codes import naming
from megatron_noloco.cli.options import (
    Commands,
    add_command,
    at_least_one,
    at_least_zero,
    bandwidth,
    duration,
    latency,
    rate,
    say,
    share,
)
from megatron_noloco.errors import UserError
from megatron_noloco.job.leaving import FAILURE

if TYPE_CHECKING:
    from megatron_noloco.config import RunConfig
    from megatron_noloco.model.architecture import Architecture
    from megatron_noloco.preflight.accelerators import Accelerator
    from megatron_noloco.preflight.departures import Departures
    from megatron_noloco.preflight.machine import Finding
    from megatron_noloco.preflight.plan import Network, Plan

_JSON = "one JSON object for scripts"
_FINDINGS = """--json prints {"ready": true, "findings": [...]}. A finding has area, state ("ok",
"note" or "problem"), what, advice, and figures; the figures of the exchange are
hosts, library, thread_level, over, latency_seconds, gb_per_second and hidden.
A machine with any problem is not ready."""
_MFU = 0.4
_RANKS_OF_GPU_NODE = 8


def add_commands(commands: Commands) -> None:
    plan = add_command(
        commands,
        "plan",
        "print the memory of a rank, and bytes and seconds of exchanges; starts nothing",
        "plan my-run.json --gpu A100 --bandwidth 1Gbit --latency 25ms",
    )
    add = plan.add_argument
    add("config", help="a config file")
    add("--gpus", type=at_least_one, metavar="N", help="number of ranks (default: the config's)")
    add("--gpu", metavar="NAME", help="such as H100: say whether the run fits and how long a step takes")
    add("--mfu", type=share, help=f"with --gpu: share of its peak that a step reaches (default: {_MFU})")
    add("--step", type=duration, metavar="TIME", help="measured time of a local step, such as 0.3s")
    add("--bandwidth", type=bandwidth, metavar="RATE", help="rate of a node's link, such as 1Gbit")
    add("--latency", type=latency, default=0.0, metavar="TIME", help="delay from node to node, such as 25ms")
    per_node = (
        "ranks that share a link (default: 1; with --gpu 8, or a replica's ranks if the run has at most 8)"
    )
    add("--gpus-per-node", type=at_least_one, metavar="N", help=per_node)
    taken = "how often machines of a federation are taken away, all together, such as 6/h"
    add("--preemptions", type=rate, metavar="RATE", help=taken)
    add(
        "--notice",
        type=latency,
        default=0.0,
        metavar="TIME",
        help="with --preemptions: notice before each of them, such as 30s",
    )
    add("--json", action="store_true", help=_JSON)
    plan.set_defaults(run=_plan)

    doctor = add_command(
        commands,
        "doctor",
        "say whether this machine is ready to train, and what to fix first",
        "doctor",
        _FINDINGS,
    )
    add = doctor.add_argument
    add("--hostfile", type=Path, help="hostfile of mpirun: measure exchanges between its first two hosts")
    seconds = "time for measuring exchanges; 0: do not measure them (default: 10)"
    add("--seconds", type=at_least_zero, default=10.0, help=seconds)
    folder = "folder or bucket of federation.rendezvous: write, list, read and remove a file there"
    add("--rendezvous", metavar="URL", help=folder)
    link = "rate of the link to a partner: say whether TCP's buffers are large enough for it"
    add("--bandwidth", type=bandwidth, metavar="RATE", help=link)
    delay = "with --bandwidth: delay of the link, one way"
    add("--latency", type=latency, default=0.0, metavar="TIME", help=delay)
    add("--json", action="store_true", help=_JSON)
    doctor.set_defaults(run=_doctor)


def _plan(args: argparse.Namespace) -> int:
    from megatron_noloco.config import load_config, resolve
    from megatron_noloco.data.tokenizer import build_tokenizer
    from megatron_noloco.preflight.plan import computing_seconds, plan_of

    if args.mfu is not None and (args.gpu is None or args.step is not None):
        raise UserError("--mfu: estimates the time of a step on the GPU of --gpu; give it without --step")
    config = load_config(args.config)
    ranks = config.world_size if args.gpus is None else args.gpus
    if ranks is None:
        raise UserError(f'{args.config}: parallel.replicas is "auto": give the number of ranks with --gpus')
    if args.gpus is not None:
        config = config.replace(parallel=config.parallel.replace(replicas="auto"))
    with naming(args.config):
        topology = config.topology(ranks)
        config = resolve(config, topology.ensemble).config
        known = config.model.vocab_size is not None
        architecture = config.architecture(0 if known else build_tokenizer(config.data.tokenizer).vocab_size)
    accelerator = None if args.gpu is None else _accelerator(args.gpu)
    step, peak = args.step, None if accelerator is None else accelerator.peak(config.precision)
    if step is None and peak is not None:
        step = computing_seconds(config, architecture, peak, args.mfu or _MFU)
    network = _network(args, ranks, topology.replica_size)
    plan = plan_of(config, architecture, topology, network, step)
    departures = _departures(args, config, architecture, plan, step)
    if args.json:
        more: dict[str, object] = {} if accelerator is None else {"fits": _fits(plan, accelerator)}
        if departures:
            more |= {"without_notice": asdict(departures[0]), "with_notice": asdict(departures[1])}
        say(json.dumps(plan.as_json() | more))
    else:
        _show_memory(plan)
        if accelerator is not None:
            _show_fit(plan, config, architecture, accelerator)
            if step is None:
                say(f"the peak of {accelerator.words} in {config.precision} is not known: give --step")
        _show_time(plan, network, on_gpu=accelerator is not None)
        if network is not None and step is None and config.noloco.most_waiting is not None:
            say("", 'noloco.local_steps "auto": --step or --gpu shows what a run would choose')
        if departures:
            _show_departures(departures, args.notice, config.federation.leave_seconds)
    return 0


def _network(args: argparse.Namespace, ranks: int, replica_size: int) -> "Network | None":
    """Return the links that the options give; raises UserError for options without effect."""
    from megatron_noloco.preflight.plan import Network

    if args.bandwidth is None:
        for option, given in {"--latency": args.latency, "--gpus-per-node": args.gpus_per_node}.items():
            if given:
                raise UserError(f"{option}: give --bandwidth as well; without it exchanges are left out")
        return None
    # Of a job that would fit into one node, the ranks of a replica share a link.
    of_node = _RANKS_OF_GPU_NODE if ranks > _RANKS_OF_GPU_NODE else replica_size
    return Network(args.bandwidth, args.latency, args.gpus_per_node or (of_node if args.gpu else 1))


def _departures(
    args: argparse.Namespace,
    config: "RunConfig",
    architecture: "Architecture",
    plan: "Plan",
    step: float | None,
) -> "list[Departures]":
    """Return the costs of `--preemptions` without and with notice; raises UserError where they are not known."""
    from megatron_noloco.preflight.departures import departures_of

    if args.preemptions is None:
        if args.notice:
            raise UserError("--notice: give --preemptions as well")
        return []
    if step is None or not plan.topology.separate_jobs:
        raise UserError("--preemptions: needs a federation, and the time of a local step (--step or --gpu)")
    costs = (config, architecture, max(2, config.federation.start_with), step, args.preemptions)
    return [departures_of(*costs, notice) for notice in (0.0, args.notice)]


def _accelerator(name: str) -> "Accelerator":
    from megatron_noloco.preflight.accelerators import ACCELERATORS, find_accelerator

    found = find_accelerator(name)
    if found is None:
        known = ", ".join(kind.words for kind in ACCELERATORS)
        raise UserError(f"--gpu {name}: not known; known are {known}. Leave it out, and give --step")
    return found


def _show_memory(plan: "Plan") -> None:
    from megatron_noloco.monitor import figures

    topology, memory = plan.topology, plan.memory
    say(
        f"{topology.in_words(topology.replicas)}; a rank of stage {plan.stage}, which needs most, has "
        f"{plan.held.parameters:,} weights and exchanges {plan.held.owned:,}",
        "",
    )
    small = memory.device_bytes < 1e9
    shown = figures.megabytes if small else _gigabytes
    _table(
        ("memory of this rank", "MB" if small else "GB"),
        [
            *((part, shown(size)) for part, size in memory.device.items() if size),
            ("total on its device", shown(memory.device_bytes)),
            ("beside it on a GPU, NCCL", shown(memory.nccl)),
            *((f"{part}, in host memory", shown(size)) for part, size in memory.host.items()),
        ],
    )


def _show_fit(
    plan: "Plan", config: "RunConfig", architecture: "Architecture", accelerator: "Accelerator"
) -> None:
    from megatron_noloco.preflight.fit import changes_that_save

    name, size = accelerator.words, accelerator.gigabytes
    if _fits(plan, accelerator):
        say("", f"fits {name} of {size:g} GB; libraries and the allocator take some GB besides")
        return
    say("", f"too much for {name} of {size:g} GB, of which libraries and the allocator take a tenth")
    rows = [
        (change, str(ranks), _gigabytes(needed))
        for change, ranks, needed in changes_that_save(config, architecture, plan.topology)
    ]
    if rows:
        say("Changes that help:")
        _table(("change", "ranks of a replica", "GB"), rows)


def _fits(plan: "Plan", accelerator: "Accelerator") -> bool:
    from megatron_noloco.preflight.memory import USABLE

    return plan.memory.gpu_bytes / 1e9 <= USABLE * accelerator.gigabytes


def _show_time(plan: "Plan", network: "Network | None", on_gpu: bool) -> None:
    from megatron_noloco.monitor.figures import megabytes, percent

    step = plan.step_seconds
    if step is not None:
        say("", f"a local step computes for {step:.3g} s")
    if plan.round_core_seconds and plan.topology.ensemble != 1:
        say(
            f"a round takes {plan.round_core_seconds:.2g} s of one core of the host, less if a rank has more cores"
        )
        if on_gpu:
            to_host, to_gpu = map(megabytes, plan.bus_bytes)
            say(f"    and moves {to_host} MB from the GPU to the host, {to_gpu} MB back")
    if plan.gathered_bytes:
        say(
            f"rank 0 of a replica exchanges for all of its ranks: in a round they send it "
            f"{megabytes(plan.gathered_bytes)} MB, and get back as much"
        )
    if network is not None and network.ranks_per_node > 1:
        say(f"{network.ranks_per_node} ranks share a node's link (--gpus-per-node)")
    if plan.routed_bytes:
        say(f"routing sends {megabytes(plan.routed_bytes)} MB of each replica to others in a local step")
    if plan.routed_seconds is not None:
        say(f'    which takes {plan.routed_seconds:.3g} s here; noloco.routing "off" saves it')
    if not plan.schemes:
        if network is not None:
            say("", "nothing is exchanged: there is one replica")
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
            enough = "" if scheme.name == "synchronous" else f"{scheme.enough_steps(step):,}"
            row += [percent(plan.share_lost(scheme, step)), enough]
        rows.append(row)
    say("")
    _table(head, rows)


def _show_departures(departures: Sequence["Departures"], notice: float, leave_seconds: float) -> None:
    from megatron_noloco.monitor.figures import megabytes, percent

    rows = [
        (name, f"{found.lost_steps:.2f}", percent(found.share_lost))
        for name, found in zip(("without notice", f"{notice:g} s of notice"), departures, strict=True)
        if name == "without notice" or notice
    ]
    say("")
    _table(("machines that are taken away", "local steps lost each time", "of all local steps"), rows)
    if notice > leave_seconds:
        say(f"of the notice federation.leave_seconds uses {leave_seconds:g} s")
    say(f"a replica that comes back without its disk takes over {megabytes(departures[0].state_bytes)} MB")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, title in enumerate(head):
        table.add_column(title, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=140, highlight=False).print(table)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.3f}"


def _doctor(args: argparse.Namespace) -> int:
    """Return 1 where there is a problem."""
    from megatron_noloco.preflight import machine
    from megatron_noloco.preflight.mpi_check import check_mpi

    if args.hostfile is not None and not args.hostfile.is_file():
        raise UserError(f"--hostfile {args.hostfile}: there is no such file")
    if args.hostfile is not None and not args.seconds:
        raise UserError("--hostfile: names hosts to measure exchanges between, which --seconds 0 leaves out")
    if args.latency and args.bandwidth is None:
        raise UserError("--latency: give --bandwidth as well")
    findings = [*machine.check_packages(), *machine.check_gpus(), *machine.check_network()]
    findings += machine.check_shared_memory()
    if args.seconds:
        findings += check_mpi(args.hostfile, args.seconds)
    if args.rendezvous is not None:
        findings.append(_try_folder(args.rendezvous))
    if args.bandwidth is not None:
        findings += machine.check_buffers(args.bandwidth, args.latency)
    problems = [finding for finding in findings if finding.state == "problem"]
    if args.json:
        say(json.dumps({"ready": not problems, "findings": [asdict(finding) for finding in findings]}))
    else:
        say(*map(_line, findings), "", _verdict(findings))
    return FAILURE if problems else 0


def _try_folder(url: str) -> "Finding":
    """Use a shared folder as a federation does. Raises UserError for a URL that names no folder."""
    from megatron_noloco.federation.store import Store, seconds_of_calls
    from megatron_noloco.preflight.machine import Finding

    if "://" not in url or url.startswith("tcp://"):
        raise UserError(f"--rendezvous {url}: neither file://FOLDER nor a bucket such as s3://bucket/run")
    try:
        seconds = seconds_of_calls(Store.of(url))
    except OSError as error:
        advice = "every job must be able to write, list, read and remove files there"
        return Finding("rendezvous", "problem", str(error), advice)
    took = ", ".join(f"{verb} {duration * 1e3:.1f} ms" for verb, duration in seconds.items())
    return Finding("rendezvous", "ok", f"{url}, a file of 1 MiB: {took}", figures=seconds)


def _line(finding: "Finding") -> str:
    advice = f"\n{'':20}-> {finding.advice}" if finding.advice else ""
    return f"{finding.state:8}{finding.area:12}{finding.what}{advice}"


def _verdict(findings: Sequence["Finding"]) -> str:
    """Return what to fix first."""
    for state, verdict in (("problem", "Fix first"), ("note", "Ready. Improve next")):
        for finding in findings:
            if finding.state == state and finding.advice:
                return f"{verdict}: {finding.area}: {finding.what}. {finding.advice}"
    return "Ready."
