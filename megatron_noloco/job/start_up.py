"""Makes imports of torch, Megatron-core and DeepSpeed quick and silent."""

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def importing() -> Iterator[None]:
    """Turn the garbage collector off around imports of torch and the engines.

    The imports make half a million objects that stay. The collector would traverse them again and again; after
    the block it ignores them (`gc.freeze`).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def before_engines() -> None:
    """Keep the engines' start-up messages off the console, and torch's compiler out of a process without a GPU.

    Call it before the first import of an engine. Errors and this package's own messages remain.
    """
    import torch

    warnings.filterwarnings("ignore", module=r"(megatron|deepspeed|apex)\b")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Every process would report that there are CUDA's tools but no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to guess
        # Core's fused functions, which are not used here, would load torch's compiler: a second for each rank.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def find_gpus_without_cuda() -> None:
    """Have torch look for GPUs without CUDA, for a program that calls `set_device` before it uses one.

    Call it before torch is asked for a GPU. Else `is_available` initializes CUDA, which may read
    CUDA_DEVICE_MAX_CONNECTIONS (`training.start`) then.
    Other programs ask CUDA: a GPU that is found without it may be of no use, where the driver is too old.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress what DeepSpeed logs and prints inside the block, but for errors."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with open(os.devnull, "w") as null, redirect_stdout(null):
            yield
    finally:
        logger.setLevel(level)
