"""The model: a Llama stage built from Megatron-core, its process groups, and its pipeline schedule.

The only room that imports megatron.core; it never imports megatron.training (global arguments).
"""

import logging
import os
import warnings

import torch


def quieten() -> None:
    """Keep the engines' start-up chatter off the console; errors and our own lines remain.

    To be called before a module that imports Megatron-core or DeepSpeed.
    """
    warnings.filterwarnings("ignore", module=r"(megatron|deepspeed|apex)\b")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # It tells every process that there are CUDA's tools and no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to guess
