"""What an exchange may send: a row for each payload, with what was measured of it."""

from typing import NamedTuple


class Payload(NamedTuple):
    """A payload: fp32, or a code (`outer.payload`).

    Attributes:
        bits: of a digit of the code; None: fp32.
        planes: widths of the parts of a digit, the lowest first; a byte of a message holds parts of one width.
        keeps: whether larger groups keep rounding errors.
        ranges: root mean squares of the difference between two members that a digit holds: in pairs, and where
            rounding errors are kept.
        errors: epsilon of `stability.spread_factor`, likewise, with a margin of 1 to 7 % above what is measured.
        bytes: of an exchange in trainings, over those without blocks whose next digit is sent (docs/log.md).
    """

    bits: int | None
    planes: tuple[int, ...]
    keeps: bool
    ranges: tuple[float, float]
    errors: tuple[float, float]
    bytes: float


PAYLOADS = {
    "fp32": Payload(None, (), False, (0.0, 0.0), (0.0, 0.0), 1.0),
    "int8": Payload(8, (8,), False, (8.0, 8.0), (0.03, 0.03), 1.015),
    "int4": Payload(4, (4,), True, (6.0, 8.0), (0.41, 0.55), 1.04),
    "int3": Payload(3, (2, 1), True, (4.0, 4.0), (0.62, 0.62), 1.16),
}
CODES = {payload.bits: payload for payload in PAYLOADS.values() if payload.bits is not None}
BITS = tuple(CODES)


def keeps_rounding(bits: int | None, members: float) -> bool:
    """Return whether the members of a group keep the rounding errors of their codes (`outer.payload`)."""
    return members > 2 and bits is not None and CODES[bits].keeps
