"""A torch module that somebody else trains, alone or in DistributedDataParallel."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_noloco.attach.trained import ReplicatedWeights, Trained, here
from megatron_noloco.outer.weights import check_sound

_DIVIDED = (
    "attach: {what} are not supported; use DistributedDataParallel, or DeepSpeed's engine, whose ZeRO stages 1 to "
    "3 divide the weights likewise"
)


def trained_by_torch(module: nn.Module) -> Trained:
    """Raises ValueError for weights that are divided by torch, and for one that cannot be exchanged."""
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    group = module.process_group if isinstance(module, DistributedDataParallel) else None
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    _check_wrappers(module)
    if any(hasattr(parameter, "to_local") for parameter in trained.values()):  # DTensors
        raise ValueError(
            _DIVIDED.format(what="parameters that are DTensors (FSDP, tensor parallelism of torch)")
        )
    for name, parameter in trained.items():
        check_sound(name, parameter)
    attached = {id(parameter) for parameter in trained.values()}
    return Trained(
        ReplicatedWeights(list(trained.values()), group),
        [here()[0]] if group is None else dist.get_process_group_ranks(group),
        (
            "wrap the model in DistributedDataParallel, with "
            "process_group=ReplicaGroups({replicas}).get_data_parallel_group()",
            "wrap the model in DistributedDataParallel, without process_group",
        ),
        check_all=partial(_check_nothing_more, module, attached),
        while_attached=partial(_refusing_loads, module),
    )


def _check_wrappers(module: nn.Module) -> None:
    for name, part in module.named_modules():
        # By its name: to import it takes a second.
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(part).__mro__):
            raise ValueError(_DIVIDED.format(what="the flat parameters of FullyShardedDataParallel"))
        if name and isinstance(part, DistributedDataParallel) and part.process_group.size() > 1:
            raise ValueError(
                f"attach: the gradients of {name} are reduced by a DistributedDataParallel of its own; wrap the "
                "whole model instead"
            )


def _check_nothing_more(module: nn.Module, attached: set[int]) -> None:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in attached:
            raise ValueError(
                f"{name} is trained now, and was not when the model was attached: it would not be exchanged; call "
                "average() and close() before more is trained, and attach again after it"
            )


@contextmanager
def _refusing_loads(module: nn.Module) -> Iterator[None]:
    hooks = [
        part.register_load_state_dict_pre_hook(partial(_refuse_load, id(part))) for part in module.modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_load(attached: int, module: nn.Module, *_: object) -> None:
    """A hook, which copies of the module have as well: they may load."""
    if id(module) == attached:
        raise ValueError(
            "load_state_dict of a model that is attached: the next round would undo it; load first, attach last"
        )
