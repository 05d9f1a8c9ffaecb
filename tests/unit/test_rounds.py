"""A round between two jobs counts for both or for neither, whatever is lost, or it is reported as in doubt."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_noloco.federation import rounds
from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.messages import Prepared
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.pairing import Pairing
from megatron_noloco.federation.partners import Partners
from megatron_noloco.federation.rounds import (
    ImplausibleError,
    Leading,
    PairExchange,
    Replica,
    check_plausible,
)
from megatron_noloco.outer import ExchangeReport
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import NolocoSettings
from tests.unit.fleet import noise
from tests.unit.nodes import Nodes, address_of, run, until

LENGTH = 50
DEADLINE = 15.0
ROUND_BYTES = 320  # at least what a side sends in a round


class Inline(Executor):
    """Runs what is submitted at once, since the jumping clock waits for no thread."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class InOneLoop:
    """The thread of a leader, for a caller in its own event loop."""

    def __init__(self, node: Node) -> None:
        self.node, self.arithmetic = node, Inline()

    def check(self) -> None:
        assert self.node.failure is None

    def call(self, work: Awaitable[Any]) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(work)

    def do(self, change: Callable[..., object], *arguments: Any) -> None:
        change(*arguments)


def replica_of(node: Node, length: int = LENGTH) -> Replica:
    """Return a replica of one rank."""
    thread: Any = InOneLoop(node)
    leading = Leading(thread, Partners(node, DEADLINE, DEADLINE, 1000))
    gather, pairing = Gather(alone(length)), Pairing(NolocoSettings(payload="fp32"), 1)
    return Replica(gather, Place(node.slot, 2), pairing, leading)


class Outcome(NamedTuple):
    """Of a round on one side."""

    used: Tensor
    report: ExchangeReport

    @property
    def counts(self) -> bool:
        return len(self.report.group) == 2


async def take_part(replica: Replica, vector: Tensor, number: int, phase: float = 0.0) -> Outcome:
    """Take part in a round, in which this replica waits for the partner after some seconds of local steps."""
    exchange: PairExchange = replica.exchange()
    exchange.begin(vector, (), number, "a test")
    if exchange._partner is not None:
        ended: Any = exchange._outcome
        try:
            await asyncio.sleep(phase)
            exchange._set_deadline(DEADLINE)
            await asyncio.wait([ended])
        finally:
            ended.cancel()
    (piece,) = exchange.finish()
    return Outcome(piece.mean, exchange.report)


async def pair(nodes: Nodes) -> list[Node]:
    made = [await nodes.add(0), await nodes.add(1, address_of(0))]
    await until(lambda: all(node.present() for node in made))
    return made


async def both(replicas: list[Replica], vectors: list[Tensor], number: int) -> list[Outcome]:
    return await asyncio.gather(*(take_part(*one, number) for one in zip(replicas, vectors, strict=True)))


def vectors(seed: int = 0) -> list[Tensor]:
    base = noise(LENGTH, seed=seed)
    return [base + 0.01 * noise(LENGTH, seed=seed + 1 + slot) for slot in range(2)]


async def test_without_faults_rounds_count_and_give_the_mean() -> None:
    async with Nodes() as nodes:
        replicas, own = list(map(replica_of, await pair(nodes))), vectors()
        for number in range(3):
            for found in await both(replicas, own, number):
                assert found.counts
                assert torch.equal(found.used, (own[0] + own[1]) / 2)


@pytest.mark.parametrize(
    ("factor", "why"), [(math.nan, "sent numbers that are not finite"), (1e4, "sent absurd numbers")]
)
async def test_a_vector_that_must_not_be_used_is_skipped_on_both_sides(factor: float, why: str) -> None:
    async with Nodes() as nodes:
        replicas, own = list(map(replica_of, await pair(nodes))), vectors()
        own[1] = own[1] * factor
        first, second = await both(replicas, own, 0)
        assert not first.counts
        assert not second.counts
        assert first.report.missed.startswith(f"replica 1 {why}")
        assert second.report.missed.startswith(
            ("replica 0 does not accept the mean", "replica 0 was sent numbers")
        )
        assert torch.equal(first.used, own[0])
        assert not (first.report.in_doubt)
        assert not (second.report.in_doubt)
        found = await take_part(replicas[0], own[0], 1)
        assert why in found.report.missed, "it is avoided for some rounds"


async def test_replicas_of_unlike_sizes_skip_the_round() -> None:
    async with Nodes() as nodes:
        made = await pair(nodes)
        replicas = [replica_of(made[0]), replica_of(made[1], LENGTH + 1)]
        found = await both(replicas, [torch.ones(LENGTH), torch.ones(LENGTH + 1)], 0)
        assert not any(one.counts or one.report.in_doubt for one in found)
        assert any("a vector of another length" in one.report.missed for one in found)


async def test_absent_partner_is_awaited_until_deadline() -> None:
    async with Nodes() as nodes:
        made = await pair(nodes)
        replica, at = replica_of(made[0]), asyncio.get_running_loop().time
        began = at()
        found = await take_part(replica, vectors()[0], 0, phase=30.0)
        assert 30.0 + DEADLINE <= at() - began < 31.0 + DEADLINE
        assert found.report.missed == "replica 1 missed the deadline"
        assert not found.report.in_doubt
        again = await take_part(replica, vectors()[0], 1)
        assert again.report.missed == "replica 1 missed its last deadline"


async def test_a_partner_that_skips_the_round_is_not_waited_for() -> None:
    async with Nodes() as nodes:
        made = await pair(nodes)
        waits = asyncio.create_task(take_part(replica_of(made[0]), vectors()[0], 3))
        await asyncio.sleep(1.0)
        began = asyncio.get_running_loop().time()
        made[1].begin_round(3, None)
        found = await waits
        assert asyncio.get_running_loop().time() - began < 1.0
        assert found.report.missed == "replica 1 has no part in this round"


async def test_a_lost_connection_is_named_as_such() -> None:
    async with Nodes(lambda number: (100, None) if number == 1 else (None, None)) as nodes:
        found = await both(list(map(replica_of, await pair(nodes))), vectors(), 0)
        assert {one.report.missed for one in found} == {
            "replica 1: the connection was lost",
            "replica 0: the connection was lost",
        }


def test_cut_before_last_byte_leaves_no_doubt() -> None:
    """One side is prepared and has heard of the other; the other asks over the link."""

    async def main(cut: int, side: int) -> tuple[bool, bool]:
        limits = [(None, None), (cut, None) if side else (None, cut)]
        async with Nodes(lambda number: limits[min(number, 1)]) as nodes:
            replicas, own = list(map(replica_of, await pair(nodes))), vectors()
            first, second = await both(replicas, own, 0)
            assert not (first.report.in_doubt)
            assert not (second.report.in_doubt)
            return first.counts, second.counts

    for side in range(2):
        found = [run(main(cut, side)) for cut in range(ROUND_BYTES)]
        assert set(found) == {(False, False), (True, True)}


class Drawn:
    """A run of some rounds where anything may be lost at any time, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.draws, self.seed = random.Random(seed), seed
        self.is_cut_off = self.draws.random() < 0.5
        self.until = self.draws.uniform(0, 60)
        self.streams = 0
        self.nodes = Nodes(lambda number: self._limits())
        self.own = vectors(seed)
        self.incarnations = [1, 1]
        self.rounds = list[tuple[Outcome, Outcome]]()

    def _limits(self) -> tuple[int | None, int | None]:
        """Cut anywhere; or lose the link about when the first round ends, and allow no other for a while."""
        draw, self.streams = self.draws.randrange, self.streams + 1
        if not self.is_cut_off:
            return self._anywhere(), self._anywhere()
        if self.streams == 1:
            return draw(400, 700), draw(400, 700)
        if self.streams == 2:
            return draw(270, 300), draw(200, 220)  # near the last byte of a round
        return (0, 0) if asyncio.get_running_loop().time() < self.until else (None, None)

    def _anywhere(self) -> int | None:
        kind = self.draws.random()
        if kind < 0.5:
            return None
        return self.draws.randrange(ROUND_BYTES if kind < 0.75 else 5000)

    async def run(self) -> None:
        async with self.nodes:
            made = [await self.nodes.add(0), await self.nodes.add(1, address_of(0))]
            for number in range(3):
                self.is_at_once = self.is_cut_off and number == 0
                if self.is_at_once:
                    await until(lambda: all(node.present() for node in made))
                else:
                    await asyncio.sleep(self.draws.uniform(0, 10))
                replicas = [replica_of(node) for node in made]
                tasks = [asyncio.create_task(self._side(replica, number)) for replica in replicas]
                if not self.is_at_once and self.draws.random() < 0.3:
                    await asyncio.sleep(self.draws.uniform(0, 20))
                    slot = self.draws.randrange(2)
                    made[slot] = await self._restarted(made[slot], tasks[slot])
                first, second = await asyncio.gather(*tasks, return_exceptions=True)
                for one in (first, second):
                    assert isinstance(one, Outcome | asyncio.CancelledError), one
                if isinstance(first, Outcome) and isinstance(second, Outcome):
                    self.rounds.append((first, second))

    async def _side(self, replica: Replica, number: int) -> Outcome:
        if not self.is_at_once:
            await asyncio.sleep(self.draws.choice((0.0, self.draws.uniform(0, 20))))
        phase = self.draws.choice((0.0, self.draws.uniform(0, 10)))
        return await take_part(replica, self.own[replica.place.replica], number, phase)

    async def _restarted(self, node: Node, round_of: "asyncio.Task[Outcome]") -> Node:
        """Kill a process, which says nothing, and start a later one."""
        round_of.cancel()
        self.nodes.nodes.remove(node)
        for task in list(node._tasks):
            task.cancel()
        await node._carriers.network.close()
        known = {slot: address for slot, address in node.directory.addresses.items() if slot != node.slot}
        self.incarnations[node.slot] += 1
        return await self.nodes.add(node.slot, known, self.incarnations[node.slot])


def test_no_fault_splits_a_verdict_unreported() -> None:
    counted = in_doubt = skipped = 0
    for seed in range(400):
        drawn = Drawn(seed)
        run(drawn.run())
        for sides in drawn.rounds:
            for own, found in zip(drawn.own, sides, strict=True):
                mean = (drawn.own[0] + drawn.own[1]) / 2
                assert torch.equal(found.used, mean if found.counts else own), seed
                assert found.counts or found.report.missed or not found.report.in_doubt, seed
            if sides[0].counts != sides[1].counts:
                assert any(one.report.in_doubt for one in sides if not one.counts), f"split, seed {seed}"
            counted += all(one.counts for one in sides)
            in_doubt += any(one.report.in_doubt for one in sides)
            skipped += not any(one.counts for one in sides)
    assert counted > 50
    assert skipped > 50
    assert 0 < in_doubt < 50, in_doubt


async def test_who_is_asked_about_a_round_that_it_has_skipped_says_so() -> None:
    async with Nodes() as nodes:
        made = await pair(nodes)
        mine, theirs = made[0].links[1], made[1].links[0]
        for link in (mine, theirs):
            link.ledger.begin(5)
        mine.ledger.prepare(5)
        theirs.ledger.close(5, False)
        await mine.settle(5, mine.ledger, 20.0)
        assert mine.ledger.verdict(5) is False
        await theirs.say(Prepared(5))  # too late
        await asyncio.sleep(1.0)
        assert mine.ledger.verdict(5) is False


async def test_a_partner_whose_process_has_died_is_not_asked_for_long() -> None:
    async with Nodes() as nodes:
        made = await pair(nodes)
        link, at = made[0].links[1], asyncio.get_running_loop().time
        link.ledger.begin(5)
        link.ledger.prepare(5)
        nodes.nodes.remove(made[1])
        for task in list(made[1]._tasks):
            task.cancel()
        await made[1]._carriers.network.close()
        began = at()
        await link.settle(5, link.ledger, 20.0)
        assert at() - began < 5.0
        assert link.ledger.verdict(5) is None


@pytest.mark.parametrize(
    ("ends", "counts", "recorded"), [(5.0, True, [5.0]), (5.0, False, []), (-3.0, True, [0.0])]
)
def test_settling_lengthens_no_deadline(
    ends: float, counts: bool, recorded: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange ends 5 s after the leader has begun to wait, or 3 s before. The verdict comes 25 s after."""
    clock, found = iter([100.0, 125.0]), list[float]()
    monkeypatch.setattr(
        rounds, "time", SimpleNamespace(monotonic=lambda: next(clock), perf_counter=lambda: 0.0)
    )
    partners = SimpleNamespace(deadline_seconds=DEADLINE, record=found.append)
    thread = SimpleNamespace(do=lambda *_: None, node=SimpleNamespace(seconds_to_leave=0.0))
    exchange = PairExchange(SimpleNamespace(leading=Leading(thread, partners)))  # type: ignore[arg-type]
    exchange._outcome = Future()
    exchange._outcome.set_result(rounds._Outcome(counts, ended=100.0 + ends))
    exchange._wait()
    assert found == recorded
    assert exchange.report.wait_seconds == 25.0


@pytest.mark.parametrize(
    ("norm", "deviation", "poisoned", "why"),
    [
        (1.0, 0.0, 0, ""),
        (1.0, 49.9, 0, ""),  # just below ten norms
        (0.0, 1e9, 0, ""),  # zeros are compared with nothing
        (1.0, 50.5, 0, "absurd"),
        (1.0, 0.0, 1, "sent numbers that are not finite"),
        (math.inf, 0.0, 1, "was sent numbers that are not finite"),
        (math.nan, 0.0, 0, "was sent numbers that are not finite"),
    ],
)
def test_a_mean_is_plausible_near_the_own_vector(
    norm: float, deviation: float, poisoned: int, why: str
) -> None:
    report = ExchangeReport((0, 1), squared_deviation=deviation, poisoned_elements=poisoned)
    check = partial(check_plausible, norm, report)
    if not why:
        check()
        return
    with pytest.raises(ImplausibleError, match=why) as refused:
        check()
    assert refused.value.is_ours == why.startswith("was sent")
