"""Which loops can be attached to."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_noloco.attach.trained import ReplicatedWeights, Trained, here


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
        return _trained_by_torch(engine)
    raise ValueError(
        f"attach: a {type(engine).__name__} is none of DeepSpeed's engine, a torch module (in "
        "DistributedDataParallel where the job has several ranks), Megatron-core's distributed optimizer"
    )


def _trained_by_torch(module: nn.Module) -> Trained:
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    group: dist.ProcessGroup | None = None
    if isinstance(module, DistributedDataParallel):
        group = module.process_group
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if any(hasattr(parameter, "to_local") for parameter in parameters):  # DTensors
        raise ValueError(
            "attach: parameters that are DTensors (FSDP, tensor parallelism of torch) are not supported; use "
            "DistributedDataParallel, or DeepSpeed's engine, whose ZeRO stages 1 to 3 divide the weights likewise"
        )
    return Trained(
        ReplicatedWeights(parameters, group),
        [here()[0]] if group is None else dist.get_process_group_ranks(group),
        (
            "wrap the model in DistributedDataParallel, with "
            "process_group=ReplicaGroups({replicas}).get_data_parallel_group()",
            "wrap the model in DistributedDataParallel, without process_group",
        ),
    )
