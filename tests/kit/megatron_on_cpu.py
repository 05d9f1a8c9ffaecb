"""Megatron-core's DistributedDataParallel and distributed optimizer on a CPU, for tests: run a script with them.

    torchrun ... tests/kit/megatron_on_cpu.py SCRIPT ARGUMENTS

Core makes tensors on "cuda" by name, asks for the type of a parameter by that of a CUDA tensor, and gathers
tensors of different lengths.
"""

import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_noloco.pipeline import cpu


class OnCpu(TorchFunctionMode):
    """What is asked for on "cuda" is made in host memory, whose tensors call themselves CUDA tensors."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is dist.all_gather and len({piece.shape for piece in args[0]}) > 1:
            return gather(*args, options["group"])
        result = function(*args, **options)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def gather(pieces: Sequence[Tensor], own: Tensor, group: dist.ProcessGroup) -> None:
    """Gather pieces of different lengths, as NCCL does and gloo does not."""
    pieces[dist.get_rank(group)].copy_(own)
    for rank, piece in enumerate(pieces):
        dist.broadcast(piece, group=group, group_src=rank)


def prepare() -> OnCpu:
    """To be entered around what uses core."""
    cpu.prepare()
    parallel_state._GLOBAL_MEMORY_BUFFER = None  # the script makes it
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.current_stream = lambda: None
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    return OnCpu()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    torch.set_num_threads(1)
    with prepare():
        runpy.run_path(sys.argv[0], run_name="__main__")
