"""The mean over the replicas of a federation that come to their end: the same bits at each, or none yet.

An attempt (`end_of_run`) has a tree of the members. In each bucket of the vector

    sums go up the tree         each member adds its own vector
    the mean comes down         the root divides, all hand on the same bytes

A member that has the whole mean says "done" to its parent when its children have said so. So the root has the
word of all, and says that the mean is final.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from megatron_noloco.federation.codes import bytes_of, fill
from megatron_noloco.federation.end_of_run import ROOT, EndOfRun
from megatron_noloco.federation.gather import Gather, Leader, Transfer
from megatron_noloco.federation.mesh import Blob, LostError, Patience, StalledError
from megatron_noloco.federation.rounds import Replica, is_plausible, late_change
from megatron_noloco.job.activity import now
from megatron_noloco.job.agreement import computed_by_rank_0, gather_from_all_ranks
from megatron_noloco.outer.finite_mean import ExchangeReport, MeanPiece
from megatron_noloco.outer.payload import UnequalError
from megatron_noloco.outer.vectors import HOST, NOTHING, Ranges
from megatron_noloco.plans.grouping import Group

FINAL = 2**52  # the number of the exchange at the end
_FIRST_TAG = 1 << 21  # inside the replica, beyond those of rounds and states
_BUCKET = 2**18  # elements: so bytes of a slow link deep in the tree are seen above in time
_AHEAD = 16  # buckets of sums before their mean
_HAS_ALL = b"+"
_HEARSAY_SECONDS = 5.0  # for the word of a root that is gone to come from others
_AGAIN_SECONDS = 0.5  # before another attempt
_STILL_SECONDS = 30.0  # without a byte, for each level of the tree between


class FinalMean:
    """An exchange that yields the mean over the replicas at their end, in fp32. Holds two vectors.

    A collective of the replica: its leader adds, sends and receives. See `outer.exchange.AnyExchange`.

    Args:
        end: finds the attempts; None on other ranks than the leader.

    Attributes:
        report: `group` has the replicas in the mean, `missed` names others, and why they are not. The deviation is
            that of this rank's part from the mean.
        stopped: whether there is no mean, since this job is to stop.
        is_late: whether there is no mean, since the others have theirs without this replica.
    """

    done = False  # before `finish`

    def __init__(self, replica: Replica, end: EndOfRun | None) -> None:
        self._replica, self._end, movement = replica, end, replica.movement
        self._gather = Gather(replace(movement, bucket=min(movement.bucket, _BUCKET)), _FIRST_TAG)
        self._vector, self.stopped, self.is_late = NOTHING, False, False
        self.report = ExchangeReport(())

    def begin(
        self,
        vector: Tensor,
        group: Group,
        number: int,
        what: str,
        exact: Ranges = (),
        rounding: Tensor | None = None,
    ) -> None:
        """Note what to average; `finish` does it. The arguments are those of `Exchange.begin`."""
        self._vector, self.report = vector.to(HOST), ExchangeReport(group)
        if (late := late_change(self._replica, len(vector))) is not None:
            self._vector += late

    def progress(self, until: float = math.inf) -> Iterator[MeanPiece]:
        """Yield nothing: `finish` yields the mean."""
        return iter(())

    def finish(self) -> Iterator[MeanPiece]:
        """Yield the mean, in one piece. Where nothing else has come it is the vector itself."""
        replica, end, mean = self._replica, self._end, torch.zeros_like(self._vector)
        given = replica.movement.own.between(0, replica.movement.length, given=True)
        parts = [self._vector[block.own : block.own + block.size] for block in given]
        squared_norm = sum(gather_from_all_ranks(sum(float(part.square().sum()) for part in parts)))
        now.part("waiting for the other replicas in the final mean")
        included = list[int]()
        while not included and computed_by_rank_0(lambda: end is not None and end.find()):
            transfer = self._gather.whole(self._vector, mean)
            included = computed_by_rank_0(lambda: self._attempt(transfer, squared_norm))  # noqa: B023
            transfer.wait()
        if not included:
            self.stopped = computed_by_rank_0(lambda: end is not None and end.members.is_leaving)
            self.is_late, mean, included = not self.stopped, self._vector.clone(), [replica.place.replica]
        for start, stop in replica.movement.padding:
            mean[start:stop] = self._vector[start:stop]
        self._complete(mean, {*included})
        yield MeanPiece(0, len(mean), mean)

    def _attempt(self, transfer: Transfer, squared_norm: float) -> list[int]:
        """Take part in an attempt; return the slots in the mean, none where it fails. On the leader."""
        assert self._end is not None
        return _Attempt(self._end, cast(Leader, transfer), squared_norm, self.report).run()

    def _complete(self, mean: Tensor, included: set[int]) -> None:
        """Complete the report."""
        report, why_not = self.report, {} if self._end is None else self._end.why_not
        report.missed = "; ".join(
            f"without replica {slot}, which {text}"
            for slot, text in sorted(why_not.items())
            if slot not in included
        )
        report.group = tuple(sorted(included))
        report.seconds = time.perf_counter() - report.started
        report.compared_elements = len(mean)
        report.squared_deviation = float((mean - self._vector).square().sum())


class _FailedError(Exception):
    """Ends an attempt."""


class _Attempt:
    """The attempt of `end`, as this replica takes part in it; on the leader.

    Args:
        squared_norm: of the vector of this replica.
    """

    def __init__(self, end: EndOfRun, transfer: Leader, squared_norm: float, report: ExchangeReport) -> None:
        self._end, self._mesh, self._slot = end, end.members.mesh, end.members.slot
        assert end.attempt is not None
        self._attempt, self._transfer = end.attempt, transfer
        self._squared_norm, self._report = squared_norm, report

    def run(self) -> list[int]:
        """Return the slots in the mean, none where the attempt fails."""
        attempt, mesh, slot = self._attempt, self._mesh, self._slot
        try:
            self._average()
            for child in attempt.children(slot):
                with self._naming(child):
                    fetch = mesh.begin(attempt.members[child], f"{attempt.base}done/{child}")
                    mesh.result(fetch, self._patience(child))
            if slot == attempt.root.slot and self._why_over():
                raise _FailedError
            if slot != attempt.root.slot:
                mesh.offer(f"{attempt.base}done/{slot}", _HAS_ALL, attempt.members[attempt.parents[slot]])
                self._wait_for_word()
            self._end.use_mean(attempt)
        except (_FailedError, LostError, UnequalError):
            self._end.attempt = None
            mesh.wait(lambda: False, mesh.clock() + _AGAIN_SECONDS)
            return []
        finally:
            mesh.offers.withdraw(attempt.base)
        return list(attempt.members)

    def _average(self) -> None:
        """Pass the sums up and the mean down. Raises _FailedError, LostError, UnequalError.

        A member sends `_AHEAD` buckets of its sum before it waits for the mean of the first, so that a tree is as
        fast as its slowest link. Whoever sends bucket t of its sum has the mean of bucket t - _AHEAD - 1.
        """
        attempt, slot, transfer, buckets = self._attempt, self._slot, self._transfer, self._transfer.buckets
        parent, children = attempt.parents[slot], attempt.children(slot)
        ahead = 0 if parent == ROOT else _AHEAD
        sums = {child: self._pieces(child, f"sum/{child}/", len(buckets)) for child in children}
        means = iter(()) if parent == ROOT else self._pieces(parent, f"mean/{slot}/", len(buckets))
        below = {child: self._below(child) for child in children}
        distances, own, totals = Counter[int](), deque[Tensor](), deque[Tensor]()

        def check(other: int, mean: Tensor, vector: Tensor) -> None:
            distances[other] += float((mean - vector).square().sum())  # type: ignore[assignment]
            if not is_plausible(distances[other], self._squared_norm):
                self._end.refuse(other)
                raise _FailedError

        for at in range(len(buckets) + ahead):
            if at < len(buckets):
                own.append(transfer.content(at))
                totals.append(own[-1].clone() if children else own[-1])
                for child in children:
                    theirs = torch.empty_like(totals[-1])
                    with self._naming(child):
                        fill([theirs], next(sums[child]))
                    check(child, theirs / below[child], own[-1])
                    totals[-1] += theirs
                    self._mesh.offers.release(f"{attempt.base}mean/{child}/{at - _AHEAD - 1}")
                if parent != ROOT:
                    self._offer(f"sum/{slot}/{at}", totals[-1], parent)
            if at >= ahead:
                result, total, vector = transfer.result(at - ahead), totals.popleft(), own.popleft()
                if parent == ROOT:
                    torch.div(total, len(attempt.members), out=result)
                else:
                    with self._naming(parent):
                        fill([result], next(means))
                    check(parent, result, vector)
                    self._mesh.offers.release(f"{attempt.base}sum/{slot}/{at - ahead}")
                transfer.hand_out(at - ahead, result)
                for child in children:
                    self._offer(f"mean/{child}/{at - ahead}", result, child)

    def _below(self, slot: int) -> int:
        """Return the number of members in a subtree."""
        return 1 + sum(map(self._below, self._attempt.children(slot)))

    def _pieces(self, giver: int, name: str, number: int) -> Iterator[Blob]:
        names = (f"{self._attempt.base}{name}{at}" for at in range(number))
        return self._mesh.fetch_all(names, _AHEAD, self._patience(giver), is_sent=True)

    def _offer(self, name: str, bucket: Tensor, to: int) -> None:
        self._report.bytes_sent += bucket.nbytes
        self._mesh.offer(f"{self._attempt.base}{name}", bytes_of(bucket), self._attempt.members[to])

    def _patience(self, other: int) -> Patience:
        """Return how long to wait for a neighbour: those between it and a fault give up before."""
        attempt, own = self._attempt, self._slot
        is_child = attempt.parents[other] == own
        levels = attempt.depth(other) if is_child else attempt.depth(attempt.root.slot) + attempt.level(own)
        seconds = (1 + levels) * _STILL_SECONDS
        return Patience(self._mesh, attempt.members[other], seconds=seconds, why_not=self._why_over)

    def _wait_for_word(self) -> None:
        """Wait until the root has decided, or is gone and nobody has heard that it did. Raises _FailedError."""
        mesh, root, end = self._mesh, self._attempt.root, self._end
        until = mesh.clock() + self._patience(self._attempt.parents[self._slot]).seconds
        mesh.wait(lambda: end.is_final(self._attempt) or bool(self._why_over()), until)
        if not mesh.reaches(root):
            mesh.wait(lambda: end.is_final(self._attempt), mesh.clock() + _HEARSAY_SECONDS)
        if not end.is_final(self._attempt):
            if mesh.clock() >= until:
                end.refuse(root.slot)
            raise _FailedError

    def _why_over(self) -> str:
        return self._end.why_over(self._attempt)

    @contextmanager
    def _naming(self, slot: int) -> Iterator[None]:
        """Refuse a member with which something is exchanged, if it is there and sends nothing, or no bucket."""
        try:
            yield
        except (UnequalError, StalledError):
            if self._mesh.reaches(self._attempt.members[slot]):
                self._end.refuse(slot)
            raise
