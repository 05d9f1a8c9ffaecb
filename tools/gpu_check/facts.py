"""Measure on one GPU what the code and `plan` take for granted, and no CPU can tell.

Prints JSON; the figure has: whether a stream waits for another, as CUDA_DEVICE_MAX_CONNECTIONS=1 makes it, where
the variable is not set, set before torch is asked for a GPU, and after; GB of a CUDA context; seconds to pin 1
GB of host memory; GB/s over the bus from pinned and from other memory; GB of NCCL's communicator of one rank.
"peer" is what is assumed. Other processes on the GPU count as its context.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.job.start_up import before_engines, find_gpus_without_cuda
from megatron_noloco.outer.vectors import HOST, buffer

_ELEMENTS = 1 << 28  # 1 GiB
_CYCLES = 100_000_000  # of a kernel that does nothing: some 50 ms


def main() -> None:
    found = list[str]()
    try:
        measure(found)
    finally:
        peer = "[False, True, True]; 0.5; 0.3 to 1; 25 to 50, 3 to 6; 0.51 with NCCL 2.28"
        print(json.dumps({"figure": "; ".join(found), "peer": peer}))


def measure(found: list[str]) -> None:
    """Append what is measured, one after the other."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        waits = pool.map(stream_waits, ("", "before", "after"), chunksize=1)
    found.append(f"a stream waits: {waits}")
    torch.ones(1, device="cuda")
    found.append(f"context {used() / 1e9:.2f} GB")
    on_gpu, pageable = torch.empty(_ELEMENTS, device="cuda"), torch.ones(_ELEMENTS)
    pinning, pinned = timed(partial(buffer, _ELEMENTS, HOST))
    found.append(f"pin 1 GiB {pinning:.2f} s")
    fast, slow = (4e-9 * _ELEMENTS / timed(partial(on_gpu.copy_, host))[0] for host in (pinned, pageable))
    found.append(f"to the GPU {fast:.0f} GB/s pinned, {slow:.0f} not")
    before = used()
    with TemporaryDirectory() as folder:
        dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        found.append(f"communicator {(used() - before) / 1e9:.2f} GB")
        dist.destroy_process_group()


def stream_waits(when: str) -> bool:
    """Return whether a kernel of one stream waits for a kernel of another that was queued before it.

    Args:
        when: CUDA_DEVICE_MAX_CONNECTIONS=1 is set, "before" or "after" `before_engines`, which asks torch for a
            GPU; "": not at all.
    """
    find_gpus_without_cuda()
    for moment in ("before", "after"):
        if when == moment:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        before_engines()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    ends = []
    for stream, kernels in ((busy, 2), (other, 1)):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_CYCLES)
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
            if kernels == 2:  # cannot start before the first has ended
                torch.cuda._sleep(_CYCLES)
    torch.cuda.synchronize()
    return ends[0].elapsed_time(ends[1]) > 0.5 * _CYCLES / 2e6  # ms, at 2 GHz


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
