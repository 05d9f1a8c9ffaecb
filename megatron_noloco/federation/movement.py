"""What each rank of a replica has of the canonical vector, and the buckets in which `gather` moves it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch.distributed as dist

from megatron_noloco.errors import UserError
from megatron_noloco.job.agreement import gather_from_all_ranks
from megatron_noloco.outer.vectors import BUCKET, Ranges
from megatron_noloco.outer.weights import Weights
from megatron_noloco.plans.canonical import Block, Holding, Matrix
from megatron_noloco.transport.interface import Flight, Message, Transport
from megatron_noloco.transport.torch_dist import TorchTransport

Held = tuple[Sequence[Block], Sequence[Block]]
"""What a rank has of the canonical vector, and those of these blocks that another rank has as well, and sends."""


@dataclass(frozen=True)
class Movement:
    """The ranks of a replica, and what each has of the canonical vector.

    Attributes:
        holdings: by rank. Rank 0 leads.
        intervals: of the canonical vector, one for each fragment.
        transport: between the ranks of the replica; None: it has one rank.
        exact: ranges of the canonical vector that are never sent as codes.
        padding: ranges of this rank's weights that have no place in the canonical vector.
        bucket: elements of a bucket; the same for all replicas.
    """

    holdings: Sequence[Holding]
    intervals: Sequence[range]
    transport: Transport | None = None
    exact: Ranges = ()
    padding: Ranges = ()
    bucket: int = BUCKET

    @property
    def rank(self) -> int:
        return 0 if self.transport is None else self.transport.rank

    @property
    def own(self) -> Holding:
        """What this rank has; places are those in its weights."""
        return self.holdings[self.rank]

    @property
    def length(self) -> int:
        """Number of elements of the canonical vector."""
        return self.intervals[-1].stop

    def buckets(self, interval: range) -> list[range]:
        """Cut an interval into buckets, the last of which may be shorter."""
        return [
            range(start, min(start + self.bucket, interval.stop))
            for start in range(interval.start, interval.stop, self.bucket)
        ]

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight | None:
        """Post messages inside the replica; None where there is nothing in them."""
        sends, receives = ([message for message in way if len(message.buffer)] for way in (sends, receives))
        if self.transport is None or not (sends or receives):
            return None
        return self.transport.post(sends, receives, tag)


def alone(length: int, fragments: int = 1, bucket: int = BUCKET) -> Movement:
    """Return how a replica of one rank moves vectors of so many elements: nowhere."""
    whole = Block(0, Matrix(0, 1, length), 0, 0, 1, length)
    return Movement([Holding([whole])], _intervals(length, fragments), bucket=bucket)


def movement_of(weights: Weights, fragments: int, held: Held | None = None) -> Movement:
    """Return how the ranks of this job move their vectors. A collective of the job.

    Args:
        weights: of this rank.
        held: of this rank; None: the canonical vector is that of the ranks, one after the other.
    """
    ranges = gather_from_all_ranks((weights.length, list(weights.copied())))
    exact: list[tuple[int, int]] = []
    if held is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        starts = list(accumulate((length for length, _ in ranges), initial=0))
        whole = Block(0, Matrix(starts[rank], 1, weights.length), 0, 0, 1, weights.length)
        held = [whole] if weights.length else [], []
        exact = [
            (start + first, start + last)
            for start, (_, copied) in zip(starts, ranges, strict=False)
            for first, last in copied
        ]
    holdings = [Holding(*one) for one in gather_from_all_ranks(held)]
    length = max(holding.stop for holding in holdings)
    transport = TorchTransport() if len(holdings) > 1 else None
    own = sorted((block.own, block.own + block.size) for block in held[0])
    edges = [0, *(edge for range_ in own for edge in range_), weights.length]
    padding = [range_ for range_ in zip(edges[::2], edges[1::2], strict=True) if range_[0] < range_[1]]
    return Movement(holdings, _intervals(length, fragments), transport, exact, padding)


def _intervals(length: int, fragments: int) -> list[range]:
    if fragments > length:
        raise UserError(f"fragments {fragments} are more than the {length} weights of the model")
    edges = [length * part // fragments for part in range(fragments + 1)]
    return [range(*ends) for ends in pairwise(edges)]
