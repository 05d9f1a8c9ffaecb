"""Adapters of training engines: the weights of a rank, and where they lie in the vector that all jobs have."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from megatron_noloco.outer import Weights
from megatron_noloco.plans.canonical import Block, Matrix, Piece, Rectangle, blocks, matrices

_WRAPPERS = {  # in names: of torch.compile, and of checkpoint_wrapper
    "_orig_mod",
    "_checkpoint_wrapped_module",
}


@runtime_checkable
class Stateful(Protocol):
    """Has a state that goes with the weights: the inner optimizer, a schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


Stepped = Sequence[tuple[Tensor, Sequence[Any]]]
"""Tensors that an inner optimizer steps, each with the parameters in it; none where all jobs have such ranks."""


@dataclass(frozen=True)
class EngineAdapter:
    """Shows `attach` what an engine trains on this rank; made by a file of its own for each kind of engine.

    Attributes:
        weights: of this rank.
        reduced_over: ranks of this job over which gradients are reduced; None where the loop cannot be asked.
        remedy: what to change where these are not the ranks of the replica: where the job holds all replicas, and
            where it is one replica.
        steps: returns how many steps the optimizer has taken; None where each call of `Attached.step` follows one.
        check_all: raises UserError where the loop trains more than `weights`.
        modules: that have the weights, as the loop made them: without DistributedDataParallel and the like.
        part_of: returns this rank's part of a parameter of the modules, frozen or not.
        places_of: places_of(parameter, matrix) returns the rectangles of the parameter that make up this part.
        pieces: what `weights` consists of, padding left out. Every parameter that any rank of the replica
            exchanges is named, if need be with nothing of it. None: ranks are the same in all jobs, and a rank
            exchanges with the rank at its place of another one.
        stepped: what the inner optimizer steps; called where its state is given or taken.
        view: view(tensors) shows tensors like these, in their order, as a vector with the layout of `weights`.
    """

    weights: Weights
    stepped: Callable[[], Stepped]
    view: Callable[[Sequence[Tensor]], Weights]
    reduced_over: Sequence[int] | None
    remedy: tuple[str, str]
    steps: Callable[[], int] | None = None
    check_all: Callable[[], None] = lambda: None
    modules: Sequence[nn.Module] = ()
    part_of: Callable[[Any], Tensor] = lambda parameter: parameter
    places_of: Callable[[Any, Matrix], Iterable[Rectangle]] = lambda _, matrix: [matrix.whole]
    pieces: Sequence[Piece] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the modules by their plain names; from the second module on with its number."""
        return {
            f"{number}." * (number > 0) + plain(name): one
            for number, module in enumerate(self.modules)
            for name, one in module.named_parameters()
        }

    @cached_property  # `fully_shard` puts others in their place during a step
    def trained(self) -> dict[str, Any]:
        """The parameters that the ranks of the replica exchange, by name, as the modules had them at first."""
        if self.pieces is None:
            return {name: one for name, one in self.parameters.items() if one.requires_grad}
        exchanged = {id(piece.parameter) for piece in self.pieces}
        return {name: one for name, one in self.parameters.items() if id(one) in exchanged}

    @property
    def names(self) -> dict[int, str]:
        """The names of these parameters by their id."""
        return {id(one): name for name, one in self.trained.items()}

    def held(self) -> list[Block] | None:
        """Return what this rank has of the canonical vector, in the order of its weights; see `pieces`.

        None where the ranks of all jobs must be the same.
        """
        if self.pieces is None:
            return None
        names, whole = self.names, matrices(shapes_of(self.trained))
        return [
            block
            for parameter, begin, end, own in self.pieces
            for matrix in [whole[names[id(parameter)]]]
            for block in blocks(matrix, self.places_of(parameter, matrix), begin, end, own)
        ]


def plain(name: str) -> str:
    """Return a name in a module without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def shapes_of(parameters: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of whole parameters, also of those that are divided."""
    return {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in parameters.items()}


def copies_in(held: Sequence[Sequence[Block]], rank: int) -> list[Block]:
    """Return the blocks of a rank that a rank before it has as well.

    Args:
        held: by rank.
    """
    before = {block._replace(own=0) for blocks in held[:rank] for block in blocks}
    return [block for block in held[rank] if block._replace(own=0) in before]
