"""GPUs: what they compute, and what they hold."""

import re
from dataclasses import dataclass

import torch

from megatron_noloco.model.architecture import Precision


@dataclass(frozen=True)
class Accelerator:
    """A kind of GPU.

    Attributes:
        words: all of them are words of the name that CUDA gives it.
        tflops: dense, in bf16 and fp16, accumulated in fp32, 10^12 operations per second.
        gigabytes: of memory, 10^9 bytes.
    """

    words: str
    tflops: float
    gigabytes: float


# The first whose words fit counts. From NVIDIA's data sheets, which give twice as many operations for Hopper, Ada
# and Blackwell, with sparsity: H100 (resources.nvidia.com, "H100 Tensor Core GPU"), H200, A100 (of 40 or 80 GB),
# L40S, HGX B200; GeForce: "NVIDIA Ada GPU Architecture" and "NVIDIA Ampere GA102 GPU Architecture", appendices A.
ACCELERATORS = (
    Accelerator("H100 PCIe", 756.0, 80),
    Accelerator("H100 NVL", 835.0, 94),
    Accelerator("H100", 989.0, 80),
    Accelerator("H200 NVL", 835.0, 141),
    Accelerator("H200", 989.0, 141),
    Accelerator("GH200", 989.0, 96),
    Accelerator("B200", 2250.0, 180),
    Accelerator("A100 40GB", 312.0, 40),
    Accelerator("A100", 312.0, 80),
    Accelerator("L40S", 362.0, 48),
    Accelerator("4090", 165.2, 24),
    Accelerator("3090", 71.0, 24),
)


def find_accelerator(name: str) -> Accelerator | None:
    """By the name that CUDA gives a GPU, or a part of it; None: not known, or a slice of one (MIG)."""
    words = set(re.findall(r"\w+", name))
    if "MIG" in words:
        return None
    return next((kind for kind in ACCELERATORS if words.issuperset(kind.words.split())), None)


def peak_tflops(device: str, precision: Precision) -> float | None:
    """Of a whole GPU, by the name that CUDA gives it, in dense products of the precision; None: not known."""
    kind = find_accelerator(device)
    return None if kind is None or precision == "fp32" else kind.tflops


def peak_tflops_here(precision: Precision) -> float | None:
    """Of the device of this rank; None on a CPU."""
    return peak_tflops(torch.cuda.get_device_name(), precision) if torch.cuda.is_available() else None
