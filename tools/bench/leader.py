"""What an exchange costs a replica of several ranks, whose first rank leads: its speed, and its memory.

    python -m tools.bench leader --ranks 4 --megabytes 256

Two jobs on this machine exchange a vector as those of a federation do: one has a rank, the other one or
`--ranks` ranks, each of which has a part of every row. `memory_bytes` is by how much the resident memory of a rank
of the other job grows during its exchanges. Its weights and the vectors of its optimizer are there before.
"""

import argparse
import gc
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_noloco.federation.movement import movement_of
from megatron_noloco.outer import TorchWeights
from megatron_noloco.outer.vectors import BUCKET
from megatron_noloco.plans.canonical import Block, Matrix
from megatron_noloco.settings import NolocoSettings
from tools.bench.laps import Laps
from tools.federated import DEADLINE_SECONDS, open_replica, outer_of, wait_for_all
from tools.processes import memory_bytes

_COLUMNS = 4096


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=4, help="of the larger replica")
    parser.add_argument("--megabytes", type=float, default=256.0, help="bytes of the fp32 vector / 1e6")
    parser.add_argument("--payload", choices=("fp32", "int8"), default="fp32")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats, after one to warm up")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    rows = max(1, int(options.megabytes * 1e6 / 4) // _COLUMNS)
    report: dict[str, Any] = {
        "bytes": 4 * rows * _COLUMNS,
        "bucket_bytes": 4 * BUCKET,
        "payload": options.payload,
        "repeats": options.repeats,
    }
    found = {
        ranks: _measure([1, ranks], rows, options.payload, options.repeats)
        for ranks in dict.fromkeys((1, options.ranks))
    }
    for ranks, one in found.items():
        report[f"1 rank with {ranks}"] = one
    if len(found) > 1:
        report["ratio"] = round(found[options.ranks]["seconds"] / found[1]["seconds"], 2)
    return report


def _measure(sizes: list[int], rows: int, payload: str, repeats: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        processes = [
            context.Process(target=_rank, args=(slot, rank, size, rows, payload, repeats, folder, results))
            for slot, size in enumerate(sizes)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        found = dict(results.get() for _ in processes)
        for process in processes:
            process.join()
    seconds, memory = found[1, 0]
    return {
        "seconds": round(statistics.median(seconds), 4),
        "memory_bytes": {
            "leader": memory,
            "followers": max((found[1, rank][1] for rank in range(1, sizes[1])), default=0),
        },
    }


def _rank(
    slot: int, rank: int, ranks: int, rows: int, payload: Any, repeats: int, folder: str, results: Any
) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(f"{folder}/job_{slot}", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    edges = [_COLUMNS * part // ranks for part in range(ranks + 1)]
    width = edges[rank + 1] - edges[rank]
    whole = Matrix(0, rows, _COLUMNS)
    weights = TorchWeights([torch.full((rows * width,), float(slot))])
    movement = movement_of(weights, 1, ([Block(0, whole, 0, edges[rank], rows, width)], []))
    settings = NolocoSettings(payload=payload, deadline_seconds=DEADLINE_SECONDS)
    thread = open_replica(slot, Path(folder)) if rank == 0 else None
    if thread is not None:
        wait_for_all(thread, 2)
    outer = outer_of(slot, thread, weights, movement, settings)
    outer.run_round(0)
    gc.collect()
    before, laps = memory_bytes("VmRSS"), Laps(repeats)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    for repeat in laps:
        with laps.lap("round"):
            (report,) = outer.after_local_step((repeat + 2) * settings.local_steps)
        assert report.exchange.group == (0, 1), report.exchange.missed
    results.put(((slot, rank), (laps.wall["round"], memory_bytes("VmHWM") - before)))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    if thread is not None:
        time.sleep(1.0)  # the other one may still read
        thread.close()
