"""Metrics whose rows a test can look at."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_noloco.monitor.metrics import Metrics


class Rows(list[dict[str, Any]]):
    """A writer that keeps the rows."""

    def write(self, row: Mapping[str, Any]) -> None:
        self.append(dict(row))

    def close(self) -> None: ...


def begin(counters: Mapping[str, float] | None = None) -> tuple[Metrics, Rows]:
    """Return metrics of replica 0, which has all ranks, and what they write."""
    rows = Rows()
    assert dist.group.WORLD is not None
    return Metrics(0, dist.group.WORLD, [rows], counters), rows


STEP = {
    "kind": "step",
    "step": 20,
    "replica": 0,
    "train/consumed_samples": 640,
    "speed/seconds_per_step": 0.1234,
    "speed/tokens_per_second": 5186.4,
    "speed/tokens_per_second_of_all": 5186.4,
    "speed/tflops_per_gpu": 0.00123456,
    "memory/peak_bytes": 412_000_000,
    "train/learning_rate": 0.003,
    "train/loss": 2.34567,
    "train/grad_norm": 0.98765,
    "train/loss_scale": 1.0,
    "train/skipped_steps": 0,
    "routing/share": 0.0,
    "routing/wait_seconds": 0.01,
    "data/wait_seconds": 0.001,
    "total/sent_bytes": 2_500_000,
}
ROUND = {
    "round/index": 1,
    "round/partners": [3],
    "round/exchange_seconds": 0.0123,
    "round/wait_seconds": 0.0045,
    "round/sent_bytes": 1_480_000,
    "round/spread": 0.00123,
    "round/poisoned_elements": 0,
    "round/payload_error": 0.0,
    "round/resent_elements": 0,
}


def step(number: int, **more: Any) -> dict[str, Any]:
    speed = {"speed/seconds_per_step": 2.0, "speed/tokens_per_second": 1000.0}
    return {"kind": "step", "step": number, "train/loss": 3.0 - number / 10, **speed, **more}


def meeting(index: int, *partners: int, **more: Any) -> dict[str, Any]:
    numbers = {"round/index": index, "round/spread": 0.002, "round/pause_seconds": 0.1}
    return {**numbers, "round/partners": list(partners), **more}


def write(run: Path, replica: str, *rows: dict[str, Any]) -> Path:
    path = run / f"replica_{replica}" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
