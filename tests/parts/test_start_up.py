"""What is set before torch is asked for a GPU."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.job.start_up import before_engines
from megatron_noloco.training.prepare import prepare
from tests.kit.tiny import tiny


class AskedError(Exception):
    """Ends the start when torch is asked for a GPU."""


@pytest.mark.parametrize(
    ("start", "asks_nvml"),
    [(partial(prepare, RunConfig(**tiny({})), {}), True), (before_engines, False)],
    ids=["train", "others"],
)
def test_only_train_has_torch_look_for_gpus_without_cuda(
    start: Callable[[], object], asks_nvml: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reads CUDA_DEVICE_MAX_CONNECTIONS when it is initialized, and `train` sets that later.

    Others compute on the CPU where CUDA cannot use a GPU.
    """
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "")  # also put back
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")

    def is_available() -> bool:
        raise AskedError

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    with pytest.raises(AskedError):
        start()
    assert (os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1") is asks_nvml
