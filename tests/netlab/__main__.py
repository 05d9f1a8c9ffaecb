"""A network lab on this machine: hosts with slow links between them, for root.

    python -m tests.netlab rounds --hosts 2,16 --rate 10Mbit --delay 25ms --bytes 1MB

Every host is a network namespace with a name of its own; a process carries the packets between them, each link
with its own rate, delay, jitter and loss. Prints one JSON object.

rounds: MPI and gloo, a rank on each host. The round of the outer optimizer between random pairs, over MPI and over
the encrypted transport of a federation; the exchange of partners that are new to each other; and all-reduces of
the same vector: MPI's own choice, Open MPI's ring, recursive doubling and tree, and gloo's.

nat: four jobs of the trainer, of which two are behind routers: their `federation.listen` is "off", and no other
host can connect to them. Needs nft. Counts for each replica the rounds with each partner, and the bytes that each
host sent.

run: `--module MODULE ARGUMENTS`, the last options, under MPI, a rank on each host. Prints what that prints.

MPI is that of the mpirun beside this Python: Open MPI, MPICH or Intel MPI.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tests.netlab import nat, rounds
from tests.netlab.lab import CUBIC, LabUnavailableError, lab
from tests.netlab.network import Link
from tools.options import command_line

_UNITS = {
    "rate": {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9},
    "delay": {"us": 1e-6, "ms": 1e-3, "s": 1.0},
    "bytes": {"kB": 1e3, "MB": 1e6, "GB": 1e9},
}


def quantity(kind: str, text: str) -> float:
    """Parse a number with a unit; raises ValueError that names the units."""
    for unit, factor in _UNITS[kind].items():
        number = text.removesuffix(unit)
        if number != text:
            try:
                return float(number) * factor
            except ValueError:
                continue
    raise ValueError(f"--{kind} {text!r} must be a number with one of the units {', '.join(_UNITS[kind])}")


def host_numbers(text: str) -> list[int]:
    try:
        hosts = [int(number) for number in text.split(",")]
    except ValueError:
        hosts = []
    if not hosts or not all(2 <= number <= 250 for number in hosts):
        raise ValueError(f"--hosts {text!r} must be numbers from 2 to 250, such as 2,16")
    return hosts


def chosen_ways(names: str | None) -> list[str]:
    chosen = list(rounds.LAUNCHES) if names is None else names.split(";")
    for name in chosen:
        if name not in rounds.LAUNCHES:
            raise ValueError(f"--ways {name!r} must be some of {'; '.join(rounds.LAUNCHES)}")
    return chosen


def run(
    hosts: list[int], link: Link, congestion: str, options: list[str], command: list[str]
) -> Iterator[str]:
    """Yield the output of the command on each number of hosts."""
    if not command:
        raise ValueError("run needs --module MODULE, with its arguments, as the last option")
    for number in hosts:
        with lab([link] * number, congestion) as there:
            yield there.mpirun(options, *command)


def main() -> None:
    parser = command_line(__doc__, "python -m tests.netlab")
    parser.add_argument("measurement", choices=("rounds", "nat", "run"))
    parser.add_argument("--hosts", default="2,16", help="their numbers, one measurement each")
    parser.add_argument("--rate", default="10Mbit", help="of each link, in both directions")
    parser.add_argument("--delay", default="25ms", help="each way")
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="standard deviation of the delay over its mean"
    )
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets")
    parser.add_argument("--congestion", default=CUBIC, help="TCP's congestion control, such as cubic or bbr")
    parser.add_argument("--bytes", default="1MB", help="of the vector (rounds)")
    parser.add_argument("--ways", help="what to measure, separated by semicolons; default: all (rounds)")
    parser.add_argument("--repeats", type=int, default=8, help="the first is left out (rounds)")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds of silence before each (rounds)")
    parser.add_argument("--mpi-options", default="", help="more options of mpirun (rounds)")
    parser.add_argument("--module", nargs=argparse.REMAINDER, default=[], help="with its arguments (run)")
    options = parser.parse_args()
    try:
        link = Link(
            quantity("rate", options.rate), quantity("delay", options.delay), options.jitter, options.loss
        )
        hosts = host_numbers(options.hosts)
        if options.measurement == "run":
            print(
                *run(hosts, link, options.congestion, options.mpi_options.split(), options.module),
                sep="",
                end="",
            )
            return
        if options.measurement == "nat":
            rows: Iterable[dict[str, Any]] = nat.measure(link, options.congestion)
        elif options.repeats < 2:
            raise ValueError(f"--repeats {options.repeats} leaves nothing: the first is left out; at least 2")
        else:
            rows = rounds.measure(
                hosts, link, chosen_ways(options.ways), int(quantity("bytes", options.bytes)), options.repeats,
                options.pause, options.mpi_options.split(), options.congestion,
            )  # fmt: skip
        print(json.dumps({**vars(options), "rows": list(rows)}))
    except (ValueError, LabUnavailableError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:  # of what ran in the lab
        print(f"netlab: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
