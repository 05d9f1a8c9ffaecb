"""Time of a checkpoint, relative to plain `torch.save` of the same tensors in the same run.

    python -m tools.bench checkpoint --hidden-size 384 --layers 6

One process: one replica of one rank, after one local step (so that Adam has its state). Each repeat runs all
variants in turn, so that noise of the machine affects them alike. "torch.save" writes one file, without checksums
or fsync; "torch.save and fsync" is as safe from a power cut as "sync". "async pause" is how long an asynchronous
save pauses training, "async until written" the time until its files exist.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported: else it guesses, and says so

import torch
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.checkpointer import Checkpointer, SaveReport
from megatron_noloco.config import RunConfig
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.files import sync
from megatron_noloco.job.launcher import World
from megatron_noloco.job.start_up import before_engines
from megatron_noloco.job.world import join
from megatron_noloco.model.stage import build_stage
from megatron_noloco.outer import OuterOptimizer
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import build_groups
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.sample_order import BatchPlan
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import PAPER, NolocoSettings
from megatron_noloco.training.start import checkpoint_settings
from megatron_noloco.transport.torch_dist import TorchTransport
from tools.bench.laps import Laps, rounded
from tools.models import Size, config_of

VOCABULARY, SEQUENCE = 256, 32
PLAIN = "torch.save"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats, after one to warm up")
    parser.add_argument("--folder", help="where to write; default: the system's folder for temporary files")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    before_engines()
    cpu.prepare()
    torch.set_num_threads(1)
    join(World(rank=0, local_rank=0, world_size=1, launcher="single"), "gloo")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        waiting, going_on = (
            build(options, Path(folder) / name, name == "async") for name in ("sync", "async")
        )
        medians = measure(waiting, going_on, Path(folder) / "plain.pt", options.repeats)
        (step,) = catalog.steps(waiting.settings.folder)
        written = sum(path.stat().st_size for path in step.rglob("*") if path.is_file())
    return {
        "parameters": waiting.engine.weights.length,
        "repeats": options.repeats,
        "bytes": written,
        "median_seconds": rounded(medians, 4),
        f"times_{PLAIN}": rounded(medians, 2, medians[PLAIN]),
    }


def build(options: argparse.Namespace, folder: Path, asynchronous: bool) -> Checkpointer:
    """Return a checkpointer of a replica that has made one local step."""
    hidden = options.hidden_size
    raw = config_of(Size(options.layers, hidden, 4 * hidden, 4, SEQUENCE, VOCABULARY, 1, 1), "bf16") | {
        "noloco": {"recipe": "paper", "local_steps": 2},
        "training": {"train_iters": 1, "output_dir": str(folder)},
        "checkpoint": {"async_save": asynchronous, "keep_last": 1},
    }
    config = RunConfig(**raw)
    topology = config.topology(1)
    groups = build_groups(topology, routed=False, tied=False)
    stage = build_stage(config.architecture(VOCABULARY), config.compute, groups, config.training.seed)
    engine = ReplicaEngine(stage, groups, config.as_deepspeed())
    outer = OuterOptimizer(engine.weights, TorchTransport(), topology.place(0), NolocoSettings(**PAPER))
    routes = Routing(1, config.microbatches, 0, "off").straight()
    engine.train_batch(read, routes)
    return Checkpointer(checkpoint_settings(config, Topology()), engine, outer, BatchPlan(1, 1, 1, 1))


def read(replica: int, microbatch: int) -> tuple[Tensor, Tensor, None]:
    tokens = torch.arange(SEQUENCE + 1).unsqueeze(0)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None


def measure(waiting: Checkpointer, going_on: Checkpointer, plain: Path, repeats: int) -> dict[str, float]:
    """Return the median of the seconds by variant."""
    laps = Laps(repeats, warm_ups=1)
    for _ in laps:
        state = waiting._tensors()
        with laps.lap(PLAIN):
            torch.save(state, plain)
        with laps.lap("torch.save and fsync"):
            torch.save(state, plain)
            sync(plain)
        with laps.lap("sync"):
            sound(waiting.save(1, {}))
        with laps.lap("async until written"):
            with laps.lap("async pause"):
                sound(going_on.save(1, {}))
            going_on.wait()
    return laps.medians()


def sound(report: SaveReport) -> None:
    assert report.error is None, report.error
