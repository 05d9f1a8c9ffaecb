"""Speed of preprocessing relative to its bare tokenizer, and waiting for data in the quickstart.

    python -m tools.bench data --megabytes 64 --steps 20

The tokenizer is a byte-level BPE of 8192 tokens trained here, unless --tokenizer-model names one; the text is
Python's standard library, repeated, as JSON lines. "Raw" is the same tokenizer's own batch call, on texts already
in memory. Both run --repeats times in turn; medians. On a busy machine, compare the CPU seconds (for raw, without
its preparation). RAYON_NUM_THREADS sets the threads of both.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_noloco.data.inputs import find_inputs, find_standard_library
from megatron_noloco.data.preprocess import Encoding, Job, preprocess
from megatron_noloco.data.tokenizer import TokenizerChoice, build_tokenizer
from megatron_noloco.monitor.run_log import RunLog
from tools.bench.laps import Laps

ROOT = Path(__file__).resolve().parents[2]
BATCH = 512  # texts per raw call


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, default=64.0, help="of text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokenizer-model", help="folder with a tokenizer.json (default: one trained here)")
    parser.add_argument(
        "--steps", type=int, default=20, help="of the quickstart, 8 processes; 0: leave it out"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.tokenizer_model or train_tokenizer(folder)
        encoding = Encoding(TokenizerChoice(str(model)), ("text",), append_eod=True)
        report["text_megabytes"] = write_text(folder / "text.jsonl", options.megabytes)
        report |= compare(folder, encoding, options.repeats, report["text_megabytes"])
        if options.steps:
            report["quickstart"] = data_wait(folder, options.steps)
    return report


def train_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train([str(source.path) for source in find_standard_library().files[:200]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_text(path: Path, megabytes: float) -> float:
    """Write JSON lines; returns the megabytes of text in them."""
    texts = [source.path.read_text() for source in find_standard_library().files]
    written = 0
    with path.open("w") as file:
        while written < megabytes * 1e6:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
                if written >= megabytes * 1e6:
                    break
    return round(written / 1e6, 3)


def compare(folder: Path, encoding: Encoding, repeats: int, megabytes: float) -> dict[str, Any]:
    laps = Laps(repeats)
    for repeat in laps:
        encode_raw(folder / "text.jsonl", encoding, laps)
        job = Job(find_inputs([str(folder / "text.jsonl")], "--input"), folder / f"out{repeat}", encoding)
        with laps.lap("ours"):
            preprocess(job, lambda _: None)
    raw_median, our_median = laps.medians()["raw"], laps.medians()["ours"]
    return {
        "raw_mb_per_second": round(megabytes / raw_median, 3),
        "preprocess_mb_per_second": round(megabytes / our_median, 3),
        "preprocess_over_raw": round(raw_median / our_median, 3),
        "raw_seconds": [round(seconds, 3) for seconds in laps.wall["raw"]],
        "preprocess_seconds": [round(seconds, 3) for seconds in laps.wall["ours"]],
        "raw_cpu_seconds": [round(seconds, 3) for seconds in laps.cpu["raw"]],
        "preprocess_cpu_seconds": [round(seconds, 3) for seconds in laps.cpu["ours"]],
        "preprocess_over_raw_by_cpu": round(
            statistics.median(laps.cpu["raw"]) / statistics.median(laps.cpu["ours"]), 3
        ),
    }


def encode_raw(path: Path, encoding: Encoding, laps: Laps) -> None:
    """Measure the bare tokenizer, without its preparation."""
    texts = [json.loads(line)["text"] for line in path.read_bytes().splitlines()]
    tokenizer = build_tokenizer(encoding.tokenizer)._tokenizer  # type: ignore[union-attr]  # without what we add to it
    with laps.lap("raw"):
        for first in range(0, len(texts), BATCH):
            tokenizer.encode_batch_fast(texts[first : first + BATCH], add_special_tokens=False)


def data_wait(folder: Path, steps: int) -> dict[str, Any]:
    """Return the share of a step that a replica's slowest rank waits for data, after the first record."""
    config = json.loads((ROOT / "configs" / "quickstart.json").read_text())
    config["training"] |= {"train_iters": steps, "log_interval": 5}
    config["training"] |= {"output_dir": str(folder / "run")}
    config |= {"evaluation": {"iters": 0}, "tensorboard": {"enabled": False}, "noloco": {"local_steps": 5}}
    config["scheduler"]["params"] |= {"total_num_steps": steps, "warmup_num_steps": 2}
    (folder / "run.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    command += ["-m", "megatron_noloco", "train", "--config", str(folder / "run.json")]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records = [row for log in RunLog(folder / "run").replicas for row in log.rows_of("step")[1:]]
    shares = [record["data/wait_seconds"] / record["speed/seconds_per_step"] for record in records]
    return {
        "seconds_per_step": round(
            statistics.median(record["speed/seconds_per_step"] for record in records), 4
        ),
        "data_wait_share_median": round(statistics.median(shares), 6),
        "data_wait_share_largest": round(max(shares), 6),
    }
