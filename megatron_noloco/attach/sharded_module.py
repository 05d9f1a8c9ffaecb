"""Weights that torch divides among ranks: DTensors, of `fully_shard` (FSDP2) or tensor parallelism.

Inside one job each rank exchanges the pieces that it holds with the rank at the same place of the partner's
replica, and between jobs through its leader (`federation.movement`). No rank gathers the model for a round.
`fully_shard` keeps the parameters in the precision that they had before it, and its `MixedPrecisionPolicy` rounds
what it gathers for the forward pass.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megatron_noloco.errors import UserError
from megatron_noloco.outer import TorchWeights, Weights
from megatron_noloco.outer.weights import check_sound
from megatron_noloco.plans.canonical import Matrix, Rectangle, box


def is_divided(parameter: Tensor) -> bool:
    """Return whether a parameter is a DTensor. Asks for a method: an import of DTensor takes a second."""
    return hasattr(parameter, "to_local")


def local_part(parameter: Any) -> Tensor:
    """Return this rank's piece of a parameter that is a DTensor; of any other the whole."""
    part: Tensor = parameter.to_local() if is_divided(parameter) else parameter
    return part


def places_of(parameter: Any, matrix: Matrix) -> Iterator[Rectangle]:
    """Yield the rectangles of a DTensor's matrix that make up this rank's piece; of any other tensor the whole."""
    if not is_divided(parameter):
        yield matrix.whole
        return
    for chunk in parameter.__create_chunk_list__() if local_part(parameter).numel() else ():
        yield from box(parameter.shape, chunk.offsets, chunk.sizes)


def locally(tensors: Iterable[Tensor]) -> Weights:
    """Show this rank's pieces of DTensors."""
    return TorchWeights(local_part(tensor).detach() for tensor in tensors)


def reshard(module: nn.Module) -> None:
    """Free what `fully_shard` has gathered, so that the module has its divided parameters again.

    After a forward pass without backward (an evaluation) it keeps the gathered parameters of the whole model for
    the next one, which would then not see what was written to the divided ones.
    """
    for part in divided_modules(module):
        part.reshard()


def divided_modules(module: nn.Module) -> Iterator[Any]:
    """Yield the parts of a module to which `fully_shard` was applied."""
    for part in module.modules():
        if any(cls.__name__ == "FSDPModule" for cls in type(part).__mro__):
            yield part


class ShardedWeights(Weights):
    """Shows this rank's pieces of parameters that are DTensors.

    Args:
        module: that has the parameters.
        parameters: those that are trained, by name.

    Attributes:
        ranks: of this job, that have a piece of any of the parameters.

    Raises UserError for a parameter that is no DTensor, and as `check_sound` does.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._module = module
        self._parameters: Sequence[Any] = list(parameters.values())
        for name, parameter in parameters.items():
            if not is_divided(parameter):
                raise UserError(
                    f"attach: {name} is no DTensor, others are: its gradient would not be reduced; apply "
                    "fully_shard to the whole model, too"
                )
        for name, piece in zip(parameters, self._pieces(), strict=True):
            check_sound(f"this rank's piece of {name}", piece)
        meshes = (parameter.device_mesh.mesh.flatten().tolist() for parameter in self._parameters)
        self.ranks = sorted(set(chain.from_iterable(meshes)))

    def parts(self) -> list[Tensor]:
        return [piece.view(-1) for piece in self._pieces()]

    def refresh(self) -> None:
        """Have the next forward pass gather the parameters anew, after what is queued here.

        It would not wait for this round where the loop has set an event of its own after its optimizer's step.
        """
        reshard(self._module)
        if torch.cuda.is_available():
            written = torch.cuda.current_stream().record_event()
            for part in divided_modules(self._module):
                part.set_post_optim_event(written)

    def copied(self) -> list[tuple[int, int]]:
        """Return the pieces that are replicated on an axis of the mesh, or lie on a part of the ranks only."""
        return self.ranges_of(map(self._is_copied, self._parameters))

    def _is_copied(self, parameter: Any) -> bool:
        axes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        replicated = any(placement.is_replicate() and size > 1 for placement, size in axes)
        return replicated or parameter.device_mesh.size() < len(self.ranks)

    @torch.no_grad()
    def _pieces(self) -> Iterable[Tensor]:
        return [parameter.to_local() for parameter in self._parameters]
