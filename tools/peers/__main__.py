"""The same work with other programs, side by side. Prints one JSON object; `make peers` runs all parts.

    python -m tools.peers torchft plan --output runs/peers

weights: 4 replicas of a small model on different data, under torchft and under this project's DiLoCo.
faults: seconds and rounds that a killed replica costs the others, and a killed coordinator; torchft's DiLoCo
    beside NoLoCo as separate jobs.
links: seconds and bytes of a round, and the loss over time, on hosts of the network lab (root).
plan: seconds of an exchange and share of the time lost, as `plan` says and as measured in the lab.

`torchft` stands for the first three. It is installed into OUTPUT/environment, which shares this Python's torch.
What has results in OUTPUT/results.json is not run again.
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
from tools.peers import planned
from tools.peers.torchft import VERSION, WAYS, Environment, faults, plot_links, same_weights, slow_links

WITH_TORCHFT = ("weights", "faults", "links")
PARTS = ("weights", "faults", "links", "plan")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "torchft"])
    parser.add_argument("--output", type=Path, default=Path("runs/peers"))
    parser.add_argument("--replicas", default="2,4,8", help="links: numbers of replicas")
    parser.add_argument("--rates", default="10,100", help="links: Mbit/s")
    parser.add_argument("--delay", type=float, default=0.01, help="links: seconds from host to host")
    parser.add_argument("--steps", type=int, default=100, help="links: local steps")
    options = parser.parse_args()
    if "torchft" in options.parts:
        options.parts += WITH_TORCHFT
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(options.output / "results.json")
    logs = options.output / "logs"
    results.found["versions"] = {"torchft": VERSION, "torch": version("torch")}
    shutil.rmtree(logs, ignore_errors=True)
    environment = Environment(options.output / "environment")
    if "weights" in options.parts:
        results.once("weights", lambda: same_weights(environment, logs))
    if "faults" in options.parts:
        for way in ("torchft-diloco", "noloco"):
            results.once(f"faults, {way}", partial(faults, environment, logs, way))
    if "links" in options.parts:
        for rate in map(float, options.rates.split(",")):
            for replicas in map(int, options.replicas.split(",")):
                for way in WAYS:
                    link = Link(rate * 1e6, options.delay)
                    results.once(
                        f"links, {rate:g} Mbit/s, {replicas} replicas, {way}",
                        partial(slow_links, environment, logs, link, replicas, way, options.steps),
                    )
        found = {name: one for name, one in results.found.items() if name.startswith("links, ")}
        plot_links(found, options.output / "links.png")
    if "plan" in options.parts:
        for number, point in enumerate(planned.POINTS):
            results.once(f"plan, {number}", partial(planned.measure, environment, logs, point))
        results.found["plan, relative errors"] = planned.errors(
            [results.found[f"plan, {number}"] for number in range(len(planned.POINTS))]
        )
    print(json.dumps(results.found, indent=2))


class Results:
    """What was measured so far, in memory and in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def once(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure what is not in the file yet."""
        if name not in self.found:
            self.found[name] = measure()
            self._file.write_text(json.dumps(self.found, indent=2))


if __name__ == "__main__":
    main()
