"""Tests that need a GPU: skipped elsewhere. `make gpu-check` runs them; most of them ran once on an H100."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # before deepspeed


@pytest.fixture(scope="session", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as the only rank, on GPU 0."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
