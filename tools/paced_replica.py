"""The command line of a replica whose local steps take a given time.

`python -m tools.paced_replica SECONDS SIGMA FOLDER train ...`: SECONDS has a number for each replica, with commas
between; each of its local steps begins with so long a pause, of a lognormal distribution with this mean where
SIGMA is not 0. In a job of torchrun every rank is a replica. The seconds at which each local step began and ended,
of a clock that all processes of a machine share, are lines of FOLDER/steps_REPLICA.
"""

import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from megatron_noloco.cli.main import run
from megatron_noloco.job.start_up import before_engines


def take(seconds: float, sigma: float = 0.0, seed: int = 0, steps: Path = Path(os.devnull)) -> None:
    """From here on each local step of this process begins with so long a pause; with a sigma, on average.

    The pause comes before the gradients are added up, so that no rank waits for another meanwhile.
    """
    before_engines()
    from megatron_noloco.engine.replica import ReplicaEngine

    original = ReplicaEngine.train_batch
    draw = random.Random(seed)
    log = steps.open("w", buffering=1)

    def train_batch(self: ReplicaEngine, *arguments: Any) -> Any:
        begun = time.monotonic()
        time.sleep(seconds * math.exp(sigma * draw.gauss() - sigma * sigma / 2))
        losses = original(self, *arguments)
        log.write(f"{begun} {time.monotonic()}\n")
        return losses

    ReplicaEngine.train_batch = train_batch  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    if "--replica" in sys.argv:
        replica = int(sys.argv[sys.argv.index("--replica") + 1])
    else:
        replica = int(os.environ["RANK"])
    seconds, sigma, folder = sys.argv[1:4]
    del sys.argv[1:4]
    take(float(seconds.split(",")[replica]), float(sigma), replica, Path(folder) / f"steps_{replica}")
    run()
