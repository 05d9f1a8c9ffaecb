"""What a model begins with, as replicas compare it: names and shapes, weights, frozen ones, buffers, its config.

These decide what the trained weights mean, so all replicas begin with the same.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_noloco.attach.registered import check_alike
from megatron_noloco.attach.shards import Engine, Shard, held_by, plain, shapes_of, shard_of
from megatron_noloco.errors import UserError
from megatron_noloco.model.families import FAMILIES, architecture_of
from megatron_noloco.outer.vectors import HOST
from megatron_noloco.outer.weights import Joined
from megatron_noloco.plans.canonical import Block, Matrix, Rectangle, in_turn, matrices
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


def fingerprints_of(engine: Engine) -> dict[str, Fingerprint]:
    """Return the fingerprints of what training begins with, by its name for the user."""
    trained, shards = engine.trained, engine.shards
    whole = matrices(shapes_of(trained))
    if not engine.placed:  # in the vector of this rank
        whole = {"": Matrix(0, 1, engine.length)}
        shards = [
            shard._replace(name="", places=[Rectangle(0, start, 1, length)])
            for shard, length, start in in_turn((shard, shard.length) for shard in shards)
        ]
    frozen = {name: one for name, one in engine.parameters.items() if name not in trained}
    return {
        "weights": Fingerprint("", _sums_of(shards, whole, torch.float32)),
        "names and shapes": Fingerprint(digest_of_shapes(shapes_of(trained)), {}),
        "frozen weights": _of_tensors(frozen),
        "buffers": _of_tensors({name: one for name, one, _ in _buffers(engine)}),
    }


def _of_tensors(tensors: Mapping[str, Any]) -> Fingerprint:
    shapes = shapes_of(tensors)
    text = [(name, shape, str(tensors[name].dtype)) for name, shape in shapes.items()]
    shards = [shard_of(name, one) for name, one in tensors.items()]
    return Fingerprint(digest_of(repr(text)), _sums_of(shards, matrices(shapes)))


def _sums_of(
    shards: Sequence[Shard], whole: Mapping[str, Matrix], dtype: torch.dtype | None = None
) -> dict[Block, int]:
    """Return the fingerprints of what this rank has.

    Args:
        whole: the matrices of all parameters.
        dtype: in which elements are compared; None: in their own.
    """
    parts, sums = Joined([shard.of(shard.tensor) for shard in shards]), dict[Block, int]()
    for block in held_by(shards, whole):
        sums[block._replace(own=0)] = sum(
            fingerprint(_bits_of(view if dtype is None else view.to(dtype)), part)
            for start in range(0, block.size, _ELEMENTS)
            for part in block.part(start, min(start + _ELEMENTS, block.size))
            for view, _ in parts.overlaps(part.own, part.size)  # one: a block lies in one shard
        )
    return sums


def _bits_of(tensor: Tensor) -> np.ndarray:
    """Return the bits of elements as unsigned integers; of numbers of 16 bytes a mixture of both halves."""
    size, content = tensor.itemsize, tensor.contiguous().view(torch.uint8).cpu().numpy()
    if size > 8:
        return content.view(np.uint64).reshape(len(tensor), -1) @ np.array([1, 3], np.uint64)
    return content.view(f"u{size}")


def digest_of_replica(ranks: Sequence[Fingerprint]) -> str:
    """Return one digest for the fingerprints of the ranks of a replica, or the text where all have it alone.

    The layout of the ranks makes no difference.
    """
    texts = sorted({one.text for one in ranks})
    sums = {item for one in ranks for item in one.sums.items()}
    if len(texts) == 1 and not sums:
        return texts[0]
    return digest_of("".join(texts), sum(value for _, value in sums))  # of copies that are equal one counts


def digest_of_weights(engine: Engine) -> str:
    """Return SHA-256 of the bits of this rank's weights in fp32, hexadecimal."""
    digest = hashlib.sha256()
    for piece in (piece for part in engine.parts() for piece in part.split(_ELEMENTS)):
        digest.update(piece.to(HOST, torch.float32).numpy().data)
    return digest.hexdigest()


def buffers_of(engine: Engine) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint of the modules has, by the number of the module and their name."""
    return {name: one for name, one, is_saved in _buffers(engine) if is_saved}


def _buffers(engine: Engine) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield all buffers, and whether a checkpoint has them."""
    for number, module in enumerate(engine.modules):
        for path, part in module.named_modules():
            for name, one in part.named_buffers(recurse=False):
                is_saved = name not in part._non_persistent_buffers_set
                yield f"{number}.{plain(f'{path}.{name}')}", one, is_saved


@torch.no_grad()
def write_buffers(engine: Engine, values: Mapping[str, Tensor]) -> None:
    """Overwrite the buffers with those of another replica, whose first ones were the same.

    Raises UserError, before any is overwritten, where one is missing, has another shape or is not finite.
    """
    own = buffers_of(engine)
    check_alike(own, values)
    for name, one in own.items():
        one.copy_(values[name])


def model_of(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Return what decides which function the weights of a transformers model are of; see `Architecture`.

    Of a model without a config, or of another family, only a family is returned, which the trainer does not have.
    """
    config: Any = next((getattr(module, "config", None) for module in modules), None)
    if not hasattr(config, "model_type"):
        return {"family": None}
    family = config.model_type
    if family not in FAMILIES:
        return {"family": f"{family} of transformers"}
    try:
        return architecture_of(config).of_function
    except UserError as error:
        return {"family": f"{family} in which {error}"}
