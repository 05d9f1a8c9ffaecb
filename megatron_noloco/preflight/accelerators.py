"""Peak throughput and memory of GPUs."""

import re
from dataclasses import dataclass

import torch

from megatron_noloco.model.architecture import Precision


@dataclass(frozen=True)
class Accelerator:
    """A model of GPU.

    Attributes:
        words: words that CUDA's name of the device must contain; beside them it may have only `_IGNORED_WORDS` and
            the size of the memory.
        tflops: peak of dense bf16 and fp16 products accumulated in fp32, in 10^12 operations per second.
        gigabytes: memory in 10^9 bytes.
    """

    words: str
    tflops: float
    gigabytes: float

    def peak(self, precision: Precision) -> float | None:
        """Return the peak in this precision; None where it is not known."""
        return None if precision == "fp32" else self.tflops


# The first match counts. From NVIDIA's data sheets; their figures for Hopper, Ada and Blackwell are with sparsity,
# twice as large: H100 (resources.nvidia.com, "H100 Tensor Core GPU"), H200, A100 (of 40 or 80 GB), L40S, HGX B200;
# GeForce: "NVIDIA Ada GPU Architecture" and "NVIDIA Ampere GA102 GPU Architecture", appendices A.
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
# Words that do not tell two models apart. A "4090 D" and a "4090 Laptop GPU" have other figures than a 4090.
# GH200 is named by the memory of its CPU.
_IGNORED_WORDS = {"nvidia", "geforce", "rtx", "tesla", "gpu", "pcie", "sxm", "sxm4", "sxm5", "sxm6"}
_IGNORED_WORDS |= {"hbm2", "hbm2e", "hbm3", "hbm3e", "480gb"}


def find_accelerator(name: str) -> Accelerator | None:
    """Return the accelerator with this name, given by CUDA or a part of that, in capitals or not.

    None: not known, such as another model of the same chip, or a slice of a GPU (MIG).
    """
    words = set(re.findall(r"\w+", name.lower()))
    for kind in ACCELERATORS:
        own = set(kind.words.lower().split())
        if own <= words <= own | _IGNORED_WORDS | {f"{kind.gigabytes:g}gb"}:
            return kind
    return None


def peak_tflops_here(precision: Precision) -> float | None:
    """Return the peak of this rank's GPU; None where it is not known, and on a CPU."""
    here = find_accelerator(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if here is None else here.peak(precision)
