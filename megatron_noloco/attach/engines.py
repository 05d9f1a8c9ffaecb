"""Which loops can be attached to."""

from typing import Any

from torch import nn

from megatron_noloco.attach.torch_module import trained_by_torch
from megatron_noloco.attach.trained import Trained


def trained_by(engine: Any) -> Trained:
    """Raises ValueError for what cannot be attached to."""
    packages = {cls.__module__.partition(".")[0] for cls in type(engine).__mro__}
    if "deepspeed" in packages and hasattr(engine, "global_steps"):
        from megatron_noloco.attach.deepspeed_engine import trained_by_deepspeed

        return trained_by_deepspeed(engine)
    if "megatron" in packages and hasattr(engine, "step"):
        from megatron_noloco.attach.megatron_optimizer import trained_by_megatron

        return trained_by_megatron(engine)
    if isinstance(engine, nn.Module) and not hasattr(engine, "ddp_config"):  # which Megatron-core's DDP has
        return trained_by_torch(engine)
    raise ValueError(
        f"attach: a {type(engine).__name__} is none of DeepSpeed's engine, a torch module (in "
        "DistributedDataParallel where the job has several ranks), Megatron-core's distributed optimizer"
    )
