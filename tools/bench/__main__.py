"""Benchmarks: each prints one JSON object.

    python -m tools.bench CASE --help
    python -m tools.bench payload

Under mpirun, a rank each: exchange and overlap. "against" compares this tree with another commit.
"""

import importlib
import json
import sys
from contextlib import suppress

from tools.options import command_line

CASES = (
    *("against", "checkpoint", "convert", "data", "exchange", "host"),
    *("leader", "overlap", "payload", "routing", "throughput"),
)


def main() -> None:
    parser = command_line(__doc__, "python -m tools.bench")
    parser.add_argument("case", choices=CASES)
    name = parser.parse_args(sys.argv[1:2]).case
    case = importlib.import_module(f"tools.bench.{name}")  # alone: some set environment variables
    parser = command_line(case.__doc__, f"{parser.prog} {name}")
    case.add_options(parser)
    report = case.run(parser.parse_args(sys.argv[2:]))
    if report is not None:  # the first rank has it
        print(json.dumps(report, indent=1), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
