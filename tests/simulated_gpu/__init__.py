"""Tests of the code for GPUs on a machine without a GPU.

The simulated device needs torch alone, without CUDA. Its memory is the host's, its kernels are torch's for CPUs.
The faults that only a GPU shows are simulated:

- A tensor made for, or moved to, "cuda" says that it is there (`device`, `is_cuda`). An operator over tensors of
  both kinds of memory raises CUDA's error, `numpy` as well.
- A kernel is only queued. It runs when the host waits for its stream: for a blocking copy, `item`, `synchronize`,
  an event. New device memory is NaN, so what is read too early spoils the numbers. A copy from or to pinned
  memory takes what lies there when it runs. Hence a missing wait shows as other numbers than a CPU's.
- Two streams that are not ordered run in one of several orders (`Order`): a race may need one of them to show.
- Memory that is freed while a kernel of another stream may still use it is an error, without `record_stream`.
  So is host memory that the program has pinned itself, freed while a copy from or to it is queued.
- `Gpu.waits` has the source line of each wait of the host, also of those inside torch.
- Random numbers come from the device's own generator, as it was when their kernel was queued.

Messages are gloo's, sent when they are asked for. `nccl_order` looks at their order: it records what each rank
asks of NCCL, and plays all ranks by NCCL's rules.

Not simulated: the numerics, speed and memory of a GPU's kernels, Triton, Transformer Engine, FusedAdam, NCCL's
own stream, several threads with one GPU.
"""

from tests.simulated_gpu.gpu import Gpu, installed
from tests.simulated_gpu.streams import Order, RaceError, Wait

__all__ = ["Gpu", "Order", "RaceError", "Wait", "installed"]
