"""What is attached to: the weights of a loop, and how far its gradients are reduced."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.outer import Weights
from megatron_noloco.outer.weights import check_sound


def here() -> tuple[int, int]:
    """This rank, and the ranks of this job; without torch.distributed it is the only one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@dataclass(frozen=True)
class Trained:
    """What `attach` knows of a loop.

    Attributes:
        weights: of this rank.
        reduced_over: ranks of this job over which gradients are reduced; None where this cannot be asked.
        remedy: what to change where these are not the ranks of the replica, in one job and where the job is the
            replica.
        steps: counts the optimizer's steps; None where each call of `Attached.step` follows one.
        check_all: raises ValueError where more is trained than the weights.
        while_attached: a context in which what would change the weights behind the rounds is refused.
    """

    weights: Weights
    reduced_over: Sequence[int] | None
    remedy: tuple[str, str]
    steps: Callable[[], int] | None = None
    check_all: Callable[[], None] = lambda: None
    while_attached: Callable[[], AbstractContextManager[None]] = nullcontext


class ReplicatedWeights(Weights):
    """Weights of which all data-parallel ranks of a replica hold a copy. Each rank exchanges a part of its own.

    Rank d of D has elements n d // D .. n (d + 1) // D, and after a round the ranks give each other their parts:
    D - 1 broadcasts' worth of traffic inside the replica, and 1 / D of the outer state on each rank.

    Args:
        tensors: floating, contiguous, in the same order on all ranks of the group.
        group: the ranks that hold copies; None: this rank alone.
        rounded: pairs of one of the tensors and what is computed with, into which it is rounded after a round.

    Raises ValueError for no tensors, and as `check_sound` does.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        rounded: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        for index, tensor in enumerate(tensors):
            check_sound(f"weight {index}", tensor)
        if not tensors:
            raise ValueError("there are no weights that are trained")
        self._tensors = tensors
        self._group = group
        self._ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self._place = 0 if group is None else dist.get_rank(group)
        self._rounded = rounded

    def parts(self) -> Sequence[Tensor]:
        return self._part(self._place)

    @torch.no_grad()
    def refresh(self) -> None:
        """A collective of the replica: every rank gives the others its part."""
        if len(self._ranks) > 1:
            under_way = [
                dist.broadcast(piece, owner, self._group, async_op=True)
                for place, owner in enumerate(self._ranks)
                for piece in self._part(place)
            ]
            for one in under_way:
                one.wait()
        for exact, rounded in self._rounded:
            rounded.copy_(exact)

    def _part(self, place: int) -> list[Tensor]:
        """Views of the tensors: the elements that the rank at this place of the group exchanges."""
        total, places = sum(tensor.numel() for tensor in self._tensors), len(self._ranks)
        start, stop = total * place // places, total * (place + 1) // places
        views, end = [], 0
        for tensor in self._tensors:
            begin, end = end, end + tensor.numel()
            first, last = max(start, begin), min(stop, end)
            if first < last:
                views.append(tensor.detach().view(-1)[first - begin : last - begin])
        return views
