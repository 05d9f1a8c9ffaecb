"""Safetensors files written one tensor at a time; the library's own writer wants all of a file in memory."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Slot:
    """The place of a tensor: what the file's header says of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def distribute(slots: list[Slot], max_bytes: int) -> list[list[Slot]]:
    """Cut into files of at most `max_bytes`, or of one tensor that is larger."""
    files: list[list[Slot]] = []
    room = 0
    for slot in slots:
        if not files or slot.bytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(slot)
        room -= slot.bytes
    return files


def write(path: Path, slots: list[Slot], tensors: Iterator[Tensor]) -> None:
    """Write one tensor per slot, in their order."""
    with path.open("wb") as file:
        file.write(header(slots))
        for slot, tensor in zip(slots, tensors, strict=True):
            assert (tensor.shape, tensor.dtype) == (slot.shape, slot.dtype), slot.name
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next is made


def header(slots: list[Slot]) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for slot in slots:
        start, end = end, end + slot.bytes
        content[slot.name] = {
            "dtype": _CODES[slot.dtype],
            "shape": slot.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
