"""What a run makes of its devices: tokens and floating-point operations per second, memory."""

import resource
from dataclasses import dataclass

import torch

from megatron_noloco.monitor import MEAN, Record


@dataclass(frozen=True)
class Throughput:
    """What a local step of one replica computes, and on what.

    Attributes:
        tokens: of the replica's batch.
        replicas: of the run.
        flops_per_rank: floating-point operations of the replica's batch (see `training_flops`), over its ranks.
        peak_tflops: of a rank's device; None where it is not known.
    """

    tokens: int
    replicas: int
    flops_per_rank: float
    peak_tflops: float | None = None

    def record(self, seconds_per_step: float, record: Record) -> None:
        """That of an interval. All replicas are counted as this one, so that nobody has to be asked."""
        tokens_per_second = self.tokens / seconds_per_step
        tflops = self.flops_per_rank / seconds_per_step / 1e12
        record("speed/seconds_per_step", seconds_per_step, MEAN)
        record("speed/tokens_per_second", tokens_per_second, MEAN)
        record("speed/tokens_per_second_of_all", self.replicas * tokens_per_second, MEAN)
        record("speed/tflops_per_gpu", tflops, MEAN)
        if self.peak_tflops is not None:
            record("speed/mfu", tflops / self.peak_tflops, MEAN)


def peak_memory_bytes() -> int:
    """The most that this process has held so far: of GPU memory, what torch's tensors took; on a CPU, resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
