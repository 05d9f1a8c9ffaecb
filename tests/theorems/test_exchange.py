"""The exchange of one vector: pairs and groups, with and without waiting, what is poisoned, late or lost."""

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.job import activity
from megatron_noloco.outer import (
    Exchange,
    OuterOptimizer,
    PartnerLostError,
    PartnerTimeoutError,
    TorchWeights,
    group_mean,
)
from megatron_noloco.outer.channels import CHANNELS, WINDOW, Contacts
from megatron_noloco.outer.payload import BLOCK
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.payloads import BITS
from megatron_noloco.plans.topology import Place, Topology
from megatron_noloco.settings import NolocoSettings
from megatron_noloco.transport.interface import Flight
from tests.kit.fleet import (
    SECONDS,
    Fleet,
    K,
    Listening,
    assert_close,
    assert_equal,
    average,
    finish,
    fleet_of,
    made,
    noise,
)
from tests.kit.loopback import loopback_world

SHORT_SECONDS = 0.05  # only where no answer comes

in_any_payload = pytest.mark.parametrize("bits", [None, *BITS])


# The mean


@pytest.mark.parametrize("group", [(0, 1), (1, 4), (0, 2, 4), (0, 1, 2, 3), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("elements", [3, 101])
def test_members_use_bitwise_the_same_mean(group: Group, elements: int) -> None:
    vectors = noise(5, elements, seed=13) * 10 ** noise(5, elements, seed=14)
    means, _ = average(vectors, group)
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert_close(means[0], vectors[list(group)].double().mean(dim=0))


APART = [3, 2000, 4999]


def some_apart(members: int) -> Tensor:
    """Return vectors that are close to each other but for three elements, which codes do not hold."""
    vectors = noise(5000, seed=0) + 0.01 * noise(members, 5000, seed=1)
    vectors[0, APART] += 50.0
    return vectors


@in_any_payload
@pytest.mark.parametrize("group", [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("bucket", [BLOCK, 10 * BLOCK])
def test_each_element_arrives_once(bits: int | None, group: Group, bucket: int) -> None:
    """First in threads that wait; then by progress alone, in one thread, which could wait for no other."""
    vectors = some_apart(len(group))
    exchanges = [made(t, len(group), bits, bucket=bucket) for t in loopback_world(len(group))]
    times, means = torch.zeros(2, len(group), 5000)

    def use(member: int, pieces: Any) -> None:
        for start, stop, mean in pieces:
            times[member, start:stop] += 1
            means[member, start:stop] = mean

    def begin(number: int) -> None:
        for exchange, vector in zip(exchanges, vectors, strict=True):
            exchange.begin(vector.clone(), group, number, "a test", rounding=torch.empty(5000))

    def check() -> None:
        assert torch.equal(times, torch.ones_like(times))
        error = (means - vectors.mean(0)).abs()
        if bits is not None:  # in their blocks steps are as much larger
            blocks = {at // BLOCK for at in APART}
            error[:, [at for at in range(5000) if at // BLOCK in blocks]] /= 50.0
        assert float(error.max()) < (1e-5 if bits is None else 0.05)

    begin(0)
    with ThreadPoolExecutor(len(group)) as threads:
        list(threads.map(lambda member: use(member, exchanges[member].finish()), group))
    check()
    waited = means.clone()
    times.zero_()
    begin(1)
    for _ in range(1000):
        for member in group:
            use(member, exchanges[member].progress())
    check()
    for exchange in exchanges:
        assert list(exchange.finish()) == []
        assert exchange.report.wait_seconds == 0
    assert bits is not None or torch.equal(means, waited)


@pytest.mark.parametrize(("members", "sent_vectors"), [(1, 0), (2, 1), (3, 4 / 3), (4, 6 / 4), (6, 10 / 6)])
def test_pair_sends_one_vector_group_less_than_two(members: int, sent_vectors: float) -> None:
    _, exchanges = average(noise(members, 120, seed=16), tuple(range(members)))  # divides by every group
    for exchange in exchanges:
        on_the_wire = sum(buffer.nbytes for _, buffer in exchange.transport.sent)
        assert exchange.report.bytes_sent == on_the_wire == round(sent_vectors * 120 * 4)


# Poison


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(("members", "spoiled"), [(2, slice(16, 32)), (3, slice(0, 13))])
def test_a_poisoned_replica_does_not_poison_its_group(members: int, spoiled: slice, poison: float) -> None:
    """Its piece of a pair, or its part of a group's first bucket, is averaged over the others."""
    clean = noise(members, 40, seed=18)
    vectors, others = clean.clone(), torch.ones(40, dtype=torch.bool)
    vectors[-1, spoiled.start + 4] = poison
    others[spoiled] = False
    means, exchanges = average(vectors, tuple(range(members)), bucket=16 if members == 2 else 40)
    expected = clean.mean(0)
    expected[spoiled] = clean[:-1, spoiled].mean(0)
    assert_close(means, expected.expand(members, -1))
    reports = [exchange.report for exchange in exchanges]
    seen = 2 if members == 2 else 1  # a pair sees all, at both ends
    assert sum(report.poisoned_elements for report in reports) == seen * (spoiled.stop - spoiled.start)
    assert sum(report.compared_elements for report in reports) == seen * int(others.sum())
    deviation = sum(report.squared_deviation for report in reports)
    assert deviation == pytest.approx(seen * float(clean[:, others].var(0).sum()), rel=1e-5)


# Deadlines


@pytest.mark.parametrize("overlap_steps", [0, 1])
@pytest.mark.parametrize("group_size", [2, 3])
def test_a_missing_partner_is_named_when_a_rank_waits_for_it(group_size: int, overlap_steps: int) -> None:
    topology = Topology(replicas=group_size, pp=2)
    transport = loopback_world(topology.world_size)[1]  # replica 0, stage 1
    settings = NolocoSettings(
        local_steps=2, group_size=group_size, deadline_seconds=SHORT_SECONDS, overlap_steps=overlap_steps
    )
    outer = OuterOptimizer(TorchWeights([torch.ones(4)]), transport, topology.place(1), settings)
    for done in range(1, 2 + overlap_steps):
        assert outer.after_local_step(done) == []
        outer.progress()
    with pytest.raises(PartnerTimeoutError) as caught:
        outer.after_local_step(2 + overlap_steps)
    message = (
        r"replica 0: no answer from partner 1 \(rank 3\) in round 0 after [0-9.]+ s \(deadline_seconds\)"
    )
    assert re.fullmatch(message, str(caught.value))
    others = ["rank 3 (replica 1)", "rank 5 (replica 2)"][: group_size - 1]
    assert activity.now.state.part == f"waiting for {' and '.join(others)} in round 0"


@pytest.mark.parametrize("bits", [None, 8])
def test_late_arrival_changes_no_later_exchange(bits: int | None) -> None:
    here, there = loopback_world(2)
    exchange, late = made(here, 2, bits, SHORT_SECONDS), made(there, 2, bits)
    exchange.begin(torch.zeros(3), (0, 1), 0, "round 0")
    with pytest.raises(PartnerTimeoutError, match=r"no answer from partner 1 \(rank 1\) in round 0"):
        list(exchange.finish())
    exchange.begin(torch.zeros(3), (0,), 1, "round 1")
    late.begin(torch.ones(3), (0, 1), 0, "round 0")
    list(late.progress())
    assert finish(exchange, 3).tolist() == [0.0, 0.0, 0.0]


def test_the_deadline_counts_from_the_wait() -> None:
    """Flights are waited for since their posting: 100 s of local steps between must not use the deadline up."""
    waits: list[float] = []
    posted = time.monotonic() - 100
    flight = SimpleNamespace(posted=posted, done=lambda: len(waits) > 0, wait=waits.append)
    exchange = made(SimpleNamespace(rank=0, post=lambda *_: flight), 2, seconds=10.0)
    exchange.begin(torch.zeros(3), (0, 1), 0, "round 0")
    assert list(exchange.progress()) == []
    assert len(list(exchange.finish())) == 1
    assert waits[0] >= 110.0


# Several exchanges


@pytest.mark.parametrize("group", [(0, 1), (0, 1, 2)])
def test_two_exchanges_under_way_do_not_mix(group: Group) -> None:
    """Same ranks, same number, different channels; the one begun first is finished last."""
    vectors = [noise(3, 101, seed=20), noise(3, 60, seed=21)]
    transports = loopback_world(3)

    def both(replica: int) -> list[Tensor]:
        place = Place(replica, 3)
        exchanges = [Exchange(transports[replica], place, channel, SECONDS) for channel in (5, 6)]
        for exchange, of_all in zip(exchanges, vectors, strict=True):
            exchange.begin(of_all[replica].clone(), group, 3, "a test")
        second = finish(exchanges[1], 60)
        return [finish(exchanges[0], 101), second]

    with ThreadPoolExecutor(3) as threads:
        for found in threads.map(both, group):
            for mean, of_all in zip(found, vectors, strict=True):
                assert torch.equal(mean, average(of_all, group)[0][0])


class Held:
    """A flight that has arrived is seen only now and then."""

    def __init__(self, inner: Flight, draw: random.Random) -> None:
        self.inner, self.draw, self.posted = inner, draw, inner.posted

    def done(self) -> bool:
        return self.draw.random() < 0.2 and self.inner.done()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from((None, *BITS)), st.integers(2, 3), st.integers(1, 5000), st.integers(0, 10**6))
def test_buckets_never_take_each_others_messages(
    bits: int | None, members: int, elements: int, seed: int
) -> None:
    """Each rank sees messages of its buckets in an order of its own, and goes on with them in that order."""
    vectors, group, draw = some_apart(members)[:, :elements], tuple(range(members)), random.Random(seed)
    expected, _ = average(vectors, group, bits, bucket=BLOCK)
    exchanges = [made(transport, members, bits, bucket=BLOCK) for transport in loopback_world(members)]
    means = torch.full((members, elements), torch.nan)
    for exchange, vector in zip(exchanges, vectors, strict=True):
        post = exchange.transport.post
        exchange.transport.post = lambda *posted, post=post: Held(post(*posted), draw)
        exchange.begin(vector.clone(), group, 3, "a test", rounding=torch.empty(elements))
    while not all(exchange.done for exchange in exchanges):
        for start, stop, mean in exchanges[member := draw.randrange(members)].progress():
            means[member, start:stop] = mean
    assert torch.equal(means, expected)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("lengths", [(300, 200), (200, 300), (1301, 1300), (5000, 5000, 4900)])
def test_vectors_of_other_lengths_are_refused(lengths: tuple[int, ...], bits: int) -> None:
    """Also where they take as many blocks, so that all messages are as long."""
    vector, group = noise(5000, seed=1), tuple(range(len(lengths)))
    world = loopback_world(len(group))

    def end(rank: int) -> str:
        mine = vector[: lengths[rank]] + 0.01 * noise(lengths[rank], seed=rank)
        exchange = Exchange(world[rank], Place(rank, len(group)), 0, 2.0, bits)
        try:
            group_mean(exchange, mine, group, 0, "a test", out=torch.empty_like(mine))
        except PartnerLostError as error:
            return str(error)
        return "averaged"

    with ThreadPoolExecutor(len(group)) as threads:
        found = list(threads.map(end, group))
    line = "lost a partner in a test: the replicas' vectors differ in length; all must have as many weights"
    assert "averaged" not in found
    assert found[-1] == f"replica {group[-1]} {line}"


def test_every_exchange_has_tags_of_its_own() -> None:
    here = Listening(loopback_world(2)[0])
    for channel in range(CHANNELS):
        for number in range(3):
            Exchange(here, Place(0, 2), channel).begin(torch.ones(2), (0, 1), number, "a test")
    assert len({tag + at for tag in here.tags for at in range(WINDOW)}) == WINDOW * 3 * CHANNELS
    fleet = fleet_of(2, fragments=K, overlap_steps=K)
    fleet.run(3 * K)
    assert all(len(set(transport.tags)) == 3 * K for transport in fleet.transports), "also of fragments"


@pytest.mark.parametrize("bits", [None, 8])
def test_an_exchange_is_begun_and_finished_in_turn(bits: int | None) -> None:
    exchange = made(loopback_world(2)[0], 2, bits)
    assert list(exchange.progress()) == []
    with pytest.raises(RuntimeError, match="begin comes before finish"):
        next(exchange.finish())
    exchange.begin(torch.ones(3), (0,), 0, "round 0")
    with pytest.raises(RuntimeError, match="round 0 is still under way: finish it before round 1 begins"):
        exchange.begin(torch.ones(3), (0,), 1, "round 1")
    assert finish(exchange, 3).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"replica 0 is not in group \[1\]"):
        exchange.begin(torch.ones(3), (1,), 1, "round 1")


# Connections to the next group


def connecting_lazily(replicas: int, group_size: int, lazily: bool, **method: Any) -> Fleet:
    fleet = fleet_of(replicas, group_size, **method)
    for transport in fleet.transports:
        transport.connects_lazily = lazily
    return fleet


def greeted(fleet: Fleet) -> set[tuple[int, int]]:
    """Return each (sender, receiver) of an empty message since the last call; fails for one greeted twice."""
    found = [(t.rank, rank) for t in fleet.transports for rank, buffer in t.sent if not len(buffer)]
    assert len(set(found)) == len(found)
    for transport in fleet.transports:
        transport.sent.clear()
    return set(found)


@pytest.mark.parametrize(("replicas", "group_size"), [(6, 2), (7, 2), (6, 3), (5, 4)])
@pytest.mark.parametrize("overlap_steps", [0, 2, K])
def test_next_connections_open_once_in_local_phase(
    replicas: int, group_size: int, overlap_steps: int
) -> None:
    """The lower of two ranks sends; a replica that skips the round opens none, nor does the round itself."""
    fleet = connecting_lazily(replicas, group_size, lazily=True, overlap_steps=overlap_steps)
    known: set[tuple[int, int]] = set()
    for round_index in range(8):
        fleet.run(K - 1)
        groups = fleet.grouping.groups(round_index)
        pairs = {(low, high) for group in groups for low in group for high in group if low < high}
        assert greeted(fleet) == pairs - known
        known |= pairs
        fleet.run(1)
        assert greeted(fleet) == set()


@pytest.mark.parametrize(
    "method", [{}, {"payload": "int8"}, {"overlap_steps": 2}, {"consensus_weight": 0.3}, {"fragments": 2}]
)
def test_opening_connections_changes_no_bit(method: dict[str, Any]) -> None:
    fleets = [connecting_lazily(5, 2, lazily, **method) for lazily in (False, True)]
    steps = [fleet.run(3 * K + 2) for fleet in fleets]
    assert_equal(*fleets)
    there, lazily = (
        [(one.exchange.group, one.exchange.bytes_sent) for step in of_fleet for own in step for one in own]
        for of_fleet in steps
    )
    assert there == lazily
    assert greeted(fleets[0]) == set()
    assert greeted(fleets[1]) != set()


def test_opening_a_connection_waits_for_no_answer() -> None:
    transport = Listening(loopback_world(2)[1])
    transport.connects_lazily = True
    contacts = Contacts(transport, Place(1, 2))
    contacts.open((0, 1), 0)
    for _ in range(3):
        contacts.progress()
    assert transport.sent == []
