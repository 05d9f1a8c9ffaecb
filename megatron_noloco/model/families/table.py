"""The parameters of a model as a table with one row per parameter: shapes, initial weights, slices, names.

Only the functions that make tensors import torch, since that would slow down `config --check`.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Literal

from megatron_noloco.errors import UserError
from megatron_noloco.plans.canonical import Block, Matrix, Rectangle, matrices

if TYPE_CHECKING:
    from torch import Tensor

Init = Literal["normal", "residual", "ones", "zeros"]

_LAYER = "{layer}"
_LAYER_NUMBER = re.compile(r"(decoder\.layers\.)(\d+)")
_EXPERT_NUMBER = re.compile(r"(\.local_experts\.)(\d+)")


@dataclass(frozen=True)
class Rows:
    """How Hugging Face's tensors are combined along the first dimension of a parameter.

    A parameter of shape [repeats * sum(sizes), ...] is viewed as [repeats, sum(sizes), ...]. Part i, sizes[i] rows
    in every repeat, is a Hugging Face tensor of shape [repeats * sizes[i], ...].

    Args:
        sizes: rows of each part in a repeat. Parts for which the parameter has no Hugging Face name are padding:
            zeros here, absent there.
        repeats: number of repeats.
        cut_each: whether a tensor-parallel rank has a slice of each part (gate and up), or one slice of all rows.
    """

    sizes: tuple[int, ...]
    repeats: int = 1
    cut_each: bool = False


@dataclass(frozen=True)
class Parameter:
    """One row of the table: a parameter, or the same parameter of every layer (`{layer}` in its names).

    Args:
        name: Megatron-core's, in the unsplit model.
        shape: of the full parameter.
        init: "ones", "zeros", "normal" (standard deviation `init_method_std`), or "residual" for a projection back
            into the residual stream, whose standard deviation is init_method_std / sqrt(2 * num_layers). The
            variance that all 2 * num_layers branches together add to the stream then does not grow with the depth
            (GPT-2: Radford et al. 2019, section 2.3; Megatron's default, `scaled_init_method_normal`).
        tp_dim: the dimension cut by tensor parallelism; None: every tensor-parallel rank has all of it.
        hf: names of the Hugging Face tensors that are combined to it.
        rows: how they are combined; None: there is one tensor, the same in both.
        fused_name: its name where Transformer Engine fuses a norm with the matrix after it.
        same_as: name of the parameter of which it is a copy: a tied output layer is a copy of the embedding. A
            stage that has both holds the embedding only.
        layer: the number of its layer; None outside layers, and in a row for all layers.
        linear: whether its parts (see `split`) are linear maps inside a layer, which Muon can optimize.
        per_head: whether it is the norm of each head. All tensor-parallel ranks have the same weights, but each
            uses them for its own heads only, so the gradients of the ranks must be summed.
    """

    name: str
    shape: tuple[int, ...]
    init: Init = "normal"
    tp_dim: int | None = None
    hf: tuple[str, ...] = ()
    rows: Rows | None = None
    fused_name: str | None = None
    same_as: str | None = None
    layer: int | None = None
    linear: bool = False
    per_head: bool = False

    def __post_init__(self) -> None:
        if self._rows.repeats * sum(self._rows.sizes) != self.shape[0]:
            raise UserError(f"{self.name}: {self.rows} do not make up its {self.shape[0]} rows")

    @property
    def source(self) -> str:
        """The name of the parameter whose values it has: that of the original if it is a copy, else its own."""
        return self.same_as or self.name

    def is_copy(self, tp: int) -> bool:
        """Return whether a tensor-parallel rank has only a copy: of the embedding, or of the weights of rank 0."""
        return self.same_as is not None or (self.tp_dim is None and tp > 0)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it: as in Megatron, not to norms and biases (one dimension)."""
        return len(self.shape) > 1

    @property
    def expert(self) -> int | None:
        """The number of its expert; None for what is not in an expert."""
        number = _EXPERT_NUMBER.search(self.name)
        return int(number[2]) if number else None

    @property
    def is_embedding_or_output(self) -> bool:
        """Whether it is the matrix of the embedding or the output layer: the only ones outside the layers."""
        return self.layer is None and _LAYER not in self.name and len(self.shape) > 1

    @property
    def bias(self) -> "Parameter":
        """The row of the bias beside this weight of a linear map or of a norm; at first it is zero.

        Tensor parallelism cuts it with the rows of the weight. Where it cuts the columns, all ranks have the bias.
        """

        def renamed(name: str) -> str:
            return name.removesuffix("weight") + "bias"

        return replace(
            self,
            name=renamed(self.name),
            shape=self.shape[:1],
            init="zeros",
            tp_dim=0 if self.tp_dim == 0 else None,
            hf=tuple(map(renamed, self.hf)),
            fused_name=self.fused_name and renamed(self.fused_name),
            linear=False,
        )

    def at(self, layer: int) -> "Parameter":
        """Return the parameter of one layer, from a row for all layers."""
        name, *hf = (text.replace(_LAYER, str(layer)) for text in (self.name, *self.hf))
        return replace(self, name=name, hf=tuple(hf), layer=layer)

    # Tensor parallelism

    def slice_shape(self, tp_size: int) -> tuple[int, ...]:
        """Return the shape of a tensor-parallel rank's slice."""
        return tuple(n // tp_size if d == self.tp_dim else n for d, n in enumerate(self.shape))

    def rectangles(self, tp: int, tp_size: int) -> list[Rectangle]:
        """Return the parts of the matrix that make up a tensor-parallel rank's slice, one after the other."""
        rows, columns = self.shape[0], math.prod(self.shape[1:])
        if self.tp_dim is None or tp_size == 1:
            return [Rectangle(0, 0, rows, columns)]
        if self.tp_dim > 0:
            width = columns // tp_size
            return [Rectangle(0, tp * width, rows, width)]
        cut = self.rows.sizes if self.rows and self.rows.cut_each else (rows,)
        tops = accumulate(cut, initial=0)
        return [
            Rectangle(top + tp * (size // tp_size), 0, size // tp_size, columns)
            for top, size in zip(tops, cut, strict=False)
        ]

    def slice(self, full: "Tensor", tp: int, tp_size: int) -> "Tensor":
        """Return a tensor-parallel rank's slice of the full parameter, shape `slice_shape(tp_size)`."""
        import torch

        matrix = full.view(self.shape[0], -1)
        slices = [
            matrix[at.top : at.top + at.rows, at.left : at.left + at.width]
            for at in self.rectangles(tp, tp_size)
        ]
        found = slices[0] if len(slices) == 1 else torch.cat(slices)
        return found.reshape(self.slice_shape(tp_size))

    def merge(self, slices: Sequence["Tensor"]) -> "Tensor":
        """Return the full parameter from the slices of all tensor-parallel ranks; the inverse of `slice`."""
        if self.tp_dim is None or len(slices) == 1:
            return slices[0]
        full = slices[0].new_empty(self.shape)
        matrix = full.view(self.shape[0], -1)
        for tp, part in enumerate(slices):
            places = self.rectangles(tp, len(slices))
            rows = part.reshape(-1, places[0].width).split([at.rows for at in places])
            for at, piece in zip(places, rows, strict=True):
                matrix[at.top : at.top + at.rows, at.left : at.left + at.width] = piece
        return full

    # Parts

    def split(self, full: "Tensor") -> "list[Tensor]":
        """Return the parts, such as queries, keys and values; part i is [repeats * sizes[i], ...]."""
        rest = self.shape[1:]
        parts = full.view(self._rows.repeats, -1, *rest).split(self._rows.sizes, dim=1)
        return [part.reshape(-1, *rest) for part in parts]

    def join(self, parts: "Sequence[Tensor]") -> "Tensor":
        """Return the full parameter from its parts; the inverse of `split`."""
        import torch

        if len(parts) == 1:
            return parts[0]
        repeats, rest = self._rows.repeats, self.shape[1:]
        return torch.cat([part.view(repeats, -1, *rest) for part in parts], dim=1).reshape(self.shape)

    # Hugging Face

    @property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the Hugging Face tensors by name."""
        rows = self._rows
        sizes = [rows.repeats * size for size in rows.sizes]
        return {name: (size, *self.shape[1:]) for name, size in zip(self.hf, sizes, strict=False)}

    def to_hf(self, full: "Tensor") -> "dict[str, Tensor]":
        """Return the full parameter as Hugging Face's tensors; views of it where the memory layout allows."""
        return dict(zip(self.hf, self.split(full), strict=False))

    def exported(self, block: Block, tensors: Mapping[str, Matrix]) -> Iterator[Block]:
        """Yield what Hugging Face's tensors have of a block of this parameter; padding is in none of them.

        Args:
            tensors: see `Table.exported`.
        """
        if not self.hf:
            yield block._replace(matrix=tensors[self.name])
            return
        tops = list(accumulate(self._rows.sizes, initial=0))
        top, stop = block.top, block.top + block.rows
        while top < stop:
            repeat, within = divmod(top, tops[-1])
            part = bisect_right(tops, within) - 1
            rows = min(stop - top, tops[part + 1] - within)
            if part < len(self.hf):
                own = block.own + (top - block.top) * block.width
                its_top = repeat * self._rows.sizes[part] + within - tops[part]
                yield Block(own, tensors[self.hf[part]], its_top, block.left, rows, block.width)
            top += rows

    def from_hf(self, read: "Callable[[str], Tensor]") -> "Tensor":
        """Return the full parameter from Hugging Face's tensors, which `read` returns by name; padding is zero."""
        rows, parts = self._rows, [read(name) for name in self.hf]
        padding = sum(rows.sizes[len(parts) :])
        if padding:
            parts.append(parts[0].new_zeros(rows.repeats * padding, *self.shape[1:]))
        return self.join(parts)

    @property
    def _rows(self) -> Rows:
        return self.rows or Rows(self.shape[:1])


@dataclass(frozen=True)
class Table:
    """The parameters of one architecture: rows outside the layers, and rows that every layer has."""

    rows: tuple[Parameter, ...]
    num_layers: int

    def __iter__(self) -> Iterator[Parameter]:
        """Yield every parameter of the unsplit model, from the embedding to the output layer, copies included."""
        return iter(self._all)

    @cached_property
    def _all(self) -> tuple[Parameter, ...]:
        found: list[Parameter] = []
        for in_layer, rows in groupby(self.rows, key=lambda row: _LAYER in row.name):
            adjacent = list(rows)
            if in_layer:
                adjacent = [row.at(layer) for layer in range(self.num_layers) for row in adjacent]
            found += adjacent
        return tuple(found)

    def find(self, name: str, first_layer: int = 0, first_expert: int = 0) -> Parameter:
        """Return the parameter of that name in a model chunk that begins with these numbers of layer and expert.

        Raises UserError when the table has no such row.
        """
        key = name, first_layer, first_expert
        if key not in self._found:
            self._found[key] = self._looked_up(*key)
        return self._found[key]

    def _looked_up(self, name: str, first_layer: int, first_expert: int) -> Parameter:
        number = _LAYER_NUMBER.match(name)
        general = _LAYER_NUMBER.sub(rf"\g<1>{_LAYER}", name)
        general = _EXPERT_NUMBER.sub(lambda found: f"{found[1]}{int(found[2]) + first_expert}", general)
        row = self._by_name.get(general)
        if row is None:
            raise UserError(
                f"the model has a parameter {name}, but the table of its family has no row for it"
            )
        return row.at(int(number[2]) + first_layer) if number else row

    def matrices(self) -> dict[str, Matrix]:
        """Return the matrix of each parameter that is no copy, with the padding of the vocabulary."""
        return matrices({row.name: row.shape for row in self if row.same_as is None})

    def exported(self) -> dict[str, Matrix]:
        """Return the canonical vector: the place of each tensor of the export."""
        return matrices(self.exported_shapes)

    @property
    def exported_count(self) -> int:
        """Number of weights of the export, which has no padding."""
        return sum(map(math.prod, self.exported_shapes.values()))

    @property
    def exported_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of the export by name, without copies and padding.

        A parameter without Hugging Face names is there under its own name.
        """
        shapes = (row.hf_shapes or {row.name: row.shape} for row in self if row.same_as is None)
        return {name: shape for of_row in shapes for name, shape in of_row.items()}

    @cached_property
    def _found(self) -> dict[tuple[str, int, int], Parameter]:
        return {}

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {name: row for row in self.rows for name in (row.name, row.fused_name) if name is not None}

    @property
    def parameter_count(self) -> int:
        """Number of weights of the whole model, with the padded vocabulary, without copies."""
        return sum(
            math.prod(row.shape) * (self.num_layers if _LAYER in row.name else 1)
            for row in self.rows
            if row.same_as is None
        )
