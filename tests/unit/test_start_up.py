"""What `before_engines` sets before torch is asked for a GPU."""

import os

import pytest
import torch

from megatron_noloco.job.start_up import before_engines


def test_torch_looks_for_gpus_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reads CUDA_DEVICE_MAX_CONNECTIONS when it is initialized, and `train` sets that later."""
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    asked = list[str | None]()
    monkeypatch.setattr(
        torch.cuda,
        "is_available",
        lambda: bool(asked.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))),
    )
    before_engines()
    assert asked == ["1"]
