"""Makes Megatron-core run on a CPU; does nothing where CUDA is available.

Core writes `device="cuda"` or `torch.cuda.current_device()` into a handful of functions that offer no
argument for the device. On a CPU the name `torch` inside those modules is rebound to a proxy that uses "cpu" for
both and forwards everything else. `tests/references/test_contracts.py` fails when an upgrade moves a name.

Three more places of the package change other packages: `pipeline.groups` sets core's global groups,
`engine.initialize` tells DeepSpeed that it has no shared-memory all-reduce (beside a GPU: no NVML), and
`engine.gradients` replaces methods of its ZeRO optimizer.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers, mappings, random
from megatron.core.utils import GlobalMemoryBuffer

_MODULES_THAT_NAME_CUDA = (
    schedules,  # the token counter of each schedule
    mappings,  # gather and reduce-scatter buffers of tensor and sequence parallelism
    layers,  # gradient buffer of sequence parallelism
    rotary_pos_embedding,  # moves its frequencies to the current CUDA device
    yarn_rotary_pos_embedding,  # the same
)


class _HostCuda:
    """Proxy of `torch.cuda` whose current device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> str:
        return "cpu"


class _HostTorch:
    """Proxy of `torch` that makes tensors for "cuda" on the CPU."""

    cuda = _HostCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)


class _HostMemoryBuffer(GlobalMemoryBuffer):
    """Core's scratch buffers for sequence parallelism, in host memory."""

    def get_tensor(
        self, tensor_shape: Any, dtype: torch.dtype, name: str, mem_alloc_context: Any = None
    ) -> torch.Tensor:
        required = torch.Size(tensor_shape).numel()
        buffer = self.buffer.get((name, dtype))
        if buffer is None or buffer.numel() < required:
            buffer = self.buffer[(name, dtype)] = torch.empty(required, dtype=dtype)
        return buffer[:required].view(*tensor_shape)


def _no_cuda_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _keep_rng_state(*_: Any, **__: Any) -> None:
    return None


def prepare() -> None:
    """Make core usable on a CPU; do nothing where CUDA is available. May be called twice."""
    if torch.cuda.is_available():
        return
    for module in _MODULES_THAT_NAME_CUDA:
        module.torch = _HostTorch()
    # Activation recompute saves and restores the CUDA generator; the CPU generator is saved by core as well.
    random._get_cuda_rng_state = _no_cuda_rng_state
    random._set_cuda_rng_state = _keep_rng_state
    parallel_state._GLOBAL_MEMORY_BUFFER = _HostMemoryBuffer()
