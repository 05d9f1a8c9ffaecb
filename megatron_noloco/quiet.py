"""The engines' start-up messages, kept off the console."""

import logging
import os
import warnings


def quieten() -> None:
    """Errors and our own lines remain. To be called before a module that imports Megatron-core or DeepSpeed."""
    import torch

    warnings.filterwarnings("ignore", module=r"(megatron|deepspeed|apex)\b")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Every process would report that there are CUDA's tools and no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to guess
