"""Time of a batch on routes that cross replicas, relative to straight pipelines.

    python -m tools.bench routing --repeats 60

Starts its ranks itself (forked, gloo, one machine) and builds real stages. Forward and backward of a batch are
timed, without the optimizer, which does not depend on routes. Each repeat runs all variants once, in an order that
rotates, so that noise of the machine affects them alike; a time is that of the slowest rank. "off" stays
inside each replica, "off again" is the same once more: the deviation of their ratio from 1 is noise.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron_noloco.config import RunConfig
from megatron_noloco.model.stage import build_stage
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import Groups, build_groups
from megatron_noloco.pipeline.pipeline import Pipeline
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.topology import Topology
from tools.bench.laps import Laps, rounded, slowest
from tools.models import Size, config_of

VOCABULARY = 256
WARM_UPS = 3
REPLICAS, STAGES, MICROBATCHES, MICRO_BATCH = 2, 2, 4, 8
BASE, AGAIN = "off", "off again"
INTERVALS = ("round", "microbatch")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=40, help=f"timed repeats, after {WARM_UPS} to warm up")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    config = configuration(options)
    ranks = REPLICAS * STAGES
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            run_rank, args=(ranks, folder, config, options.repeats), nprocs=ranks, start_method="fork"
        )
        found = json.loads(Path(folder, "seconds.json").read_text())
    medians, fastest = found["medians"], found["fastest"]
    return {
        "ranks": f"{REPLICAS} replicas x {STAGES} stages",
        "microbatches": MICROBATCHES,
        "message_bytes": MICRO_BATCH * options.seq_length * options.hidden * 4,
        "repeats": options.repeats,
        "median_seconds": rounded(medians, 5),
        "median_over_off": rounded(medians, 3, medians[BASE]),
        "fastest_over_off": rounded(fastest, 3, fastest[BASE]),
    }


def configuration(options: argparse.Namespace) -> RunConfig:
    hidden, length = options.hidden, options.seq_length
    size = Size(2 * STAGES, hidden, 3 * hidden, 4, length, VOCABULARY, MICRO_BATCH, MICROBATCHES)
    raw = config_of(size, "fp32")
    raw["parallel"] = {"replicas": REPLICAS, "pipeline_model_parallel_size": STAGES}
    raw["model"]["untie_embeddings_and_output_weights"] = True
    return RunConfig(**raw)


def run_rank(rank: int, ranks: int, folder: str, config: RunConfig, repeats: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    ways, laps = make_ways(config, config.topology(ranks)), Laps(repeats, WARM_UPS, dist.barrier, slowest)
    for step in laps:
        for name in laps.in_turn(ways):
            with laps.lap(name):
                ways[name](step + WARM_UPS)
    if rank == 0:
        found = {
            "medians": laps.medians(),
            "fastest": {name: min(times) for name, times in laps.wall.items()},
        }
        Path(folder, "seconds.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def make_ways(config: RunConfig, topology: Topology) -> dict[str, Callable[[int], None]]:
    """Return the variants to compare. Each runs the batch of a step, on the same stage and data."""
    cpu.prepare()
    inside, across = build_groups(topology, routed=False), build_groups(topology, routed=True)
    stage = build_stage(config.architecture(VOCABULARY), config.compute, inside, config.training.seed)
    shape = (config.micro_batch_size, config.model.seq_length)
    batch = torch.randint(VOCABULARY, shape), torch.randint(VOCABULARY, shape), None

    def way(groups: Groups, interval: str) -> Callable[[int], None]:
        pipeline = Pipeline(stage, groups, *shape)
        routing = Routing(topology.replicas, config.microbatches, 0, interval)  # type: ignore[arg-type]

        def run(step: int) -> None:
            stage.zero_grad()
            pipeline.run(read, routing.routes(step, step), config.microbatches)

        return run

    def read(replica: int, microbatch: int) -> tuple[Tensor, Tensor, None]:
        return batch

    straight = {name: way(inside, "off") for name in (BASE, AGAIN)}
    return straight | {interval: way(across, interval) for interval in INTERVALS}
