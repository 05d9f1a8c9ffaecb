"""Where the weights of ranks of any layout lie in the canonical vector."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_noloco.model.families import table_of
from megatron_noloco.plans.canonical import Block, Matrix, matrices
from tests.unit.test_layouts import VOCABULARY, Layout, two_layouts


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
    matrix = Matrix(draw(st.integers(0, 9)), draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    top, left = draw(st.integers(0, matrix.rows - 1)), draw(st.integers(0, matrix.columns - 1))
    rows, width = draw(st.integers(1, matrix.rows - top)), draw(st.integers(1, matrix.columns - left))
    return Block(draw(st.integers(0, 9)), matrix, top, left, rows, width)


@given(any_block(), st.integers(0, 36), st.integers(0, 36))
def test_parts_of_a_block_are_its_elements_in_order(block: Block, begin: int, end: int) -> None:
    begin, end = min(begin, block.size), min(end, block.size)
    parts = list(block.part(begin, end))
    assert len(parts) <= 3
    assert [at for part in parts for at in elements(part)] == elements(block)[begin:end]
    assert [part.own + i for part in parts for i in range(part.size)] == [
        *range(block.own + begin, block.own + end)
    ]
    assert [part.first for part in parts] == [elements(part)[0] for part in parts]


@given(any_block(), st.integers(0, 50), st.integers(0, 50))
def test_a_slab_of_the_vector_has_the_elements_between_its_ends(block: Block, start: int, stop: int) -> None:
    parts = list(block.between(start, stop))
    assert len(parts) <= 3
    assert [at for part in parts for at in elements(part)] == [
        at for at in elements(block) if start <= at < stop
    ]


@settings(max_examples=40)
@given(two_layouts())
def test_the_ranks_of_any_layout_have_the_same_vector_once(layouts: tuple[Layout, Layout]) -> None:
    """Padding of the vocabulary and copies do not count; so replicas of any two layouts have one vector."""
    lengths = set()
    for layout in layouts:
        table, topology = table_of(layout.architecture), layout.topology
        whole = matrices(
            {
                row.name: (VOCABULARY, *row.shape[1:]) if row.is_embedding_or_output else row.shape
                for row in table
                if row.same_as is None
            }
        )
        held: list[int] = []
        for at in map(topology.position, range(topology.replica_size)):
            for part in layout.parts(at):
                blocks = list(part.blocks(table, whole, topology, at))
                own = [block.own + i for _, block in blocks for i in range(block.size)]
                assert own == sorted(set(own))
                assert not own or own[-1] < part.length
                for row, block in blocks:
                    if row.same_as is None and (row.tp_dim is not None or at.tp == 0):
                        held += elements(block)
        lengths.add(len(held))
        assert sorted(held) == list(range(max(matrix.stop for matrix in whole.values())))
    assert len(lengths) == 1
