"""Where this rank's weights lie in the canonical vector of a module, which has its parameters by their names."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from megatron_noloco.attach.adapter import EngineAdapter
from megatron_noloco.plans.canonical import Block, matrices

_WRAPPERS = {
    "_orig_mod",
    "_checkpoint_wrapped_module",
}  # in names: of torch.compile, and of checkpoint_wrapper


def plain(name: str) -> str:
    """Return a name in a module without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameters_of(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the parameters of modules by their plain names."""
    return {plain(name): one for module in modules for name, one in module.named_parameters()}


def shapes_of(parameters: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of whole parameters, also of those that are divided."""
    return {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in parameters.items()}


def trained_in(adapter: EngineAdapter) -> dict[str, Any]:
    """Return the parameters that the ranks of the replica exchange, by name."""
    parameters = parameters_of(adapter.modules)
    if adapter.pieces is None:
        return {name: one for name, one in parameters.items() if one.requires_grad}
    exchanged = {id(piece.parameter) for piece in adapter.pieces}
    return {name: one for name, one in parameters.items() if id(one) in exchanged}


def held_by(adapter: EngineAdapter) -> list[Block] | None:
    """Return what this rank has of the canonical vector, in the order of its weights; see `EngineAdapter.pieces`.

    None where the ranks of all jobs must be the same.
    """
    if adapter.pieces is None:
        return None
    trained = trained_in(adapter)
    whole = matrices(shapes_of(trained))
    places = {id(one): (one, whole[name]) for name, one in trained.items()}
    return [
        part._replace(own=part.own - piece.begin + piece.own)
        for piece in adapter.pieces
        for part in _between(adapter.places_of(*places[id(piece.parameter)]), piece.begin, piece.end)
    ]


def _between(blocks: Iterable[Block], begin: int, end: int) -> Iterator[Block]:
    """Yield what blocks that lie in turn have of elements begin..end."""
    for block in blocks:
        yield from block.part(max(begin - block.own, 0), min(end - block.own, block.size))


def copies_in(held: Sequence[Sequence[Block]], rank: int) -> list[Block]:
    """Return the blocks of a rank that a rank before it has as well.

    Args:
        held: by rank.
    """
    before = {block._replace(own=0) for blocks in held[:rank] for block in blocks}
    return [block for block in held[rank] if block._replace(own=0) in before]
