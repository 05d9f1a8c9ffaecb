"""The same work with torchft and with this project, and what `plan` predicts: `make peers`, or

    python -m tools.peers [faults] [links] [plan] [--output runs/peers]

faults: seconds and rounds that a killed replica costs the others, and a killed coordinator; torchft's DiLoCo
    beside NoLoCo as separate jobs.
links: seconds and bytes of a round, and the loss over time, on hosts of the network lab (root).
plan: seconds of an exchange and share of the time lost, as `plan` says and as measured in the lab (root).

Prints one JSON object. torchft is installed into OUTPUT/environment, which shares this Python's torch. What has
results in OUTPUT/results.json is not run again.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.netlab.network import Link
from tools.options import command_line
from tools.peers import measure, planned
from tools.peers.processes import VERSION

PARTS = ("faults", "links", "plan")
LINKS = ((10, 2), (10, 4), (10, 8), (100, 8))  # Mbit/s and replicas


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--output", type=Path, default=Path("runs/peers"))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    logs, file = options.output / "logs", options.output / "results.json"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found["versions"] = {"torchft": VERSION, "torch": version("torch")}
    for part in options.parts or PARTS:
        for name, run in runs_of(part, logs).items():
            if name not in found:
                found[name] = run()
                file.write_text(json.dumps(found, indent=2))
    rows = [one for name, one in found.items() if name.startswith("plan, ")]
    print(json.dumps(found | ({"plan: relative errors": planned.errors(rows)} if rows else {}), indent=2))


def runs_of(part: str, logs: Path) -> dict[str, Callable[[], Any]]:
    """Return the measurements of a part, by their names."""
    if part == "faults":
        return {f"faults, {way}": partial(measure.faults, logs, way) for way in ("torchft", "noloco")}
    if part == "plan":
        points = enumerate(planned.POINTS)
        return {f"plan, {number}": partial(planned.measure, logs, point) for number, point in points}
    return {
        f"links, {rate} Mbit/s, {replicas} replicas, {way}": partial(
            measure.slow_links, logs, Link(rate * 1e6, 0.01), replicas, way
        )
        for rate, replicas in LINKS
        for way in ("torchft", "diloco", "noloco")
    }


if __name__ == "__main__":
    main()
