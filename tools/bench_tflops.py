"""Operations per second of a training step, relative to those of a matrix product on the same core.

    python -m tools.bench_tflops

One process with one thread trains the model of a config as one replica of one rank, and multiplies two square
matrices in fp32 before each step. Operations are counted as in the log's `speed/tflops_per_gpu`, which leaves out
those of the inner optimizer. Seconds are the process's own on the CPU, so that other work counts little. Prints
one JSON object; the share is the ratio of the medians.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "LOCAL_RANK": "0",
}  # before deepspeed is imported, which asks for them

import torch
import torch.distributed as dist

from megatron_noloco.config import RunConfig
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.model.families import training_flops
from megatron_noloco.model.stage import build_stage
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import build_groups
from megatron_noloco.plans.routing import Routing
from tools.options import command_line

VOCABULARY = 257  # of the byte tokenizer
WARM_UPS = 2


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--config", default="configs/quickstart.json")
    parser.add_argument("--matrix", type=int, default=1024, help="rows and columns of the matrices")
    parser.add_argument("--repeats", type=int, default=10, help=f"after {WARM_UPS} to warm up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        print(json.dumps(measure(options), indent=1))
        dist.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    raw = json.loads(Path(options.config).read_text())
    config = RunConfig.from_dict(raw | {"parallel": {"replicas": 1}, "noloco": {"enabled": False}})
    architecture = config.architecture(VOCABULARY)
    cpu.prepare()
    groups = build_groups(config.topology(1), routed=False, tied=architecture.tied_embeddings)
    stage = build_stage(architecture, config.compute, groups, config.training.seed)
    engine = ReplicaEngine(stage, groups, config.deepspeed)
    routes = Routing(1, config.microbatches, 0, "off").straight()
    tokens = torch.randint(VOCABULARY, (config.micro_batch_size, architecture.seq_length + 1))
    microbatch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None
    left, right = torch.randn(2, options.matrix, options.matrix)
    multiply: list[float] = []
    step: list[float] = []
    for _ in range(WARM_UPS + options.repeats):
        started = time.process_time()
        left @ right
        multiplied = time.process_time()
        engine.train_batch(lambda replica, index: microbatch, routes)
        multiply.append(multiplied - started)
        step.append(time.process_time() - multiplied)

    samples = config.microbatches * config.micro_batch_size
    tflops_of_step = samples * training_flops(architecture) / statistics.median(step[WARM_UPS:]) / 1e12
    tflops_of_matmul = 2 * options.matrix**3 / statistics.median(multiply[WARM_UPS:]) / 1e12
    return {
        "config": options.config,
        "tokens_per_step": samples * architecture.seq_length,
        "tflops_of_matmul": round(tflops_of_matmul, 4),
        "tflops_of_step": round(tflops_of_step, 4),
        "step_over_matmul": round(tflops_of_step / tflops_of_matmul, 3),
    }


if __name__ == "__main__":
    main()
