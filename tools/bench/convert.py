"""Time of an export relative to copying the same bytes in the same run, and its memory.

    python -m tools.bench convert                                   # 1.3B parameters: 11 GB under --folder
    python -m tools.bench convert --layers 4 --hidden 512 --dtype bfloat16

Writes a checkpoint of random weights (replicas x pipeline 2 x tensor 2), then measures in turn, `--repeats`
times: copying the weight files with `shutil.copyfile`, and exporting them in a separate process. Both times
include syncing the files to the disk. The check of the logits, which needs both models in memory, is not
made.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import FileRecord, Manifest
from megatron_noloco.config import RunConfig
from megatron_noloco.engine.layout import FlatPart
from megatron_noloco.files import sync, write_whole
from megatron_noloco.huggingface.export import export
from megatron_noloco.huggingface.source import open_source
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import Parameter, table_of
from megatron_noloco.plans.topology import Topology
from tools.bench.laps import Laps
from tools.processes import memory_bytes

STAGES, TP = 2, 2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", help="where to work; default: the system's temporary folder")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="bench_convert-", dir=options.folder) as folder:
        return measure(Path(folder), options)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    config = make_config(options)
    step_folder = write_checkpoint(folder / "checkpoints", config, options.replicas)
    weights = sorted(step_folder.glob("replica_*/*.safetensors"))
    copies, exports = Laps(options.repeats), list[Exported]()
    for _ in copies:
        os.sync()
        with copies.lap("copy"):
            copy(weights, folder / "copy")
        shutil.rmtree(folder / "copy")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            exports.append(alone.submit(convert, step_folder, folder / "hf", options.dtype).result())
        written = sum(file.stat().st_size for file in (folder / "hf").glob("*.safetensors"))
        shutil.rmtree(folder / "hf")
    ratios = [there.seconds / here for there, here in zip(exports, copies.wall["copy"], strict=True)]
    return {
        "parameters": table_of(config.architecture(options.vocabulary)).parameter_count,
        "replicas": options.replicas,
        "dtype": options.dtype,
        "read_gb": round(sum(file.stat().st_size for file in weights) / 1e9, 3),
        "written_gb": round(written / 1e9, 3),
        "copy_seconds": round(copies.medians()["copy"], 2),
        "convert_seconds": round(statistics.median(export.seconds for export in exports), 2),
        "convert_over_copy": round(statistics.median(ratios), 3),
        "convert_over_copy_of_each_repeat": [round(ratio, 3) for ratio in ratios],
        "copy_cpu_seconds": round(statistics.median(copies.cpu["copy"]), 2),
        "convert_cpu_seconds": round(statistics.median(export.cpu_seconds for export in exports), 2),
        "peak_rss_gb": round(max(export.peak_bytes for export in exports) / 1e9, 3),
        "rss_of_imports_gb": round(exports[-1].bytes_before / 1e9, 3),
    }


class Exported(NamedTuple):
    """What an export took, and the peaks of memory before and after it."""

    seconds: float
    cpu_seconds: float
    bytes_before: int
    peak_bytes: int


def convert(step_folder: Path, output: Path, dtype: str) -> Exported:
    """Export once, in a process that does nothing else. The time to start Python is not counted."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401  (export imports it for the tokenizer's files)

    before, laps = memory_bytes("VmHWM"), Laps(1)
    os.sync()  # the disk has finished its earlier writes
    with laps.lap("export"):
        export(open_source([step_folder], "mean"), output, dtype, 500 * 10**6)
        for file in output.iterdir():
            sync(file)
    return Exported(laps.wall["export"][0], laps.cpu["export"][0], before, memory_bytes("VmHWM"))


def copy(files: list[Path], to: Path) -> None:
    to.mkdir()
    for number, file in enumerate(files):
        copied = to / str(number)
        shutil.copyfile(file, copied)
        sync(copied)


# A checkpoint as the ranks of a run would leave it, but for DeepSpeed's files and the outer momentum


def make_config(options: argparse.Namespace) -> RunConfig:
    hidden = options.hidden
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": STAGES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "parallel": {"pipeline_model_parallel_size": STAGES, "tensor_model_parallel_size": TP},
        "model": {
            "num_layers": options.layers,
            "hidden_size": hidden,
            "ffn_hidden_size": hidden * 8 // 3 // 64 * 64,
            "num_attention_heads": hidden // 64,
            "seq_length": 2048,
            "vocab_size": options.vocabulary,
        },
        "data": {"text": "none"},
        "training": {"train_iters": 1},
        "noloco": {"enabled": False},
        "evaluation": {"iters": 0},
    }
    return RunConfig(**raw)


def write_checkpoint(checkpoints: Path, config: RunConfig, replicas: int) -> Path:
    topology = Topology(replicas, STAGES, 1, TP)
    architecture = config.architecture(config.model.vocab_size or 0)
    step_folder = catalog.step_folder(checkpoints, 1)
    for rank in range(topology.world_size):
        position = topology.position(rank)
        folder = catalog.replica_folder(step_folder, position.replica)
        folder.mkdir(parents=True, exist_ok=True)
        layout = stage_layout(architecture, position.stage)
        length = sum(torch.Size(shape).numel() for _, shape in layout)
        path = catalog.file_of(step_folder, position, catalog.WEIGHTS)
        write_whole(path, partial(write_random, length=length))
        record = FileRecord.of(path)
        parts, files = [FlatPart(length, layout)], {path.name: record}
        Manifest(1, 1, topology, position, config.to_dict(), files, architecture, parts).write(folder)
    return step_folder


def stage_layout(architecture: Architecture, stage: int) -> list[tuple[str, list[int]]]:
    """Return names and shapes of a rank's parameters, in the order in which Megatron-core defines them."""
    first_layer = stage * architecture.num_layers // STAGES
    layers = range(first_layer, first_layer + architecture.num_layers // STAGES)

    def is_here(parameter: Parameter) -> bool:
        if parameter.layer is None:
            return stage == (0 if parameter.name.startswith("embedding.") else STAGES - 1)
        return parameter.layer in layers

    return [(p.name, list(p.slice_shape(TP))) for p in table_of(architecture) if is_here(p)]


def write_random(path: Path, length: int) -> None:
    """Write one vector that repeats a million random numbers, which no copy can profit from."""
    piece = torch.randn(min(length, 1 << 20))
    save_file({"slow_weights.0": piece.repeat(-(-length // len(piece)))[:length].contiguous()}, path)
