"""Import torch, Megatron-core and DeepSpeed quickly and without their messages."""

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Turn the garbage collector off around imports of torch and the engines.

    They make half a million objects, which stay. The collector would look at them again and again; afterwards
    it leaves them out for good.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def before_engines() -> None:
    """Keep the engines' start-up messages off the console, and torch's compiler out of a process without a GPU.

    To be called before the import of a module that imports them. Errors and our own lines remain.
    """
    import torch

    warnings.filterwarnings("ignore", module=r"(megatron|deepspeed|apex)\b")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # It would report in every process that there are CUDA's tools and no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to guess
        # Core's fused functions load torch's compiler, a second for each rank, and are not used here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
