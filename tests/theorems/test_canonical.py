"""Where the weights of ranks of any layout lie in the canonical vector."""

import math

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.engine.layout import held_of
from megatron_noloco.model.families import Parameter, Table, table_of
from megatron_noloco.plans.canonical import Block, Matrix, box, in_turn, matrices, pieces_between
from megatron_noloco.plans.fingerprint import digest_of, fingerprint
from tests.kit.layouts import Layout, numbers, two_layouts


def elements(block: Block) -> list[int]:
    """The canonical index of each element, in the order of the rank's vector."""
    rows = range(block.top, block.top + block.rows)
    return [
        block.matrix.start + row * block.matrix.columns + block.left + column
        for row in rows
        for column in range(block.width)
    ]


@st.composite
def any_block(draw: st.DrawFn) -> Block:
    top, below, left, right = (draw(st.integers(0, 2)) for _ in range(4))
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    matrix = Matrix(draw(st.integers(0, 9)), top + rows + below, left + width + right)
    return Block(draw(st.integers(0, 9)), matrix, top, left, rows, width)


@given(any_block(), st.integers(0, 16), st.integers(0, 16))
def test_parts_of_a_block_are_its_elements_in_order(block: Block, begin: int, end: int) -> None:
    begin, end = min(begin, block.size), min(end, block.size)
    parts = list(block.part(begin, end))
    assert len(parts) <= 3
    assert [at for part in parts for at in elements(part)] == elements(block)[begin:end]
    owned = [part.own + i for part in parts for i in range(part.size)]
    assert owned == [*range(block.own + begin, block.own + end)]
    ends = [(elements(part)[0], elements(part)[-1]) for part in parts]
    assert [(part.first, part.last) for part in parts] == ends


@given(any_block(), st.integers(0, 16))
def test_fingerprints_of_parts_add_up(block: Block, cut: int) -> None:
    whole, cut, bits = block._replace(own=0), min(cut, block.size), np.arange(block.size, dtype=np.uint32)
    parts = [*whole.part(0, cut), *whole.part(cut, block.size)]
    total = sum(fingerprint(bits[part.own : part.own + part.size], part) for part in parts)
    assert digest_of("", total) == digest_of("", fingerprint(bits, whole))


@example([(2, 0, 2), (3, 1, 2), (2, 1, 1), (2, 0, 2)])
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4)), max_size=4))
def test_rectangles_of_a_box_are_its_elements_in_order(dimensions: list[tuple[int, int, int]]) -> None:
    shape = [length for length, _, _ in dimensions]
    firsts = [min(first, length - 1) for length, first, _ in dimensions]
    sizes = [min(size, n - first) for (n, _, size), first in zip(dimensions, firsts, strict=True)]
    whole = torch.arange(math.prod(shape)).view(shape)
    inside = whole[tuple(slice(first, first + n) for first, n in zip(firsts, sizes, strict=True))]
    matrix = matrices({"": shape})[""]
    found = [at for place in box(shape, firsts, sizes) for at in elements(Block(0, matrix, *place))]
    assert found == inside.flatten().tolist()


@given(any_block(), st.integers(0, 50), st.integers(0, 50))
def test_a_bucket_has_the_elements_between_its_ends(block: Block, start: int, stop: int) -> None:
    parts = list(block.between(start, stop))
    assert len(parts) <= 3
    inside = [at for at in elements(block) if start <= at < stop]
    assert [at for part in parts for at in elements(part)] == inside


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 20), st.integers(0, 20))
def test_pieces_are_the_elements_between_two_ends_in_order(lengths: list[int], start: int, stop: int) -> None:
    laid = list(in_turn(enumerate(lengths)))
    whole = [(number, element) for number, length, _ in laid for element in range(length)]
    assert all(whole[at : at + length] == [(number, i) for i in range(length)] for number, length, at in laid)
    found = [
        (piece.own + at, (piece.parameter, piece.begin + at))
        for piece in pieces_between(laid, start, max(start, stop), own=7)
        for at in range(piece.end - piece.begin)
    ]
    assert found == list(enumerate(whole[start:stop], start=7))


def test_order_compares_numbers_in_names_as_numbers() -> None:
    shapes = {"h.10.w": (2, 3), "h.9.w": (4,), "h.w": (), "h.9.b": (1, 2, 3)}
    expected = {"h.9.b": (0, 1, 6), "h.9.w": (6, 4, 1), "h.10.w": (10, 2, 3), "h.w": (16, 1, 1)}
    assert matrices(shapes) == matrices(dict(reversed(shapes.items()))) == expected


@settings(max_examples=60)
@given(two_layouts())
def test_the_ranks_of_any_layout_have_the_export_once(layouts: tuple[Layout, Layout]) -> None:
    """The weights of all ranks at their places are the tensors of the export, one after the other.

    Copies do not count, and padding of the vocabulary and of partitions has no place.
    """
    for layout in layouts:
        table, topology = table_of(layout.architecture), layout.topology
        exported: dict[str, Tensor] = {}
        for row in table:
            exported |= row.to_hf(numbers(row, "", 0))
        expected = torch.cat([exported[name].reshape(-1) for name in sorted(exported)])
        found, copied = (torch.full_like(expected, math.nan) for _ in range(2))
        for at in map(topology.position, range(topology.replica_size)):
            parts = layout.parts(at)
            flat = torch.cat([layout.vector(at, "", group) for group in range(len(parts))])
            held, copies = held_of(parts, layout.architecture, topology, at)
            assert not set(copies) - set(held)
            for block in held:
                of_rank = flat[block.own : block.own + block.size].view(block.rows, block.width)
                place = window(copied if block in copies else found, block)
                assert block in copies or place.isnan().all()
                place.copy_(of_rank)
        assert torch.equal(found, expected)
        assert torch.equal(copied.where(~copied.isnan(), expected), expected)


def window(vector: Tensor, block: Block) -> Tensor:
    """The place of a block in the canonical vector, shape [rows, width]."""
    return vector.as_strided((block.rows, block.width), (block.matrix.columns, 1), block.first)


def test_parameter_without_hf_name_keeps_its_own() -> None:
    whole = Parameter("bias", (3, 2))
    table = Table((whole, Parameter("norm", (2,), hf=("a.norm",))), 0)
    assert table.exported() == {"a.norm": (0, 2, 1), "bias": (2, 3, 2)}
    block = Block(5, table.matrices()["bias"], 1, 0, 2, 2)
    assert list(whole.exported(block, table.exported())) == [(5, (2, 3, 2), 1, 0, 2, 2)]
