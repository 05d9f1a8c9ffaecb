"""Where the parameters lie in the flat vectors of a rank."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FlatPart:
    """The parameters of one group of the inner optimizer, as ZeRO flattens them.

    They lie one after the other, padded at the end, and the whole is cut into equal parts, one for each
    data-parallel rank. The flat weights of a rank are its parts of all groups, in the order of the groups; slow
    weights, momentum and the moments of the inner optimizer lie alike.

    Args:
        length: elements of this rank's part, padding included; the same on all data-parallel ranks.
        parameters: name in the unsplit model and shape on a tensor-parallel rank, in order.
    """

    length: int
    parameters: list[tuple[str, list[int]]]
