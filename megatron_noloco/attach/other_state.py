"""Compares and copies the rest of a model: names and shapes of weights, frozen weights, buffers.

These decide what the trained weights mean, so all replicas begin with the same.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_noloco.federation.frames import checksum_of

_AT_ONCE = 1 << 26  # bytes that a digest reads at a time
_WRAPPERS = {
    "_orig_mod",
    "_checkpoint_wrapped_module",
}  # in names: of torch.compile, and of checkpoint_wrapper


def digests_of(modules: Sequence[nn.Module], part_of: Callable[[Any], Tensor]) -> dict[str, bytes]:
    """Return a digest of what this rank has of each kind, by its name for the user.

    Args:
        part_of: returns this rank's part of a parameter.
    """
    parameters = [(_plain(name), one) for part in modules for name, one in part.named_parameters()]
    shapes = [(name, list(getattr(one, "ds_shape", one.shape))) for name, one in parameters]  # with ZeRO 3
    frozen = ((name, part_of(one)) for name, one in parameters if not one.requires_grad)
    buffers = ((_plain(name), one) for part in modules for name, one in part.named_buffers())
    return {
        "names and shapes": hashlib.sha256(repr(shapes).encode()).digest(),
        "frozen weights": _digest_of(frozen),
        "buffers": _digest_of(buffers),
    }


def buffers_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint of the modules has, by the number of the module and their name."""
    return {
        f"{number}.{_plain(f'{path}.{name}')}": buffer
        for number, module in enumerate(modules)
        for path, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }


@torch.no_grad()
def write_buffers(modules: Sequence[nn.Module], values: Mapping[str, Tensor]) -> None:
    """Overwrite the buffers with those of another replica, which `check_buffers` has accepted."""
    for name, buffer in buffers_of(modules).items():
        buffer.copy_(values[name])


def check_buffers(modules: Sequence[nn.Module], values: Any) -> None:
    """Raise ValueError unless these are as many buffers, of the same names, shapes and types."""
    own = {name: (one.shape, one.dtype) for name, one in buffers_of(modules).items()}
    if own != {name: (one.shape, one.dtype) for name, one in values.items()}:
        raise ValueError("its buffers are not those of this model")


def _digest_of(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        for piece in _bytes_of(tensor):
            digest.update(checksum_of(piece.numpy()).to_bytes(4, "big"))
    return digest.digest()


def _bytes_of(tensor: Tensor) -> Iterator[Tensor]:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return (piece.cpu() for piece in content.split(_AT_ONCE))


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
