"""A process in which Megatron-core and DeepSpeed were imported beside the simulated GPU.

Both look for CUDA when they are imported, so the process of the tests, which has imported them on a CPU, cannot
fork ranks with a GPU.
"""

import gc
import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from tests.simulated_gpu.gpu import installed

_for_good = ExitStack()


class GpuProcess:
    """Runs functions of modules in a process of its own, which imports what they need once."""

    def __init__(self) -> None:
        _import_engines()  # here as well, for the ranks on CPUs that are forked from this process
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start)

    def run_ranks(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120
    ) -> Any:
        """Do as `harness.run_ranks`; each rank has a GPU, but `function` has to make its `Gpu`."""
        return self._pool.submit(_run_ranks, world_size, function, args, timeout).result()

    def close(self) -> None:
        self._pool.shutdown()


def _start() -> None:
    os.environ |= {"DS_ACCELERATOR": "cuda", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    torch.set_num_threads(1)
    _for_good.enter_context(installed())
    _import_engines()
    gc.freeze()  # DeepSpeed collects garbage often, which is to pass over what was imported


def _import_engines() -> None:
    """Import what each rank would import late."""
    for module in ("tests.kit.tiny", "deepspeed.compile.backend"):
        importlib.import_module(module)


def _run_ranks(world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    from tests.kit.ranks import run_ranks

    return run_ranks(world_size, function, *args, timeout=timeout)
