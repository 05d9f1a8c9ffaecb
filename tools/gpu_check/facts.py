"""Measure on one GPU what the code and `plan` take for granted, and no CPU can tell.

Prints JSON; the figure has: whether torch.cuda.is_available() leaves the driver alone, so that
CUDA_DEVICE_MAX_CONNECTIONS may be set after it; GB of a CUDA context and of NCCL's communicator of one rank;
seconds to pin 1 GB of host memory; GB/s over the bus from pinned and from other memory. "peer" is what is assumed.
Other processes on the GPU count as its context.
"""

import ctypes
import json
import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.outer.vectors import HOST, buffer

_ELEMENTS = 1 << 28  # 1 GiB
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def main() -> None:
    untouched = driver_is_untouched()
    torch.ones(1, device="cuda")
    context = used() / 1e9
    on_gpu, pageable = torch.empty(_ELEMENTS, device="cuda"), torch.ones(_ELEMENTS)
    pinning, pinned = timed(partial(buffer, _ELEMENTS, HOST))
    fast, slow = (4e-9 * _ELEMENTS / timed(partial(on_gpu.copy_, host))[0] for host in (pinned, pageable))
    before = used()
    with TemporaryDirectory() as folder:
        dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        communicator = (used() - before) / 1e9
        dist.destroy_process_group()
    figure = f"driver untouched {untouched}; context {context:.2f} GB, communicator {communicator:.2f} GB; "
    figure += f"pin 1 GiB {pinning:.2f} s; to the GPU {fast:.0f} GB/s pinned, {slow:.0f} not"
    print(
        json.dumps({"figure": figure, "peer": "True; 0.5, 0.51 with NCCL 2.28; 0.3 to 1; 25 to 50, 3 to 6"})
    )


def driver_is_untouched() -> bool:
    """Return whether CUDA's driver is not initialised after torch has been asked for a GPU."""
    torch.cuda.is_available()
    count = ctypes.c_int()
    return ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) == _NOT_INITIALIZED


def used() -> int:
    """Return the bytes of the GPU that are in use, less torch's own."""
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    return whole - free - torch.cuda.memory_reserved()


def timed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    made = work()
    torch.cuda.synchronize()
    return time.perf_counter() - started, made


if __name__ == "__main__":
    main()
