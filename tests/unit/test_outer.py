"""The round as theorems: what method.md proves about it, checked on threads that talk through a loopback."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.job import activity
from megatron_noloco.outer import (
    Channel,
    Exchange,
    ExchangeReport,
    NoRounds,
    OuterOptimizer,
    PartnerTimeoutError,
    RoundReport,
    TorchWeights,
)
from megatron_noloco.outer.mean import MeanPiece, gathered
from megatron_noloco.outer.messages import CHANNELS
from megatron_noloco.plans.draws import Stream, draw_words
from megatron_noloco.plans.grouping import Group, Grouping, averaging_cycle, prime_factors
from megatron_noloco.plans.topology import Place, Topology
from megatron_noloco.settings import NolocoSettings, OverlapSettings
from megatron_noloco.transport.loopback import LoopbackTransport, loopback_world
from megatron_noloco.transport.protocol import Flight, Message

GOLDEN_HISTORY = Path(__file__).parents[1] / "golden" / "outer_history.json"
UPDATE_GOLDEN = "NOLOCO_UPDATE_GOLDEN"
CHUNK_BYTES = 64  # 16 elements: every vector below travels in several pieces


class Listening:
    """A loopback transport that remembers what was sent, and to whom."""

    connects_lazily = False
    device_buffers = False
    name = "listening"
    progress = "the thread that sends"

    def __init__(self, inner: LoopbackTransport) -> None:
        self.rank, self.world_size, self.inner = inner.rank, inner.world_size, inner
        self.sent: list[tuple[int, Tensor]] = []

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        self.sent += [(message.rank, message.buffer.clone()) for message in sends]
        return self.inner.post(sends, receives, tag)


class Fleet:
    """R replicas that hold nothing but weights, each in two pieces, and meet in rounds."""

    def __init__(self, start: Tensor, group_size: int, *, seed: int = 0, **method: Any) -> None:
        """`start` are the weights of each replica, shape [replicas, elements]."""
        self.replicas = len(start)
        delay_steps = method.pop("delay_steps", 0)
        self.settings = NolocoSettings(
            **{"deadline_seconds": 20.0, "group_size": max(2, group_size), **method},
            overlap=OverlapSettings("delayed" if delay_steps else "none", delay_steps),
        )
        self.grouping = Grouping(self.replicas, group_size, seed)
        self.transports = [Listening(inner) for inner in loopback_world(self.replicas, CHUNK_BYTES)]
        self.masters = [[part.clone() for part in row.tensor_split([5])] for row in start]
        self.outer = [
            OuterOptimizer(
                TorchWeights(master),
                transport,
                Place(transport.rank, self.replicas),
                self.settings,
                seed,
            )
            for transport, master in zip(self.transports, self.masters, strict=True)
        ]
        for outer in self.outer:
            outer.grouping = self.grouping  # also groups of 1, which no setting asks for

    def train(self, theta: Tensor) -> None:
        """A local phase that ends at `theta`, shape [replicas, elements]."""
        for master, row in zip(self.masters, theta, strict=True):
            for part, value in zip(master, row.tensor_split([5]), strict=True):
                part.copy_(value)

    @property
    def memory(self) -> list[dict[str, Tensor]]:
        """What each replica holds between rounds for each of those that are under way at a time, by name."""
        rounds = [held for outer in self.outer for held in (*outer._idle, *outer._under_way)]
        return [held._buffers._held | held._exchange._buffers._held for held in rounds]

    def meet(self, round_index: int) -> list[RoundReport]:
        with ThreadPoolExecutor(self.replicas) as threads:
            return list(threads.map(lambda outer: outer.run_round(round_index), self.outer))

    @property
    def theta(self) -> Tensor:
        return torch.stack([torch.cat(master) for master in self.masters])

    @property
    def phi(self) -> Tensor:
        return torch.stack([outer.slow_weights for outer in self.outer])

    @property
    def delta(self) -> Tensor:
        return torch.stack([outer.momentum for outer in self.outer])


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


class Diloco:
    """The reference: Nesterov-free outer momentum on the mean outer gradient, in double precision."""

    def __init__(self, phi: Tensor, alpha: float, beta: float) -> None:
        self.phi, self.delta, self.alpha, self.beta = (
            phi.double(),
            torch.zeros_like(phi).double(),
            alpha,
            beta,
        )

    def step(self, mean_outer_gradient: Tensor) -> None:
        self.delta = self.alpha * self.delta + self.beta * mean_outer_gradient
        self.phi = self.phi + self.delta


# Fact 1


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("consensus_weight", [None, 0.2])
def test_everyone_in_one_group_is_diloco(replicas: int, consensus_weight: float | None) -> None:
    start = noise(37, seed=1)
    fleet = Fleet(start.expand(replicas, -1), replicas, consensus_weight=consensus_weight)
    reference = Diloco(start, 0.5, 0.7)
    for round_index in range(4):
        theta = fleet.phi + 0.1 * noise(replicas, 37, seed=10 + round_index)
        reference.step((theta.double() - fleet.phi.double()).mean(dim=0))
        fleet.train(theta)
        fleet.meet(round_index)
        assert_close(fleet.phi, reference.phi.expand(replicas, -1))
        assert_close(fleet.delta, reference.delta.expand(replicas, -1))
        assert torch.equal(fleet.theta, fleet.phi), "a round ends with the fast weights at the slow ones"


# Fact 2


def test_a_bye_is_momentum_on_ones_own_outer_gradient() -> None:
    start = noise(1, 37, seed=2)
    alone = Fleet(start, 1, consensus_weight=0.3)
    reference = Diloco(start, 0.5, 0.7)
    for round_index in range(3):
        theta = alone.phi + 0.1 * noise(1, 37, seed=round_index)
        reference.step(theta.double() - alone.phi.double())
        alone.train(theta)
        (report,) = alone.meet(round_index)
        assert_close(alone.phi, reference.phi)
        assert_close(alone.delta, reference.delta)
        assert report.exchange.bytes_sent == 0
        assert report.spread != report.spread, "a bye compares with nobody: nan"
    assert alone.transports[0].sent == []


def test_the_third_of_three_has_a_bye() -> None:
    fleet = Fleet(noise(3, 20, seed=3), 2)
    before = fleet.phi.clone()
    theta = before + noise(3, 20, seed=4)
    fleet.train(theta)
    reports = fleet.meet(0)
    (bye,) = [replica for replica, report in enumerate(reports) if report.exchange.group == (replica,)]
    assert_close(fleet.delta[bye], 0.7 * (theta[bye] - before[bye]))
    assert all(report.exchange.bytes_sent for replica, report in enumerate(reports) if replica != bye)


# Fact 3


def assert_mean_follows_diloco(fleet: Fleet, seed: int, outer_gradient: float) -> None:
    """Over three rounds with alpha 0.5 and beta 0.7; the outer gradients are of the size given."""
    reference = Diloco(fleet.phi.double().mean(dim=0), 0.5, 0.7)
    for round_index in range(3):
        theta = fleet.phi + outer_gradient * noise(*fleet.phi.shape, seed=seed + round_index + 1)
        reference.step((theta.double() - fleet.phi.double()).mean(dim=0))
        fleet.train(theta)
        fleet.meet(round_index)
    assert_close(fleet.phi.double().mean(dim=0), reference.phi)
    assert_close(fleet.delta.double().mean(dim=0), reference.delta)


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 0.7, 1.1]))
def test_the_mean_follows_diloco_for_any_grouping(
    replicas: int, group_size: int, seed: int, consensus_weight: float
) -> None:
    fleet = Fleet(
        noise(replicas, 24, seed=seed),
        min(group_size, replicas),
        seed=seed,
        consensus_weight=consensus_weight,
    )
    assert_mean_follows_diloco(fleet, seed, outer_gradient=0.1)


# The last consensus sweep


@pytest.mark.parametrize(
    ("replicas", "fragments"), [(1, 1), (2, 1), (3, 1), (4, 3), (6, 1), (7, 1), (8, 2), (9, 1), (12, 1)]
)
def test_plain_averages_along_a_cycle_give_every_replica_the_mean(replicas: int, fragments: int) -> None:
    fleet = Fleet(noise(replicas, 37, seed=1), min(2, replicas), fragments=fragments)
    fleet.train(noise(replicas, 37, seed=2))
    fleet.meet(0)
    theta, delta = fleet.phi + 0.1 * noise(replicas, 37, seed=3), fleet.delta.clone()
    fleet.train(theta)  # local steps after the last round are in the mean, too

    def settle(replica: int) -> list[ExchangeReport]:
        exchange = Exchange(fleet.transports[replica], Place(replica, replicas), Channel.FINAL, 20.0)
        return fleet.outer[replica].settle(exchange, averaging_cycle(replica, replicas, seed=5), number=40)

    with ThreadPoolExecutor(replicas) as threads:
        reports = list(threads.map(settle, range(replicas)))
    if replicas != 9:  # the only one with two odd factors
        assert all(torch.equal(row, fleet.theta[0]) for row in fleet.theta), "equal bit for bit"
    assert_close(fleet.theta, theta.double().mean(dim=0).expand(replicas, -1))
    assert torch.equal(fleet.phi, fleet.theta)
    assert torch.equal(fleet.delta, delta)
    for own in reports:
        sizes = [len(report.group) for report in own]
        assert sizes == sorted(prime_factors(replicas), reverse=True)
        if set(sizes) <= {2}:
            assert sum(report.bytes_sent for report in own) == len(sizes) * 37 * 4


# Fact 4


@pytest.mark.parametrize("consensus_weight", [None, 0.25])
@pytest.mark.parametrize("slow_weights", ["host", "device"])
def test_two_replicas_are_bitwise_the_same_from_round_one(
    consensus_weight: float | None, slow_weights: str
) -> None:
    fleet = Fleet(
        noise(53, seed=5).expand(2, -1), 2, consensus_weight=consensus_weight, slow_weights=slow_weights
    )
    for round_index in range(5):
        theta = fleet.phi + noise(2, 53, seed=round_index)
        assert not torch.equal(theta[0], theta[1])
        fleet.train(theta)
        fleet.meet(round_index)
        assert torch.equal(fleet.phi[0], fleet.phi[1])
        assert torch.equal(fleet.delta[0], fleet.delta[1])
        assert torch.equal(fleet.theta[0], fleet.theta[1])


# Facts 5 and 6: what travels


@pytest.mark.parametrize("slow_weights", ["host", "device"])
def test_with_gamma_equal_beta_only_the_fast_weights_travel(slow_weights: str) -> None:
    fleet = Fleet(noise(2, 40, seed=6), 2, slow_weights=slow_weights)
    theta = noise(2, 40, seed=7)
    fleet.train(theta)
    fleet.meet(0)
    for replica, transport in enumerate(fleet.transports):
        ((partner, combined),) = transport.sent
        assert partner == 1 - replica
        assert torch.equal(combined, theta[replica] * 0.7)


@pytest.mark.parametrize("slow_weights", ["host", "device"])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_what_travels_is_a_fast_part_and_a_slow_part_known_before_the_phase(
    gamma: float, slow_weights: str
) -> None:
    fleet = Fleet(noise(2, 40, seed=8), 2, consensus_weight=gamma, slow_weights=slow_weights)
    known_early = (gamma - 0.7) * fleet.phi.double()
    theta = noise(2, 40, seed=9)
    fleet.train(theta)
    fleet.meet(0)
    for replica, transport in enumerate(fleet.transports):
        ((_, combined),) = transport.sent
        assert_close(combined, known_early[replica] + 0.7 * theta[replica].double(), 3e-7)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("group_size", [2, 3])
def test_one_vector_does_what_two_vectors_do(gamma: float, group_size: int) -> None:
    fleet = Fleet(noise(6, 40, seed=11), group_size, consensus_weight=gamma)
    alpha, beta = 0.5, 0.7
    phi, delta = fleet.phi.double(), fleet.delta.double()
    for round_index in range(4):
        theta = fleet.phi + 0.1 * noise(6, 40, seed=round_index)
        outer_gradient = theta.double() - phi
        updated = torch.empty_like(delta)
        for group in fleet.grouping.groups(round_index):
            members = list(group)
            mean_gradient, mean_phi = outer_gradient[members].mean(dim=0), phi[members].mean(dim=0)
            for i in members:
                updated[i] = alpha * delta[i] + beta * mean_gradient - gamma * (phi[i] - mean_phi)
        phi, delta = phi + updated, updated
        fleet.train(theta)
        fleet.meet(round_index)
        assert_close(fleet.delta, delta)
        assert_close(fleet.phi, phi)


@pytest.mark.parametrize("delay_steps", [0, 1])
def test_without_outer_momentum_nothing_of_it_is_kept(delay_steps: int) -> None:
    """Two plain averages, in which Delta stays with its replica; what momentum a checkpoint holds is left."""
    method = {"outer_momentum": 0.0, "outer_lr": 1.0, "delay_steps": delay_steps}
    fleet = Fleet(noise(4, 40, seed=20), 2, **method)
    for round_index in range(2):
        theta = fleet.phi + 0.1 * noise(4, 40, seed=round_index)
        fleet.train(theta)
        fleet.meet(round_index)
        for group in fleet.grouping.groups(round_index):
            for i in group:
                assert_close(fleet.phi[i], theta[list(group)].double().mean(dim=0))
    for outer in fleet.outer:
        assert outer.momentum is None
        assert "outer_momentum" not in outer.state()
        saved = {name: tensor.clone() for name, tensor in outer.state().items()}
        outer.restore(saved | {"outer_momentum": torch.ones(40)})
        assert torch.equal(outer.slow_weights, saved["slow_weights"])


def test_a_momentum_that_was_not_kept_begins_at_zero() -> None:
    without = Fleet(noise(2, 40, seed=21), 2, outer_momentum=0.0)
    with_one = Fleet(noise(2, 40, seed=22), 2, outer_momentum=0.5)
    with_one.train(noise(2, 40, seed=23))
    with_one.meet(0)
    assert with_one.delta.abs().min() > 0
    for outer, other in zip(with_one.outer, without.outer, strict=True):
        outer.restore(other.state())
    assert torch.equal(with_one.phi, without.phi)
    assert not with_one.delta.any()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(0, 3), (3, 5), (5, 9)], [(0, 3), (3, 5), (5, 9)]),
        ([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)], [(0, 4), (4, 6)]),
        ([(0, 2), (4, 6), (6, 7)], [(0, 2), (4, 7)]),
        ([(6, 7), (0, 9)], [(6, 7), (0, 4), (4, 8), (8, 9)]),
        ([], []),
    ],
)
def test_pieces_are_gathered_into_longer_ones(
    pieces: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    vector, scratch = noise(9, seed=30), torch.empty(9)

    def arriving() -> Iterator[MeanPiece]:
        for start, stop in pieces:
            scratch[: stop - start] = vector[start:stop]  # a piece is overwritten by the next
            yield MeanPiece(start, stop, scratch[: stop - start])

    found = []
    for start, stop, mean in gathered(arriving(), torch.empty(4)):
        assert torch.equal(mean, vector[start:stop])
        found.append((start, stop))
    assert found == expected


# Fact 7


@pytest.mark.parametrize(("replicas", "group_size"), [(8, 2), (6, 3)])
def test_the_spread_seen_by_the_groups_is_unbiased(replicas: int, group_size: int) -> None:
    """Some replicas stray eight times as far as others, so only the mean over groups can be right."""
    strays = torch.arange(1, replicas + 1).view(-1, 1)
    theta = 3.0 + 0.01 * strays * noise(replicas, 300, seed=12)
    true_variance = float(theta.double().var(dim=0).mean())
    fleet = Fleet(torch.full_like(theta, 3.0), group_size)
    estimates = []
    for round_index in range(40):
        fleet.train(theta)
        reports = fleet.meet(round_index)
        compared = sum(report.exchange.compared_elements for report in reports)
        estimates.append(
            sum(report.spread**2 * report.exchange.compared_elements for report in reports) / compared
        )
    assert sum(estimates) / len(estimates) == pytest.approx(true_variance, rel=0.02)


# The exchange


def average(
    vectors: Tensor, group: Group, whom: Callable[[Exchange, Tensor], Any] | None = None, **options: Any
) -> tuple[list[Any], list[ExchangeReport]]:
    """What the members of `group` take for the mean of their rows of `vectors`, and their reports."""

    def member(transport: LoopbackTransport) -> tuple[Any, ExchangeReport]:
        exchange = Exchange(transport, Place(transport.rank, len(vectors)), 5, deadline_seconds=20, **options)
        vector = vectors[transport.rank].clone()
        found = whom(exchange, vector) if whom else exchange.whole_mean(vector, group, 3, "a test")
        return found, exchange.report

    transports = loopback_world(len(vectors), CHUNK_BYTES)
    with ThreadPoolExecutor(len(group)) as threads:
        outcomes = list(threads.map(member, [transports[replica] for replica in group]))
    return [mean for mean, _ in outcomes], [report for _, report in outcomes]


@pytest.mark.parametrize("group", [(0, 1), (1, 4), (0, 2, 4), (0, 1, 2, 3), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("elements", [3, 101])
def test_members_use_bitwise_the_same_mean(group: Group, elements: int) -> None:
    vectors = noise(5, elements, seed=13) * 10 ** noise(5, elements, seed=14)
    means, _ = average(vectors, group)
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert_close(means[0], vectors[list(group)].double().mean(dim=0))


@pytest.mark.parametrize("group", [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("stretch", [7, 1000])
def test_pieces_cover_every_element_once(group: Group, stretch: int) -> None:
    vectors = noise(len(group), 101, seed=15)

    def pieces(exchange: Exchange, vector: Tensor) -> tuple[Tensor, Tensor]:
        times, mean = torch.zeros(101), torch.zeros(101)
        exchange.begin(vector, group, 3, "a test")
        for start, stop, piece in exchange.finish():
            times[start:stop] += 1
            mean[start:stop] = piece
        return times, mean

    found, _ = average(vectors, group, pieces, stretch=stretch)
    for times, mean in found:
        assert torch.equal(times, torch.ones(101))
        assert_close(mean, vectors.mean(dim=0))


@pytest.mark.parametrize(("members", "sent_vectors"), [(1, 0), (2, 1), (3, 4 / 3), (4, 6 / 4), (6, 10 / 6)])
def test_traffic_is_one_vector_for_a_pair_and_never_two(members: int, sent_vectors: float) -> None:
    vectors = noise(members, 120, seed=16)  # divides by every group above
    fleet = Fleet(vectors, members)
    for report, transport in zip(fleet.meet(0), fleet.transports, strict=True):
        on_the_wire = sum(buffer.nbytes for _, buffer in transport.sent)
        assert report.exchange.bytes_sent == on_the_wire == round(sent_vectors * 120 * 4)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_replica_does_not_poison_its_partner(poison: float) -> None:
    fleet = Fleet(noise(40, seed=17).expand(2, -1), 2)
    before = fleet.phi.double()
    theta = fleet.phi + 0.1 * noise(2, 40, seed=18)
    theta[0, 20] = poison  # in the second chunk: elements 16..31
    fleet.train(theta)
    reports = fleet.meet(0)
    expected = 0.7 * (theta.double().mean(dim=0) - before[0])
    expected[16:32] = 0.7 * (theta[1].double() - before[1])[16:32]
    assert_close(fleet.delta, expected.expand(2, -1))
    difference = torch.cat([theta[:, :16], theta[:, 32:]], dim=1).diff(dim=0)
    for report in reports:
        assert report.exchange.poisoned_elements == 16
        assert report.exchange.compared_elements == 24
        assert report.spread == pytest.approx(float(difference.square().mean() / 2) ** 0.5, rel=1e-5)


def test_a_poisoned_replica_does_not_poison_a_larger_group() -> None:
    vectors = noise(3, 30, seed=19)
    clean = vectors.clone()
    vectors[2, 4] = float("nan")  # in the slice of the first member: elements 0..9
    means, reports = average(vectors, (0, 1, 2))
    expected = torch.cat([clean[:2, :10].mean(dim=0), clean[:, 10:].mean(dim=0)])
    for mean in means:
        assert_close(mean, expected)
    assert sum(report.poisoned_elements for report in reports) == 10
    assert sum(report.compared_elements for report in reports) == 20


@pytest.mark.parametrize("group_size", [2, 3])
def test_a_missing_partner_is_named(group_size: int) -> None:
    topology = Topology(replicas=group_size, pp=2)
    transport = loopback_world(topology.world_size)[1]  # replica 0, stage 1
    settings = NolocoSettings(group_size=group_size, deadline_seconds=0.05)
    outer = OuterOptimizer(TorchWeights([torch.ones(4)]), transport, topology.place(1), settings)
    with pytest.raises(PartnerTimeoutError) as caught:
        outer.run_round(7)
    message = str(caught.value)
    assert re.fullmatch(
        r"replica 0: no answer from partner 1 \(rank 3\) in round 7 after [0-9.]+ s \(deadline_seconds\)",
        message,
    )
    others = ["rank 3 (replica 1)", "rank 5 (replica 2)"][: group_size - 1]
    assert activity.now.state.part == f"waiting for {' and '.join(others)} in round 7"


@pytest.mark.parametrize("group", [(0, 1), (0, 1, 2)])
def test_two_exchanges_under_way_do_not_mix(group: Group) -> None:
    """Same ranks, same number, different channels; the one begun first is finished last."""
    first, second = noise(3, 101, seed=20), noise(3, 60, seed=21)

    def both(exchange: Exchange, vector: Tensor) -> list[Tensor]:
        other = Exchange(exchange.transport, exchange.place, exchange.channel + 1, deadline_seconds=20)
        exchange.begin(vector, group, 3, "the first")
        other.begin(second[exchange.place.replica].clone(), group, 3, "the second")
        means = [torch.empty(101), torch.empty(60)]
        for which in (1, 0):
            for start, stop, mean in (exchange, other)[which].finish():
                means[which][start:stop] = mean
        assert exchange.report.bytes_sent > other.report.bytes_sent > 0
        return means

    found, _ = average(first, group, both)
    for one, other in found:
        assert torch.equal(one, average(first, group)[0][0])
        assert torch.equal(other, average(second, group)[0][0])


def test_every_exchange_has_tags_of_its_own() -> None:
    tags: list[int] = []
    (here, _) = loopback_world(2)
    here.post = lambda sends, receives, tag: tags.append(tag)  # type: ignore[method-assign, assignment, misc]
    for channel in range(CHANNELS):
        for number in range(3):
            Exchange(here, Place(0, 2), channel).begin(torch.ones(2), (0, 1), number, "a test")
    assert len({tag + phase for tag in tags for phase in range(2)}) == 2 * 3 * CHANNELS


def test_an_exchange_is_begun_and_finished_in_turn() -> None:
    exchange = Exchange(loopback_world(2)[0], Place(0, 2), 0)
    with pytest.raises(RuntimeError, match="begin comes before finish"):
        next(exchange.finish())
    exchange.begin(torch.ones(3), (0,), 0, "round 0")
    with pytest.raises(RuntimeError, match="round 0 is still under way: finish it before round 1 begins"):
        exchange.begin(torch.ones(3), (0,), 1, "round 1")
    assert [mean.tolist() for _, _, mean in exchange.finish()] == [[1.0, 1.0, 1.0]]
    with pytest.raises(ValueError, match=r"replica 0 is not in group \[1\]"):
        exchange.begin(torch.ones(3), (1,), 1, "round 1")


def test_what_arrives_after_the_deadline_changes_no_later_exchange() -> None:
    here, there = loopback_world(2)
    exchange = Exchange(here, Place(0, 2), 0, deadline_seconds=0.05)
    exchange.begin(torch.zeros(3), (0, 1), 0, "round 0")
    with pytest.raises(PartnerTimeoutError):
        list(exchange.finish())
    exchange.begin(torch.zeros(3), (0,), 1, "round 1")
    late = Exchange(there, Place(1, 2), 0, deadline_seconds=20)
    late.whole_mean(torch.ones(3), (0, 1), 0, "round 0")
    assert [mean.tolist() for _, _, mean in exchange.finish()] == [[0.0, 0.0, 0.0]]


# The weights


def test_torch_weights_are_one_vector_in_the_order_of_the_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).to(torch.bfloat16))
    weights = TorchWeights(model.parameters())
    flat = torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])
    assert weights.length == len(flat) == 11
    assert torch.equal(weights.read(), flat)
    middle = torch.empty(5)
    weights.read_into(middle, 4)
    assert torch.equal(middle, flat[4:9])
    with weights.writing() as write:
        write(5, torch.arange(5.0))
    flat[5:10] = torch.arange(5.0)
    assert torch.equal(weights.read(), flat)
    assert model[1].weight.dtype == torch.bfloat16
    with (
        pytest.raises(ValueError, match="elements 9 to 12 lie outside a vector of 11"),
        weights.writing() as w,
    ):
        w(9, torch.ones(3))


@pytest.mark.parametrize("wrong", [[], [torch.ones(2, dtype=torch.int64)], [torch.ones(2, 3).t()]])
def test_torch_weights_refuse_what_they_cannot_hold(wrong: list[Tensor]) -> None:
    with pytest.raises(ValueError):
        TorchWeights(wrong)


class Refreshed(TorchWeights):
    times = 0

    def refresh(self) -> None:
        self.times += 1


def test_leaving_refreshes_what_depends_on_the_weights_but_not_after_an_exception() -> None:
    weights, kept = Refreshed([torch.ones(3)]), torch.empty(3)
    with weights.kept_in(kept):
        with weights.writing() as write:
            write(0, torch.zeros(3))
        assert (weights.times, weights.read().tolist()) == (1, [0.0] * 3)
    assert (weights.times, weights.read().tolist()) == (2, [1.0] * 3)
    with pytest.raises(ValueError, match="outside"), weights.kept_in(kept), weights.writing() as write:
        write(0, torch.zeros(4))
    assert (weights.times, weights.read().tolist()) == (2, [1.0] * 3)


# In a loop


def test_rounds_come_every_k_local_steps_and_are_counted_from_zero() -> None:
    fleet = Fleet(noise(1, 4, seed=22), 1, local_steps=3)
    reports = [fleet.outer[0].after_local_step(done) for done in range(1, 8)]
    assert [[report.round_index for report in step] for step in reports] == [[], [], [0], [], [], [1], []]


def test_state_continues_a_run() -> None:
    one, other = (Fleet(noise(1, 6, seed=seed), 1) for seed in (23, 24))
    one.train(noise(1, 6, seed=25))
    one.meet(0)
    other.outer[0].restore(one.outer[0].state())
    for fleet in (one, other):
        fleet.train(noise(1, 6, seed=26))
        fleet.meet(1)
    assert torch.equal(one.phi, other.phi)
    assert torch.equal(one.delta, other.delta)


def test_local_steps_are_counted_from_1() -> None:
    with pytest.raises(ValueError, match="done counts from 1: it is 1 after the first local step, not 0"):
        Fleet(noise(1, 6, seed=26), 1).outer[0].after_local_step(0)


def test_without_rounds_the_weights_are_all_there_is() -> None:
    parameter = torch.arange(4.0)
    alone = NoRounds(TorchWeights([parameter]))
    assert [alone.after_local_step(done) for done in range(1, 200)] == [[]] * 199
    with alone.evaluating() as slow:
        parameter.zero_()
        assert slow.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert parameter.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert {name: tensor.tolist() for name, tensor in alone.state().items()} == {"slow_weights": [0, 1, 2, 3]}


# Golden history


def drawn(count: int, *counters: int) -> Tensor:
    """Numbers in -0.5..0.5 that no version of torch changes."""
    words = draw_words(count, 1234, Stream.WEIGHTS, *counters)
    return torch.tensor([int(word) / 2**64 - 0.5 for word in words], dtype=torch.float32)


def history(group_size: int, **method: Any) -> list[dict[str, Any]]:
    """Six rounds of four replicas of three weights; each local phase goes half way to a target of its own."""
    fleet = Fleet(drawn(3, 0).expand(4, -1), group_size, seed=1234, **method)
    rounds = []
    for round_index in range(6):
        targets = torch.stack([drawn(3, 1 + replica, round_index) for replica in range(4)])
        fleet.train(fleet.phi + 0.5 * (targets - fleet.phi))
        reports = fleet.meet(round_index)
        rounds.append(
            {
                "groups": [list(report.exchange.group) for report in reports],
                "slow_weights": rounded(fleet.phi),
                "momentum": rounded(fleet.delta),
                "spread": [
                    None if report.spread != report.spread else float(f"{report.spread:.7g}")
                    for report in reports
                ],
            }
        )
    return rounds


def rounded(rows: Tensor) -> list[list[float]]:
    return [[float(f"{value:.7g}") for value in row] for row in rows.tolist()]


def assert_alike(now: Any, golden: Any) -> None:
    """Equal but for the last digits, which another CPU may round otherwise."""
    if isinstance(golden, dict):
        assert now.keys() == golden.keys()
        for key in golden:
            assert_alike(now[key], golden[key])
    elif isinstance(golden, list):
        assert len(now) == len(golden)
        for one, other in zip(now, golden, strict=True):
            assert_alike(one, other)
    elif isinstance(golden, float):
        assert now == pytest.approx(golden, rel=2e-6, abs=1e-7)
    else:
        assert now == golden  # None: a bye


def test_golden_history() -> None:
    now = {
        "pairs": history(2),
        "pairs, gamma 0.3, alpha 0.9": history(2, consensus_weight=0.3, outer_momentum=0.9),
        "three and a bye": history(3),
        "everyone": history(4),
    }
    if os.environ.get(UPDATE_GOLDEN) == "1":
        GOLDEN_HISTORY.write_text(json.dumps(now, indent=1) + "\n")
    assert_alike(now, json.loads(GOLDEN_HISTORY.read_text()))
