"""An engine is its shards: what this rank has of each parameter that is trained. All else follows from them."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_noloco.errors import UserError
from megatron_noloco.outer import Weights
from megatron_noloco.outer.weights import check_sound
from megatron_noloco.plans.canonical import Block, Matrix, Rectangle, blocks, box, in_turn, matrices

_WRAPPERS = {  # in names: of torch.compile, and of checkpoint_wrapper
    "_orig_mod",
    "_checkpoint_wrapped_module",
}


class Shard(NamedTuple):
    """What this rank exchanges of a parameter, if need be nothing of it; or padding, which has no places.

    Attributes:
        name: of the parameter; "" where there is none.
        tensor: that the inner optimizer steps. The shard is elements begin..end of its local part.
        begin, end: see `tensor`.
        places: rectangles of the unsplit parameter that these elements fill one after the other (`Engine.placed`).
        copied: whether other ranks of the replica have these elements as well.
    """

    name: str
    tensor: Tensor
    begin: int
    end: int
    places: Sequence[Rectangle]
    copied: bool = False

    @property
    def length(self) -> int:
        return self.end - self.begin

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a tensor like `tensor`, such as a moment; live, shape [end - begin]."""
        return local_part(tensor).detach().reshape(-1)[self.begin : self.end]


class Engine(Weights):
    """The weights that an engine trains on this rank, one shard after the other; a subclass for each kind.

    Args:
        modules: that have the weights, as the loop made them: without DistributedDataParallel and the like.
        shards: every parameter that any rank of the replica exchanges is named where places are known.

    Attributes:
        placed: whether the places of shards are known, so that jobs may have other ranks. Otherwise a rank
            exchanges with the rank at its place of another job, and all jobs need equal ranks.
        parameters: of the modules, by name, as they had them at first: `fully_shard` replaces them in a step.
        reduced_over: ranks of this job over which gradients are reduced; None where the loop cannot be asked.
        remedy: what to change where these are not the ranks of the replica: where the job holds all replicas, and
            where it is one replica.
        steps: returns how many steps the optimizer has taken; None where each call of `Attached.step` follows one.

    Raises UserError as `check_sound` does.
    """

    placed = True
    reduced_over: Sequence[int] | None = None
    remedy = "", ""
    steps: Callable[[], int] | None = None

    def __init__(self, modules: Sequence[nn.Module], shards: Iterable[Shard]) -> None:
        self.modules, self.parameters = modules, parameters_of(modules)
        self.shards = list(shards)
        self._may_train = {id(one) for one in self.parameters.values() if one.requires_grad}
        self._check_sound()

    @abstractmethod
    def refresh(self) -> None:
        """Write the shards back to what the engine computes with. May be a collective of the replica."""

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Complete tensors like those in `stepped`, of which each rank has written its shards. As `refresh`."""

    def with_parameters(self) -> AbstractContextManager[None]:
        """Give the inner optimizer its parameters, where it has them in a step only."""
        return nullcontext()

    def parts(self) -> list[Tensor]:
        return [shard.of(shard.tensor) for shard in self.shards]

    def copied(self) -> list[tuple[int, int]]:
        laid = in_turn((shard, shard.length) for shard in self.shards)
        return [(at, at + length) for shard, length, at in laid if shard.copied and length]

    @property
    def stepped(self) -> list[Tensor]:
        """What the inner optimizer steps."""
        return list({id(shard.tensor): shard.tensor for shard in self.shards}.values())

    @property
    def trained(self) -> dict[str, Any]:
        """The parameters that the ranks of the replica exchange, by name."""
        names = {shard.name for shard in self.shards}
        return {
            name: one
            for name, one in self.parameters.items()
            if (name in names if self.placed else one.requires_grad)
        }

    def check_unchanged(self) -> None:
        """Raise UserError where the loop trains more than at first, and as `check_sound` does.

        A loop may have converted the model: what a round writes to a copy of a weight would be lost.
        """
        for module in self.modules:
            reshard(module)
        for name, one in parameters_of(self.modules).items():
            if one.requires_grad and id(one) not in self._may_train:
                raise UserError(
                    f"{name} is trained now, and was not when the model was attached: it would not be exchanged; "
                    "attach while all that is ever trained has requires_grad, or call average() and close() "
                    "before, and attach again"
                )
        self._check_sound()

    def _check_sound(self) -> None:
        check_sound((shard.name, local_part(shard.tensor)) for shard in self.shards)


def held_by(shards: Iterable[Shard], whole: Mapping[str, Matrix]) -> Iterator[Block]:
    """Yield where the elements of shards lie in a canonical vector; `own` counts from the first shard on."""
    for shard, _, at in in_turn((shard, shard.length) for shard in shards):
        own = at
        for place in shard.places:
            yield Block(own, whole[shard.name], *place)
            own += place.rows * place.width


def held(engine: Engine) -> list[Block] | None:
    """Return what this rank has of the canonical vector; None where the ranks of all jobs must be the same."""
    return list(held_by(engine.shards, matrices(shapes_of(engine.trained)))) if engine.placed else None


def copies_in(held: Sequence[Sequence[Block]], rank: int) -> list[Block]:
    """Return the blocks of a rank that a rank before it has as well.

    Args:
        held: by rank.
    """
    before = {block._replace(own=0) for blocks in held[:rank] for block in blocks}
    return [block for block in held[rank] if block._replace(own=0) in before]


def cut(shape: Sequence[int], begin: int, end: int) -> list[Rectangle]:
    """Return where elements begin..end of a tensor of this shape lie in its matrix."""
    matrix = Matrix(0, prod(shape[:1]), prod(shape[1:]))
    return [block.place for block in blocks(matrix, [matrix.whole], begin, end, own=0)]


def shard_of(name: str, tensor: Any, copied: bool = False) -> Shard:
    """Return this rank's part of a parameter or a buffer, whatever divides it."""
    length = local_part(tensor).numel()
    if is_divided(tensor):
        chunks = tensor.__create_chunk_list__() if length else ()
        places = [place for chunk in chunks for place in box(tensor.shape, chunk.offsets, chunk.sizes)]
    elif hasattr(tensor, "ds_shape"):
        from megatron_noloco.engine.zero import local_place

        places = cut(tensor.ds_shape, *local_place(tensor))
    else:
        places = cut(tensor.shape, 0, length)
    return Shard(name, tensor, 0, length, places, copied)


def is_divided(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor. Asks for a method: an import of DTensor takes a second."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, or of what ZeRO 3 divides; of any other tensor the whole."""
    if hasattr(tensor, "ds_shape"):
        from megatron_noloco.engine import zero

        return zero.local_part(tensor)
    part: Tensor = tensor.to_local() if is_divided(tensor) else tensor
    return part


def reshard(module: nn.Module) -> None:
    """Free what `fully_shard` has gathered, so that the module has its divided parameters again.

    After a forward pass without backward (an evaluation) it keeps the gathered parameters of the whole model for
    the next one, which would then not see what was written to the divided ones.
    """
    for part in fully_sharded(module):
        part.reshard()


def fully_sharded(module: nn.Module) -> Iterator[Any]:
    """Yield the parts of a module to which `fully_shard` was applied."""
    for part in module.modules():
        if any(cls.__name__ == "FSDPModule" for cls in type(part).__mro__):
            yield part


def parameters_of(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the parameters of modules by their plain names; from the second module on with its number."""
    return {
        f"{number}." * (number > 0) + plain(name): one
        for number, module in enumerate(modules)
        for name, one in module.named_parameters()
    }


def plain(name: str) -> str:
    """Return a name in a module without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def shapes_of(parameters: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of whole parameters, also of those that are divided."""
    return {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in parameters.items()}
