"""How the memory of a run's ranks changes over the local steps.

    mpirun --oversubscribe --bind-to none -n 8 python -m tests.kit.memory_of_ranks configs/quickstart.json

Trains as `train` does, and writes one JSON object. For each rank, at each of the local steps in `steps`: resident
bytes, which the kernel counts; allocated bytes, which all libraries have taken from malloc and not given back
(glibc 2.33 or newer); and blocks that Python's own allocator has given out. Where resident bytes grow and the
other two do not, free memory is in pieces. `growth`: the most resident bytes until the end over the most until
step `--since`, on the rank where that is largest.
"""

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed as dist

from megatron_noloco.config import RunConfig
from megatron_noloco.job.agreement import gather_from_all_ranks
from megatron_noloco.job.leaving import leave
from megatron_noloco.job.start_up import importing
from tools.options import command_line
from tools.processes import held


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--every", type=int, default=100, help="local steps between two looks")
    parser.add_argument("--since", type=int, default=200, help="the local step from which on growth counts")
    options = parser.parse_args()
    with redirect_stdout(sys.stderr):
        ranks = memory_of_a_run(RunConfig(**json.loads(options.config.read_text())), options.every)
    if ranks is not None:
        json.dump({"growth": growth(ranks, options.since), "ranks": ranks}, sys.stdout)


def memory_of_a_run(config: RunConfig, every: int) -> list[dict[str, list[int]]] | None:
    """Train, and return on rank 0 what each rank held before every so many steps; None on the others."""
    with importing():
        from megatron_noloco.training.start import start
    run = start(config, os.environ, progress="lines")
    looks: list[dict[str, int]] = []
    before_step = run.stopping.before_step

    def look(done: int) -> bool:
        if done % every == 0:
            looks.append({"steps": done, **held()})
        return before_step(done)

    run.stopping.before_step = look  # type: ignore[method-assign]
    run.train()
    looks.append({"steps": config.training.train_iters, **held()})
    ranks = gather_from_all_ranks({name: [one[name] for one in looks] for name in looks[0]})
    return ranks if dist.get_rank() == 0 else None


def growth(ranks: list[dict[str, list[int]]], since: int) -> float:
    """The most resident bytes until the end over the most until step `since`, the largest ratio of all ranks."""
    ratios = []
    for rank in ranks:
        sizes = rank["resident_bytes"]
        before = [size for step, size in zip(rank["steps"], sizes, strict=True) if step <= since]
        ratios.append(max(sizes) / max(before))
    return round(max(ratios), 4)


if __name__ == "__main__":
    main()
    leave(0)
