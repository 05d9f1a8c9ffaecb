"""The command line of a replica that is slow, or sends what it should not.

    python -m tools.faults.replica SECONDS [--sigma S] [--times FOLDER] [--factor F] train ...

Each local step begins with a pause of SECONDS: one number for all, or one for each replica with commas between.
With a sigma it is drawn from a lognormal distribution of this mean. A line of FOLDER/steps_REPLICA has the seconds
at which a local step began and ended, of a clock that all processes of a machine share; a replica that is started
again adds to its file. Vectors are multiplied by
the factor before they are sent. In a job of torchrun every rank is a replica.
"""

import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_noloco.cli.main import run
from megatron_noloco.federation.gather import Leader
from megatron_noloco.job.start_up import before_engines
from tools.options import command_line


def pause(seconds: float, sigma: float = 0.0, seed: int = 0, log: Path = Path(os.devnull)) -> None:
    """Let each local step of this process begin with a pause of so many seconds; with a sigma, on average.

    The pause comes before the gradients are added up, so that no rank waits for another meanwhile.
    """
    before_engines()
    from megatron_noloco.engine.replica import ReplicaEngine

    original = ReplicaEngine.train_batch
    draw = random.Random(seed)
    lines = log.open("a", buffering=1)

    def train_batch(self: ReplicaEngine, *arguments: Any) -> Any:
        begun = time.monotonic()
        time.sleep(seconds * math.exp(sigma * draw.gauss() - sigma * sigma / 2))
        losses = original(self, *arguments)
        lines.write(f"{begun} {time.monotonic()}\n")
        return losses

    ReplicaEngine.train_batch = train_batch  # type: ignore[assignment, method-assign]


def send_times(factor: float) -> None:
    """Multiply all vectors that this process exchanges in rounds; its own weights stay as they are."""
    original = Leader.content

    def content(self: Leader, at: int) -> Tensor:
        return factor * original(self, at)

    Leader.content = content  # type: ignore[method-assign]


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("seconds")
    parser.add_argument("--sigma", type=float, default=0.0)
    parser.add_argument("--times", type=Path)  # torchrun takes --log for one of its own
    parser.add_argument("--factor", type=float, default=1.0)
    own, command = sys.argv[1 : sys.argv.index("train")], sys.argv[sys.argv.index("train") :]
    options = parser.parse_args(own)
    given = command[command.index("--replica") + 1] if "--replica" in command else os.environ["RANK"]
    replica = int(given)
    of_replicas = [float(number) for number in options.seconds.split(",")]
    log = Path(os.devnull) if options.times is None else options.times / f"steps_{replica}"
    pause(of_replicas[replica % len(of_replicas)], options.sigma, replica, log)
    if options.factor != 1.0:
        send_times(options.factor)
    run(command)
