"""Compares and copies what a model has: names and shapes, first weights, frozen weights, buffers, its config.

These decide what the trained weights mean, so all replicas begin with the same.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_noloco.attach.adapter import EngineAdapter, plain, shapes_of
from megatron_noloco.errors import UserError
from megatron_noloco.model.families import FAMILIES, architecture_of
from megatron_noloco.outer import Weights
from megatron_noloco.outer.vectors import HOST, buffer
from megatron_noloco.outer.weights import Joined
from megatron_noloco.plans.canonical import Block, Matrix, blocks, matrices
from megatron_noloco.plans.fingerprint import digest_of, digest_of_shapes, fingerprint

_ELEMENTS = 1 << 22  # that a digest reads at a time


class Fingerprint(NamedTuple):
    """The part of a rank in a digest of its replica.

    Attributes:
        text: all else, or a digest of it; "" where there is nothing else.
        sums: the fingerprint of each block that the rank has.
    """

    text: str
    sums: Mapping[Block, int]


def fingerprints_of(adapter: EngineAdapter, held: Sequence[Block] | None) -> dict[str, Fingerprint]:
    """Return the fingerprints of what training begins with, by its name for the user.

    Args:
        held: see `EngineAdapter.held`.
    """
    trained, length = adapter.trained, adapter.weights.length
    whole = [Block(0, Matrix(0, 1, length), 0, 0, 1, length)]
    frozen = {name: one for name, one in adapter.parameters.items() if name not in trained}
    return {
        "weights": Fingerprint("", _sums_of(_reader_of(adapter.weights), whole if held is None else held)),
        "names and shapes": Fingerprint(digest_of_shapes(shapes_of(trained)), {}),
        "frozen weights": _of_tensors(adapter, frozen),
        "buffers": _of_tensors(adapter, {name: one for name, one, _ in _buffers(adapter.modules)}),
    }


def digest_of_replica(ranks: Sequence[Fingerprint]) -> str:
    """Return one digest for the fingerprints of the ranks of a replica, or the text where all have it alone.

    The layout of the ranks makes no difference.
    """
    texts = sorted({one.text for one in ranks})
    sums = {item for one in ranks for item in one.sums.items()}
    if len(texts) == 1 and not sums:
        return texts[0]
    return digest_of("".join(texts), sum(value for _, value in sums))  # of copies that are equal one counts


def digest_of_weights(weights: Weights) -> str:
    """Return SHA-256 of the bits of this rank's weights in fp32, hexadecimal."""
    read, digest = _reader_of(weights), hashlib.sha256()
    for start in range(0, weights.length, _ELEMENTS):
        digest.update(read(slice(start, min(start + _ELEMENTS, weights.length))).numpy().data)
    return digest.hexdigest()


def _reader_of(weights: Weights) -> Callable[[slice], Tensor]:
    """Return what reads up to `_ELEMENTS` weights, as fp32 in host memory that the next read overwrites."""
    parts, memory = Joined(weights.parts()), buffer(min(weights.length, _ELEMENTS), HOST)

    def read(place: slice) -> Tensor:
        piece = memory[: place.stop - place.start]
        weights.read_into(piece, place.start, parts)
        return piece

    return read


def _of_tensors(adapter: EngineAdapter, tensors: Mapping[str, Any]) -> Fingerprint:
    shapes, sums = shapes_of(tensors), dict[Block, int]()
    for name, matrix in matrices(shapes).items():
        part = adapter.part_of(tensors[name]).detach().reshape(-1)
        places = adapter.places_of(tensors[name], matrix)
        sums |= _sums_of(part.__getitem__, list(blocks(matrix, places, 0, len(part), own=0)))
    text = [(name, shape, str(tensors[name].dtype)) for name, shape in shapes.items()]
    return Fingerprint(digest_of(repr(text)), sums)


def _sums_of(read: Callable[[slice], Tensor], held: Sequence[Block]) -> dict[Block, int]:
    """Return the fingerprints of blocks; `read` returns elements of this rank."""
    return {
        block._replace(own=0): sum(
            fingerprint(_bits_of(read(slice(part.own, part.own + part.size))), part)
            for start in range(0, block.size, _ELEMENTS)
            for part in block.part(start, min(start + _ELEMENTS, block.size))
        )
        for block in held
    }


def _bits_of(tensor: Tensor) -> np.ndarray:
    """Return the bits of elements as unsigned integers; of numbers of 16 bytes a mixture of both halves."""
    size, content = tensor.itemsize, tensor.contiguous().view(torch.uint8).cpu().numpy()
    if size > 8:
        return content.view(np.uint64).reshape(len(tensor), -1) @ np.array([1, 3], np.uint64)
    return content.view(f"u{size}")


def buffers_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint of the modules has, by the number of the module and their name."""
    return {name: buffer for name, buffer, is_saved in _buffers(modules) if is_saved}


def _buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield all buffers, and whether a checkpoint has them."""
    for number, module in enumerate(modules):
        for path, part in module.named_modules():
            for name, held in part.named_buffers(recurse=False):
                is_saved = name not in part._non_persistent_buffers_set
                yield f"{number}.{plain(f'{path}.{name}')}", held, is_saved


@torch.no_grad()
def write_buffers(modules: Sequence[nn.Module], values: Mapping[str, Tensor]) -> None:
    """Overwrite the buffers with those of another replica, which `check_buffers` has accepted."""
    for name, one in buffers_of(modules).items():
        one.copy_(values[name])


def check_buffers(modules: Sequence[nn.Module], values: Any) -> None:
    """Raise UserError unless these are as many buffers, of the same names, shapes and types."""
    own = {name: (one.shape, one.dtype) for name, one in buffers_of(modules).items()}
    if own != {name: (one.shape, one.dtype) for name, one in values.items()}:
        raise UserError("its buffers are not those of this model")


def model_of(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Return what decides which function the weights of a transformers model are of; see `Architecture`.

    Of a model without a config, or of another family, only a family is returned, which the trainer does not have.
    """
    config: Any = next((getattr(module, "config", None) for module in modules), None)
    if not hasattr(config, "to_dict"):
        return {"family": None}
    theirs = config.to_dict()
    family = theirs.get("model_type")
    if family not in FAMILIES:
        return {"family": f"{family} of transformers"}
    try:
        return architecture_of(theirs).of_function
    except UserError as error:
        return {"family": f"{family} in which {error}"}
