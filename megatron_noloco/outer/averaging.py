"""The exchange: a group of replicas learns the mean of one vector, in messages between two ranks.

A pair swaps its vectors, one message each way. A larger group of n does what a bandwidth-optimal all-reduce
does, without a collective: each member owns 1/n of the elements, receives them from everybody, averages, and
hands the mean back; 2(n-1)/n vectors sent, instead of the n-1 that everyone-to-everyone would cost.
Either way all members use bitwise the same mean, on which the method's mean recursion rests (method fact 3).
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.topology import Topology
from megatron_noloco.transport.protocol import ExchangeTimeoutError, Message, Transport

_STRETCH = 1 << 24  # elements a group of more than two shares at a time: what each holds of the others'


class PartnerTimeoutError(RuntimeError):
    """A partner did not answer within the deadline; says who, in which exchange, after how many seconds."""


class MeanPiece(NamedTuple):
    """The mean over the group of elements start..stop of the vector; valid until the next piece is asked for."""

    start: int
    stop: int
    mean: Tensor


@dataclass
class ExchangeReport:
    """What one exchange cost and showed, on this rank."""

    group: Group  # this replica included
    bytes_sent: int = 0
    wait_seconds: float = 0.0
    seconds: float = 0.0
    squared_deviation: float = 0.0  # sum over elements of the unbiased variance over the group
    compared_elements: int = 0
    poisoned_elements: int = 0  # in chunks where some member was not finite
    started: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def standard_deviation(self) -> float:
        """Over the group, root mean square over the compared elements; nan for a bye."""
        if not self.compared_elements:
            return math.nan
        return math.sqrt(self.squared_deviation / self.compared_elements)


class GroupAveraging:
    """Averages this rank's vector with its counterparts (same stage, lane, shard) in the replica's group.

    A chunk in which a member holds NaN or infinity is averaged over the members that are finite there, so a
    poisoned replica does not spread; it is counted in the report.
    """

    def __init__(self, transport: Transport, topology: Topology, deadline_seconds: float) -> None:
        self.transport = transport
        self.topology = topology
        self.deadline_seconds = deadline_seconds
        self.report = ExchangeReport(group=())
        self._inbox = torch.empty(0)
        self._slices = torch.empty(0)

    def mean(self, vector: Tensor, group: Group, tag: int, what: str) -> Iterator[MeanPiece]:
        """Yield the mean in pieces, each element once, as chunks land; `self.report` is complete at the end.

        Args:
            vector: fp32, flat, where the transport can send from; not to be written until the iterator
                is exhausted.
            group: the replicas to average over, ascending, this one included.
            tag: the same in the whole group, different from that of other exchanges in the air.
            what: the exchange, as the error names it.

        Raises PartnerTimeoutError when a member does not answer within the deadline.
        """
        replica = self.topology.position(self.transport.rank).replica
        self.report = ExchangeReport(group)
        if len(self._inbox) < len(vector) or self._inbox.device != vector.device:
            self._inbox = buffer_beside(vector, len(vector))
        try:
            if len(group) == 1:
                yield MeanPiece(0, len(vector), self._inbox[: len(vector)].copy_(vector))
            elif len(group) == 2:
                yield from self._swap(vector, group[1] if group[0] == replica else group[0], 2 * tag)
            else:
                for start in range(0, len(vector), _STRETCH):
                    for piece in self._share(vector[start : start + _STRETCH], group, replica, 2 * tag):
                        yield MeanPiece(start + piece.start, start + piece.stop, piece.mean)
        except ExchangeTimeoutError as error:
            partner = self.topology.position(error.rank).replica
            raise PartnerTimeoutError(
                f"replica {replica}: no answer from partner {partner} (rank {error.rank}) in {what} "
                f"after {error.waited_seconds:.1f} s (noloco.deadline_seconds)"
            ) from error
        self.report.seconds = time.perf_counter() - self.report.started

    def whole_mean(self, vector: Tensor, group: Group, tag: int, what: str) -> Tensor:
        """Like `mean`, in one piece of new memory."""
        whole = torch.empty_like(vector)
        for start, stop, mean in self.mean(vector, group, tag, what):
            whole[start:stop] = mean
        return whole

    def _swap(self, vector: Tensor, partner: int, tag: int) -> Iterator[MeanPiece]:
        rank = self.topology.counterpart(self.transport.rank, partner)
        inbox, report = self._inbox[: len(vector)], self.report
        flight = self.transport.post([Message(rank, vector)], [Message(rank, inbox)], tag)
        report.bytes_sent += vector.nbytes
        for _, start, stop in flight.arrivals(self.deadline_seconds):
            mine, theirs = vector[start:stop], inbox[start:stop]
            yield MeanPiece(start, stop, self._finite_mean([mine, theirs], out=theirs))
        flight.finish(self.deadline_seconds)
        report.wait_seconds += flight.wait_seconds

    def _share(self, vector: Tensor, group: Group, replica: int, tag: int) -> Iterator[MeanPiece]:
        ranks = [self.topology.counterpart(self.transport.rank, member) for member in group]
        me = group.index(replica)
        others = [member for member in range(len(group)) if member != me]
        bounds = [len(vector) * member // len(group) for member in range(len(group) + 1)]
        parts = [slice(bounds[member], bounds[member + 1]) for member in range(len(group))]
        width = bounds[me + 1] - bounds[me]
        if len(self._slices) < len(group) * width or self._slices.device != vector.device:
            self._slices = buffer_beside(vector, len(group) * width)
        slices = list(self._slices[: len(group) * width].view(len(group), width))
        slices[me] = vector[parts[me]]

        flight = self.transport.post(
            [Message(ranks[j], vector[parts[j]]) for j in others],
            [Message(ranks[j], slices[j]) for j in others],
            tag,
        )
        for _ in flight.arrivals(self.deadline_seconds):
            pass
        mean = self._finite_mean(slices, out=self._inbox[parts[me]])
        flight.finish(self.deadline_seconds)
        self.report.wait_seconds += flight.wait_seconds
        self.report.bytes_sent += vector.nbytes - slices[me].nbytes + len(others) * mean.nbytes

        flight = self.transport.post(
            [Message(ranks[j], mean) for j in others],
            [Message(ranks[j], self._inbox[parts[j]]) for j in others],
            tag + 1,
        )
        yield MeanPiece(parts[me].start, parts[me].stop, mean)
        for message, start, stop in flight.arrivals(self.deadline_seconds):
            first = parts[others[message]].start
            yield MeanPiece(first + start, first + stop, self._inbox[first + start : first + stop])
        flight.finish(self.deadline_seconds)
        self.report.wait_seconds += flight.wait_seconds

    def _finite_mean(self, members: Sequence[Tensor], out: Tensor) -> Tensor:
        """The mean in the order of the group, so that equal inputs give equal bits; measures the deviation."""
        report = self.report
        if len(members) == 2:
            difference = members[0] - members[1]
            deviation = float(torch.dot(difference, difference)) / 2
            mean = torch.add(*members, out=out).mul_(0.5) if math.isfinite(deviation) else out
        else:
            total = torch.stack(tuple(members))
            deviation = float(total.var(dim=0).sum())
            mean = torch.mean(total, dim=0, out=out) if math.isfinite(deviation) else out
        if math.isfinite(deviation):
            report.squared_deviation += deviation
            report.compared_elements += len(out)
            return mean
        report.poisoned_elements += len(out)
        finite = [member for member in members if bool(torch.isfinite(member).all())] or [members[0]]
        return out.copy_(torch.stack(finite).mean(dim=0))


def buffer_beside(tensor: Tensor, length: int) -> Tensor:
    """An fp32 buffer on the same device; pinned in host memory where there is an accelerator."""
    pinned = tensor.device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(length, dtype=torch.float32, device=tensor.device, pin_memory=pinned)
