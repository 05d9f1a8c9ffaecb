"""The command `plan`."""

import argparse
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_noloco.cli.errors import naming
from megatron_noloco.cli.numbers import at_least_one, share
from megatron_noloco.cli.output import say

if TYPE_CHECKING:
    from megatron_noloco.config import RunConfig
    from megatron_noloco.model.architecture import Architecture
    from megatron_noloco.preflight.accelerators import Accelerator
    from megatron_noloco.preflight.plan import Plan

_UNITS = {
    "bandwidth": {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8},
    "time": {"us": 1e-6, "ms": 1e-3, "s": 1.0},
}
_EXAMPLES = {"bandwidth": "100Mbit or 1Gbit", "time": "25ms or 0.3s"}


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser(
        "plan", help="memory of a rank, bytes and seconds of exchanges, before a run: nothing is started"
    )
    plan.add_argument("config", help="a config file")
    plan.add_argument("--gpus", type=at_least_one, metavar="N", help="ranks (default: as the file says)")
    plan.add_argument(
        "--gpu", metavar="NAME", help="such as H100: whether it fits, and how long a step takes"
    )
    plan.add_argument(
        "--mfu", type=share, default=0.4, help="part of its peak that is reached (default: 0.4)"
    )
    plan.add_argument(
        "--step", type=_duration, metavar="TIME", help="of a local step, where measured, such as 0.3s"
    )
    plan.add_argument("--bandwidth", type=_bandwidth, metavar="RATE", help="of a node's link, such as 1Gbit")
    plan.add_argument(
        "--latency", type=_latency, default=0.0, metavar="TIME", help="from node to node, such as 25ms"
    )
    plan.add_argument(
        "--gpus-per-node",
        type=at_least_one,
        default=1,
        metavar="N",
        help="ranks that share a link (default: 1)",
    )
    plan.add_argument("--json", action="store_true", help="one JSON object for scripts")
    plan.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    from megatron_noloco.config import load_config
    from megatron_noloco.data.tokenizer import build_tokenizer
    from megatron_noloco.preflight.plan import computing_seconds, plan_of
    from megatron_noloco.preflight.traffic import Network

    config = load_config(args.config)
    ranks = config.world_size if args.gpus is None else args.gpus
    if ranks is None:
        raise ValueError(
            f'{args.config}: parallel.replicas is "auto": say how many ranks there are, with --gpus'
        )
    if args.gpus is not None:
        config = replace(config, parallel=config.parallel.model_copy(update={"replicas": "auto"}))
    with naming(args.config):
        topology = config.topology(ranks)
        tokens = 0 if config.model.vocab_size is not None else build_tokenizer(config.tokenizer).vocab_size
    architecture = config.architecture(tokens)
    accelerator = None if args.gpu is None else _accelerator(args.gpu)
    step = args.step
    if step is None and accelerator is not None:
        step = computing_seconds(config, architecture, accelerator.tflops, args.mfu)
    network = None
    if args.bandwidth is not None:
        network = Network(args.bandwidth, args.latency, args.gpus_per_node)
    plan = plan_of(config, architecture, topology, network, step)
    if args.json:
        say(json.dumps(plan.as_json()))
    else:
        _show(plan, config, architecture, accelerator)
    return 0


def _show(
    plan: "Plan", config: "RunConfig", architecture: "Architecture", accelerator: "Accelerator | None"
) -> None:
    """For a person."""
    topology, memory = plan.topology, plan.memory
    say(
        f"{topology.ensemble} replicas x {topology.replica_size} ranks; a rank of stage {plan.stage}, which needs "
        f"most, holds {plan.held.parameters:,} weights and exchanges {plan.held.owned:,}",
        "",
    )
    _table(
        ("memory of this rank", "GB"),
        [
            *((part, _gigabytes(size)) for part, size in memory.device.items() if size),
            ("in all, on its device", _gigabytes(memory.device_bytes)),
            *((f"{part}, in host memory", _gigabytes(size)) for part, size in memory.host.items()),
        ],
    )
    if accelerator is not None:
        _show_fit(plan, config, architecture, accelerator)
    if plan.step_seconds is not None:
        say("", f"a local step computes for {plan.step_seconds:.3g} s")
    if plan.routed_bytes:
        say(f"routing sends {plan.routed_bytes / 1e6:,.1f} MB of each replica to others in a local step")
    if plan.routed_seconds is not None:
        say(
            f"    which takes {plan.routed_seconds:.3g} s here, less what computing hides of it. The table leaves",
            '    it out; noloco.routing.interval "off" saves it',
        )
    if plan.ways:
        say("")
        _show_ways(plan)


def _show_fit(
    plan: "Plan", config: "RunConfig", architecture: "Architecture", accelerator: "Accelerator"
) -> None:
    from megatron_noloco.preflight.advice import changes_that_save

    name, size = accelerator.words, accelerator.gigabytes
    needed = plan.memory.device_bytes / 1e9
    say("")
    if needed <= 0.9 * size:
        say(f"fits {name} of {size:g} GB; libraries and the allocator take some GB beside it")
        return
    say(f"too much for {name} of {size:g} GB, of which libraries and the allocator take a tenth")
    rows: list[tuple[str, ...]] = [
        (change, str(ranks), _gigabytes(device))
        for change, ranks, device in changes_that_save(config, architecture, plan.topology)
    ]
    if rows:
        say("What would help:")
        _table(("change", "ranks of a replica", "GB"), rows)


def _show_ways(plan: "Plan") -> None:
    step = plan.step_seconds
    head = ["", "every", "MB per rank", "seconds", "MB per local step"]
    head += [] if step is None else ["time lost", "< 1 % from k ="]
    rows = []
    for way in plan.ways:
        row = [
            way.name,
            str(way.local_steps),
            f"{way.bytes_per_exchange / 1e6:,.1f}",
            f"{way.seconds_per_exchange:.3g}",
            f"{way.bytes_per_exchange / 1e6 / way.local_steps:,.1f}",
        ]
        if step is not None:
            enough = "" if way.name == "synchronous" else f"{way.enough_steps(step):,}"
            row += [f"{way.share_lost(step):.1%}", enough]
        rows.append(tuple(row))
    _table(tuple(head), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
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


def _accelerator(name: str) -> "Accelerator":
    from megatron_noloco.preflight.accelerators import ACCELERATORS, find_accelerator

    found = find_accelerator(name)
    if found is None:
        known = ", ".join(kind.words for kind in ACCELERATORS)
        raise ValueError(f"--gpu {name}: not known; known are {known}. Leave it out, and give --step")
    return found


def _bandwidth(text: str) -> float:
    """Bytes per second."""
    return _more_than_nothing(text, "bandwidth")


def _duration(text: str) -> float:
    """Seconds."""
    return _more_than_nothing(text, "time")


def _latency(text: str) -> float:
    """Seconds; may be 0."""
    return _quantity(text, "time")


def _more_than_nothing(text: str, kind: str) -> float:
    quantity = _quantity(text, kind)
    if not quantity:
        raise argparse.ArgumentTypeError(f'"{text}" must be more than 0, such as {_EXAMPLES[kind]}')
    return quantity


def _quantity(text: str, kind: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?([a-z]+)", text.lower())
    unit = _UNITS[kind].get(match[2]) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f'"{text}" is no {kind}; write {_EXAMPLES[kind]}')
    return float(match[1]) * unit
