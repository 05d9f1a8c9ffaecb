"""Accelerate's FSDP on a CPU, for tests: run a script with it.

    ACCELERATE_USE_FSDP=true FSDP_VERSION=2 torchrun ... tests/kit/fsdp_on_cpu.py SCRIPT ARGUMENTS

Accelerate 1.15 has FSDP on accelerators only, though torch's `fully_shard` runs over gloo.
"""

import runpy
import sys
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType

_on_accelerators = AcceleratorState.__init__


def _on_cpus(state: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _on_accelerators(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


if __name__ == "__main__":
    AcceleratorState.__init__ = _on_cpus  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    torch.set_num_threads(1)
    runpy.run_path(sys.argv[0], run_name="__main__")
