"""The weights of one rank as one flat vector: the interface between the outer optimizer and a model or engine."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megatron_noloco.errors import UserError


def wait_for(device: torch.device) -> None:
    """Wait until the current stream has done what is queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


Write = Callable[[int, Tensor], None]
"""write(start, piece): elements start..start + len(piece) of the vector become those of `piece` (fp32, flat)."""


class Weights(ABC):
    """Shows live tensors as one flat fp32 vector, which is read and overwritten in pieces.

    A subclass names the tensors (`parts`) and what depends on them (`refresh`). Counterparts in other replicas
    must have the same number of elements in the same order.
    """

    @abstractmethod
    def parts(self) -> Sequence[Tensor]:
        """Return the live tensors, without gradient, each flat: shape [elements], in the order of the vector."""

    @abstractmethod
    def refresh(self) -> None:
        """Recompute what depends on the tensors. Called on leaving `writing`; may be a collective."""

    def copied(self) -> Sequence[tuple[int, int]]:
        """Return ranges start..stop of the vector, ascending, of which other ranks of the replica hold copies.

        Copies that are equal bit for bit get means that are equal bit for bit.
        """
        return ()

    @property
    def length(self) -> int:
        """Number of elements of the vector."""
        return sum(part.numel() for part in self.parts())

    @property
    def device(self) -> torch.device:
        """Where the (first) tensor lies."""
        return self.parts()[0].device

    @torch.no_grad()
    def read_into(self, flat: Tensor, start: int = 0) -> None:
        """Fill `flat` (fp32, shape [n], any device) with elements start..start + n."""
        for part, place in Joined(self.parts()).overlaps(start, len(flat)):
            flat[place].copy_(part)

    def read(self) -> Tensor:
        """Return a copy of the whole vector in host memory."""
        flat = torch.empty(self.length, dtype=torch.float32, device="cpu")
        self.read_into(flat)
        return flat

    @contextmanager
    def writing(self) -> Iterator[Write]:
        """Give a function that overwrites elements; what depends on them is refreshed on leaving.

        After an exception nothing is refreshed: a refresh may be a collective, which other ranks would not join.
        """
        parts = Joined(self.parts())

        @torch.no_grad()
        def write(start: int, piece: Tensor) -> None:
            for part, place in parts.overlaps(start, len(piece)):
                part.copy_(piece[place])

        yield write
        self.refresh()

    def add(self, vector: Tensor) -> None:
        """Add an fp32 vector of shape [length], on any device."""
        moved = self.read().add_(vector.cpu())
        with self.writing() as write:
            write(0, moved)

    @contextmanager
    def kept_in(self, flat: Tensor) -> Iterator[None]:
        """Save the weights in `flat`, and restore them on leaving.

        After an exception they are restored too, but not refreshed, as in `writing`.

        Args:
            flat: fp32, shape [length], on any device.
        """
        self.read_into(flat)
        with self.writing() as write:
            try:
                yield
            finally:
                write(0, flat)


class TorchWeights(Weights):
    """Shows the weights of a torch model: its parameters, of any floating dtype.

    Parameters in bf16 or fp16 round what is written to them, and the next round takes this rounding for a part of
    the outer gradient. Prefer fp32 parameters (with autocast).

    Raises UserError as `check_sound` does.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        check_sound((f"parameter {index}", one) for index, one in enumerate(self.parameters))

    def parts(self) -> list[Tensor]:
        return [parameter.detach().view(-1) for parameter in self.parameters]

    def refresh(self) -> None:
        """Do nothing: nothing depends on the parameters."""


def check_sound(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UserError for weights that cannot be averaged, given with their names.

    These are no tensors, tensors on several devices, and a tensor that is not floating, not contiguous, or that
    fp32 would round.
    """
    devices, problem = set[str](), ""
    for name, tensor in tensors:
        devices.add(str(tensor.device))
        if not (tensor.is_floating_point() and tensor.is_contiguous()):
            problem = "must be floating and contiguous (torch.contiguous_format)"
        elif tensor.dtype == torch.float64:
            problem = "must be of 32 bits or less: rounds are in fp32, which would round it"
        if problem:
            raise UserError(f"{name}, of shape {list(tensor.shape)} and {tensor.dtype}, {problem}")
    if not devices:
        raise UserError("there are no weights that are trained, to be averaged")
    if len(devices) > 1:
        raise UserError(f"the weights lie on {' and '.join(sorted(devices))}; all must be on one device")


_Part = TypeVar("_Part", Tensor, range)


class Joined(Generic[_Part]):
    """Finds elements of a flat vector in its parts, one after the other: flat tensors, or ranges of a vector.

    Attributes:
        length: of the vector.
    """

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts: Sequence[_Part] = parts
        self._ends = list(accumulate(map(len, parts)))
        self.length = self._ends[-1] if parts else 0

    def overlaps(self, start: int, length: int) -> Iterator[tuple[_Part, slice]]:
        """Yield what the parts have of elements start..start + length, each with its place among these.

        Raises UserError when the vector has no such elements.
        """
        stop = start + length
        if not 0 <= start <= stop <= self.length:
            raise UserError(f"elements {start} to {stop} lie outside a vector of {self.length}")
        for index in range(bisect_right(self._ends, start), len(self._parts)):
            part, end = self._parts[index], self._ends[index]
            begin = end - len(part)
            if begin >= stop:
                break
            first, last = max(start, begin), min(stop, end)
            if first < last:
                yield part[first - begin : last - begin], slice(first - start, last - start)
