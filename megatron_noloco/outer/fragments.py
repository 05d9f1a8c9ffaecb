"""Fragments: a rank's weights, cut into F parts whose rounds are at different local steps.

Each weight is exchanged once in k local steps, as without fragments, but an exchange carries 1/F of the vector,
and each fragment has groups of its own (`plans.fragments`, `Grouping.groups`). The idea is that of Streaming
DiLoCo (Douillard et al., arXiv 2501.18512), whose fragments are averaged over all replicas.

A round is element by element. So what docs/method.md says of a round holds for each fragment on its own: its outer
gradient is that of the k local steps before its round begins, and of fewer in its first one.

Where to cut. Each rank cuts its own vector into equal parts, whatever its parameters are: an embedding may be
more than 1/F of all weights, and a partition of ZeRO begins and ends anywhere. In a vector that has the order of
the model, a fragment is some consecutive layers, of which the first and the last may be cut.

Copies. What other ranks of the replica hold as well (`Weights.copied`) stays equal if it meets the same replicas
after the same local steps. It lies at different places of the ranks' vectors, so all of it is in fragment 0.
"""

from itertools import pairwise

from megatron_noloco.outer.spans import Ranges, Spans


class Fragment(Spans):
    """The ranges of one fragment, and what an exchange must know of them.

    Attributes:
        index: 0 to F - 1.
        name: of the fragment, after that of its round in an error; empty where there is one only.
        exact: ranges of the fragment's own vector of which other ranks hold copies.
    """

    def __init__(self, ranges: Ranges, index: int = 0, name: str = "", exact: Ranges = ()) -> None:
        super().__init__(ranges)
        self.index = index
        self.name = name
        self.exact = exact


def cut(length: int, copied: Ranges, fragments: int) -> list[Fragment]:
    """The fragments of a vector of `length` elements; fragment 0 begins with those that are `copied`.

    Where these are more than 1/F of the vector, the other fragments share the rest.

    Args:
        copied: see `Weights.copied`; ascending.

    Raises ValueError for more fragments than elements.
    """
    if fragments == 1:
        return [Fragment([(0, length)], exact=copied)]
    if fragments > length:
        raise ValueError(f"fragments {fragments} are more than the {length} weights of a rank")
    edges = [0, *(edge for range_ in copied for edge in range_), length]
    others = [range_ for range_ in zip(edges[::2], edges[1::2], strict=True) if range_[0] < range_[1]]
    order, copies = Spans([*copied, *others]), Spans(copied).length
    first = max(length // fragments, copies)
    bounds = [0, *(first + (length - first) * part // (fragments - 1) for part in range(fragments))]
    return [
        Fragment(
            [(place.start, place.stop) for _, place in order.within(*ends)],
            index,
            f", fragment {index}",
            [(0, copies)] if copies and index == 0 else (),
        )
        for index, ends in enumerate(pairwise(bounds))
    ]
