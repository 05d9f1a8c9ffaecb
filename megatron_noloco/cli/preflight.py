"""The commands before a run: `plan`, what it needs, and `doctor`, whether this machine is ready."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_noloco.cli.options import (
    Commands,
    add_command,
    at_least_one,
    bandwidth,
    duration,
    gigabytes,
    latency,
    say,
)
from megatron_noloco.errors import UserError, prefix_errors_with
from megatron_noloco.job.leaving import FAILURE

if TYPE_CHECKING:
    from megatron_noloco.preflight.accelerators import Accelerator

_JSON = "one JSON object for scripts"
_FINDINGS = """--json prints {"ready": true, "findings": [...]}. A finding has area, state ("ok",
"note" or "problem"), what, advice, and figures; the figures of the exchange are
latency_seconds, gb_per_second and over. A machine with any problem is not ready."""
_MFU = 0.4  # share of a GPU's peak that a step reaches


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
    add(
        "--gpu",
        metavar="NAME",
        help="such as H100: say whether the run fits and how long a step takes at 0.4 of its peak",
    )
    memory = "memory of a GPU in 10^9 bytes, of one that --gpu does not know or that comes in several sizes"
    add("--gpu-memory", type=gigabytes, metavar="GB", help=memory)
    add("--step", type=duration, metavar="TIME", help="measured time of a local step, such as 0.3s")
    add("--bandwidth", type=bandwidth, metavar="RATE", help="rate of a node's link, such as 1Gbit")
    add("--latency", type=latency, default=0.0, metavar="TIME", help="delay from node to node, such as 25ms")
    per_node = "ranks that share a node's link (default: 1)"
    add("--gpus-per-node", type=at_least_one, metavar="N", help=per_node)
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
    add("--hostfile", type=Path, help="hostfile of mpirun: send messages between its first two hosts")
    add("--no-exchange", action="store_true", help="start no ranks that send each other messages")
    folder = "folder or bucket of federation.rendezvous: write, list, read and remove a file there"
    add("--rendezvous", metavar="URL", help=folder)
    link = "rate of the link to a partner: say how to set TCP for it (buffers, BBR)"
    add("--bandwidth", type=bandwidth, metavar="RATE", help=link)
    delay = "with --bandwidth: delay of the link, one way"
    add("--latency", type=latency, default=0.0, metavar="TIME", help=delay)
    add("--json", action="store_true", help=_JSON)
    doctor.set_defaults(run=_doctor)


def _plan(args: argparse.Namespace) -> int:
    from megatron_noloco.config import load_config, resolve
    from megatron_noloco.preflight import plan as planning
    from megatron_noloco.preflight.schemes import Network

    for option, given in {"--latency": args.latency, "--gpus-per-node": args.gpus_per_node}.items():
        if given and args.bandwidth is None:
            raise UserError(f"{option}: give --bandwidth as well; without it exchanges are left out")
    config = load_config(args.config)
    if args.gpus is not None:
        config = config.replace(parallel=config.parallel.replace(replicas="auto"))
    ranks = config.world_size if args.gpus is None else args.gpus
    with prefix_errors_with(args.config):
        topology = config.smallest_topology() if ranks is None else config.topology(ranks)
        config = resolve(config, topology.total_replicas).config
        architecture = planning.architecture_of_run(config)
    accelerator = None if args.gpu is None else _accelerator(args.gpu)
    size: float | None = args.gpu_memory
    if size is None and accelerator is not None:
        size = accelerator.gigabytes
    step, peak = args.step, None if accelerator is None else accelerator.peak(config.precision)
    if step is None and peak is not None:
        step = planning.computing_seconds(config, architecture, peak, _MFU)
    network = None
    if args.bandwidth is not None:
        network = Network(args.bandwidth, args.latency, args.gpus_per_node or 1)
    plan = planning.plan_of(config, architecture, topology, network, step)
    if args.json:
        more = {} if size is None else {"fits": planning.fits(plan.memory, size)}
        say(json.dumps(plan.as_json() | more))
        return 0
    notes = [] if size is None else [planning.fit_line(plan.memory, size)]
    if accelerator is not None and step is None:
        notes.append(f"the peak of {accelerator.words} in {config.precision} is not known: give --step")
    if network is not None and not plan.schemes:
        notes.append("nothing is exchanged: there is one replica")
    if network is not None and step is None and config.noloco.most_waiting is not None:
        notes.append('noloco.local_steps "auto": --step or --gpu shows what a run would choose')
    notes += planning.folder_lines(config, architecture)
    if ranks is None:
        replicas = topology.replicas
        notes.append(
            f'parallel.replicas is "auto": this is for {replicas} replicas; --gpus N plans for N ranks'
        )
    say(*planning.plan_lines(plan), *[""] * bool(notes), *notes)
    return 0


def _accelerator(name: str) -> "Accelerator":
    from megatron_noloco.preflight.accelerators import ACCELERATORS, find_accelerator

    found = find_accelerator(name)
    if found is None:
        known = ", ".join(kind.words for kind in ACCELERATORS)
        raise UserError(
            f"--gpu {name}: not known; known are {known}. In its place give --gpu-memory, and --step"
        )
    return found


def _doctor(args: argparse.Namespace) -> int:
    """Return 1 where there is a problem."""
    from megatron_noloco.preflight import machine
    from megatron_noloco.preflight.mpi_check import check_mpi

    if args.hostfile is not None and not args.hostfile.is_file():
        raise UserError(f"--hostfile {args.hostfile}: there is no such file")
    if args.hostfile is not None and args.no_exchange:
        raise UserError(
            "--hostfile: names hosts that send each other messages, which --no-exchange leaves out"
        )
    if args.latency and args.bandwidth is None:
        raise UserError("--latency: give --bandwidth as well")
    link = None if args.bandwidth is None else (args.bandwidth, args.latency)
    folder = [] if args.rendezvous is None else [machine.check_folder(args.rendezvous)]
    is_separate = args.rendezvous is not None and args.hostfile is None
    findings = [*machine.check_machine(link, is_separate)]
    if not args.no_exchange:
        findings += check_mpi(args.hostfile)
    findings += folder
    ready = machine.is_ready(findings)
    if args.json:
        say(json.dumps({"ready": ready, "findings": [asdict(finding) for finding in findings]}))
    else:
        say(*map(str, findings), "", machine.verdict(findings))
    return 0 if ready else FAILURE
