"""A model trained on a GPU in bf16 leaves as a Hugging Face folder; `export` itself compares the logits."""

import os
import sys
from pathlib import Path

import pytest

from tests.kit.ranks import run_launcher, run_torchrun
from tests.kit.tiny import tiny, write_config, write_text

pytestmark = pytest.mark.gpu


def test_two_replicas_that_share_a_gpu_and_their_mean(tmp_path: Path) -> None:
    raw = tiny(
        {
            "bf16": {"enabled": True},
            "parallel": {"replicas": 2},
            "data": {"text": write_text(tmp_path)},
            "training": {"output_dir": str(tmp_path / "run")},
            "checkpoint": {"save_interval": 6},
        }
    )
    arguments = ["train", "--config", write_config(tmp_path, raw)]
    finished = run_torchrun(
        2, "megatron_noloco", arguments, 300, {"DS_ACCELERATOR": os.environ["DS_ACCELERATOR"]}
    )
    assert finished.returncode == 0, finished.stderr
    export = [sys.executable, "-m", "megatron_noloco", "export", str(tmp_path / "run")]
    finished = run_launcher([*export, "--output", str(tmp_path / "exported")], 300, None)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "exported" / "model.safetensors").exists(), finished.stdout
