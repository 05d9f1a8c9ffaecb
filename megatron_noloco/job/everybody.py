"""Small values of the ranks of this job, by collectives: for the start, and between local phases."""

from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def of_all_ranks(value: Value) -> list[Value]:
    """That of every rank, in their order; without torch.distributed this one is the only rank."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def of_rank_0(value: Value) -> Value:
    """That of rank 0, on every rank; without torch.distributed its own."""
    holder = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(holder, src=0)
    return holder[0]
