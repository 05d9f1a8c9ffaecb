"""Two replicas of two stages over NCCL, with routes, against the same run over gloo on the CPU."""

from pathlib import Path

import pytest
import torch

from tests.kit.ranks import run_torchrun
from tests.kit.tiny import metrics, tiny, write_config, write_text

pytestmark = pytest.mark.gpu

RANKS = 4


def losses(folder: Path, text: str, environ: dict[str, str]) -> list[list[float]]:
    raw = tiny(
        {
            "parallel": {"replicas": 2, "pipeline_model_parallel_size": 2},
            "noloco": {"routing": "microbatch"},
            "model": {"transformer_impl": "local"},
            "data": {"text": text},
            "training": {"output_dir": str(folder / "run")},
        }
    )
    arguments = ["train", "--config", write_config(folder, raw)]
    finished = run_torchrun(RANKS, "megatron_noloco", arguments, 240, environ)
    assert finished.returncode == 0, finished.stderr
    return [[row["train/loss"] for row in rows] for rows in metrics(folder / "run")]


def test_routed_stages_train_as_on_a_cpu(tmp_path: Path) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"{RANKS} GPUs are needed")
    text = write_text(tmp_path)
    on_gpus = losses(tmp_path / "gpus", text, {"DS_ACCELERATOR": "cuda"})
    on_cpus = losses(tmp_path / "cpus", text, {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""})
    for found, expected in zip(on_gpus, on_cpus, strict=True):
        assert found == pytest.approx(expected, abs=1e-3)
