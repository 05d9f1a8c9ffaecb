"""How long rounds and all-reduces take when messages and local steps are uneven: the latency model of the paper.

    python -m tools.simulate_latency

NoLoCo (arXiv 2506.10911) compares methods by two simulations, repeated here.

Messages. A message takes a lognormal time, of which only the standard deviation over the mean matters. A tree
all-reduce passes messages up a binary tree with R leaves and down again; each rank of the tree waits for the
later of two. "all_reduce_over_pair" is its mean time over that of two ranks. The paper counts a pair like this, a
message there and one back. The exchange of this repository sends both at once and takes half of that: the ratio
to it is double.

Local steps. They take a lognormal time, mu 1 and sigma^2 0.5. After every k of them DiLoCo waits for the slowest
of R replicas, NoLoCo for the slower one of a random pair. "diloco_over_noloco" is the ratio of the times until
the last replica has done all local steps. Messages take no time here.

Prints one JSON object.
"""

import json
import math

import numpy as np
from numpy.random import Generator, default_rng

from tools.options import command_line

MU, VARIANCE = 1.0, 0.5  # of a local step


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64, 1024])
    parser.add_argument(
        "--jitter", type=float, nargs="+", default=[0.01, 1.0, 2.5], help="deviation over mean"
    )
    parser.add_argument("--local-steps", type=int, nargs="+", default=[5, 10, 25, 50, 100], help="k")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=2000, help="of each operation")
    options = parser.parse_args()
    draws = default_rng(0)
    print(json.dumps({
        "all_reduce_over_pair": {
            replicas: {
                jitter: round(all_reduce_over_pair(draws, replicas, jitter, options.repeats), 2)
                for jitter in options.jitter
            }
            for replicas in options.replicas
        },
        "diloco_over_noloco": {
            local_steps: round(diloco_over_noloco(draws, max(options.replicas), local_steps, options.rounds), 3)
            for local_steps in options.local_steps
        },
    }))  # fmt: skip


def message_seconds(draws: Generator, jitter: float, shape: tuple[int, ...]) -> np.ndarray:
    """Draw lognormal times of mean 1 and standard deviation `jitter`."""
    variance = math.log1p(jitter**2)
    return draws.lognormal(-variance / 2, math.sqrt(variance), shape)


def all_reduce_over_pair(draws: Generator, replicas: int, jitter: float, repeats: int) -> float:
    """Return the mean time of a tree all-reduce of `replicas`, a power of two, over that of two."""
    pairs = all_reduce_seconds(draws, 2, jitter, repeats * 100)
    return float(all_reduce_seconds(draws, replicas, jitter, repeats).mean() / pairs.mean())


def all_reduce_seconds(draws: Generator, replicas: int, jitter: float, repeats: int) -> np.ndarray:
    """Return the time of each repeat."""
    total = np.zeros(repeats)
    for _ in range(2):  # up, and down
        ready = np.zeros((repeats, replicas))
        while ready.shape[1] > 1:
            arrived = ready + message_seconds(draws, jitter, ready.shape)
            ready = arrived.reshape(repeats, -1, 2).max(axis=2)
        total += ready[:, 0]
    return total


def diloco_over_noloco(draws: Generator, replicas: int, local_steps: int, rounds: int) -> float:
    """Return the ratio of the total times; `replicas` is even."""
    together, apart = 0.0, np.zeros(replicas)
    for _ in range(rounds):
        phases = draws.lognormal(MU, math.sqrt(VARIANCE), (replicas, local_steps)).sum(axis=1)
        together += phases.max()
        pairs = draws.permutation(replicas).reshape(-1, 2)
        apart[pairs] = (apart + phases)[pairs].max(axis=1, keepdims=True)
    return float(together / apart.max())


if __name__ == "__main__":
    main()
