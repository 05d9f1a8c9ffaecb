"""What Megatron-core and DeepSpeed read of their surroundings when they are imported."""

import logging
import os
import warnings


def before_engines() -> None:
    """Keep the engines' start-up messages off the console, and torch's compiler out of a process without a GPU.

    To be called before a module that imports them. Errors and our own lines remain.
    """
    import torch

    warnings.filterwarnings("ignore", module=r"(megatron|deepspeed|apex)\b")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Every process would report that there are CUDA's tools and no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to guess
        # Core's fused functions load torch's compiler, a second for each rank, and are not used here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
