"""The mean of a vector over a group, without members that are not finite; and the report of an exchange."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_noloco.outer.host_kernels import halve, mean_of_group, mean_of_rows, squared_distance
from megatron_noloco.plans.grouping import Group

_AT_ONCE = 1 << 18  # elements, which stay in cache

# Of an ExchangeReport, what adds up over the parts of a vector; a checkpoint has the numbers in this order.
MEASURED: dict[str, type] = {
    "bytes_sent": int,
    "squared_deviation": float,
    "compared_elements": int,
    "poisoned_elements": int,
    "squared_error": float,
    "resent_elements": int,
}


class MeanPiece(NamedTuple):
    """Holds the group's mean of elements start..stop of the vector; valid until the next piece is asked for."""

    start: int
    stop: int
    mean: Tensor


@dataclass
class ExchangeReport:
    """Reports what one exchange cost, and what it measured, on this rank.

    Attributes:
        group: the replicas averaged, this one included; this one alone where the round was skipped.
        bytes_sent: by this rank.
        wait_seconds: spent waiting inside `Exchange.finish`.
        seconds: from `begin` until this rank has seen that everything is received and sent.
        squared_deviation: sum over the elements of the unbiased variance over the group.
        compared_elements: elements in that sum.
        poisoned_elements: elements in pieces of 2^18 where some member was not finite.
        squared_error: of the code, likewise: s^2 / 12 of each coded element, the variance of its rounding.
        resent_elements: in blocks that the code did not hold, of which more bits were sent, or fp32.
        missed: the partner that was not exchanged with, and why; empty if the round took place.
        in_doubt: whether a partner may have used the mean of a round that was skipped here.
        deadline_seconds: for which a partner would be waited for now; None where it does not change.
        started: when it began, on the clock `time.perf_counter`.
    """

    group: Group
    bytes_sent: int = 0
    wait_seconds: float = 0.0
    seconds: float = 0.0
    squared_deviation: float = 0.0
    compared_elements: int = 0
    poisoned_elements: int = 0
    squared_error: float = 0.0
    resent_elements: int = 0
    missed: str = ""
    in_doubt: bool = False
    deadline_seconds: float | None = None
    started: float = field(default_factory=time.perf_counter, repr=False)

    def add(self, other: "ExchangeReport") -> None:
        """Add what the exchange of a further part of the vector cost and measured."""
        for name in MEASURED:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def skip(self, replica: int, missed: str) -> None:
        """Make this the report of a skipped round, which did not take place or does not count."""
        self.group, self.missed = (replica,), missed
        self.squared_deviation = self.squared_error = 0.0
        self.compared_elements = self.poisoned_elements = self.resent_elements = 0

    @property
    def standard_deviation(self) -> float:
        """Of the group, root mean square over the compared elements; nan for a skipped round."""
        if not self.compared_elements:
            return math.nan
        return math.sqrt(self.squared_deviation / self.compared_elements)

    @property
    def payload_error(self) -> float:
        """Expected error of the code, relative to the standard deviation of the group; nan where that is zero.

        The same as |error of the pull towards the mean| / |pull|, in the Euclidean norm: both terms have the same
        factor, 1 - 1/n.
        """
        if not self.squared_deviation:
            return math.nan
        return math.sqrt(self.squared_error / self.squared_deviation)


def finite_mean(members: Sequence[Tensor], out: Tensor, report: ExchangeReport) -> Iterator[MeanPiece]:
    """Average the members' vectors, each of shape [elements], in the order given: equal inputs, equal bits, also
    at other places of a vector.

    A piece in which a member holds NaN or infinity is averaged over the members that are finite there (where none
    is: the first), so that a poisoned replica does not spread. The deviation of finite pieces and the
    number of poisoned elements are added to `report`.

    Yields pieces of `out`, which may be one of a pair; it is filled when they are exhausted.
    """
    for start in range(0, len(out), _AT_ONCE):
        piece = slice(start, start + _AT_ONCE)
        mean = out[piece]
        _mean_of_piece([member[piece] for member in members], mean, report)
        yield MeanPiece(start, start + len(mean), mean)


def _mean_of_piece(members: Sequence[Tensor], out: Tensor, report: ExchangeReport) -> None:
    if len(members) == 2:
        one, two = members
        deviation = squared_distance(one, two) / 2
        if math.isfinite(deviation):
            halve(one, two, out)
    else:
        deviation = mean_of_group(members, out) / (len(members) - 1)
    if math.isfinite(deviation):
        report.squared_deviation += deviation
        report.compared_elements += len(out)
        return
    report.poisoned_elements += len(out)
    finite = [member for member in members if bool(torch.isfinite(member).all())] or [members[0]]
    mean_of_rows(finite, out)
