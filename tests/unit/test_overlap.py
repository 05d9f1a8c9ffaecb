"""Rounds that are under way while training goes on: what outer/round.py says of them, as theorems."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.config.summary import outer_state
from megatron_noloco.outer import (
    Exchange,
    NoRounds,
    OuterOptimizer,
    PartnerTimeoutError,
    RoundReport,
    TorchWeights,
    messages,
)
from megatron_noloco.outer.exchange import STRETCH
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.stability import spread_factor
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import NolocoSettings, OverlapSettings
from megatron_noloco.transport.loopback import loopback_world
from megatron_noloco.transport.mpi import library_name, progress_of
from tests.unit.test_outer import CHUNK_BYTES, Diloco, Fleet, assert_close, noise

K = 4


class Training(Fleet):
    """A fleet that takes local steps, whose updates are given from outside."""

    def __init__(self, start: Tensor, group_size: int, delay_steps: int, **method: Any) -> None:
        super().__init__(start, group_size, local_steps=K, delay_steps=delay_steps, **method)
        self.done = 0
        self.snapshots: list[Tensor] = []  # theta at the end of each local phase, before anything else

    def step(self, updates: Tensor) -> list[list[RoundReport]]:
        """Add `updates`, shape [replicas, elements], to the fast weights."""
        self.train(self.theta + updates)
        self.done += 1
        with ThreadPoolExecutor(self.replicas) as threads:
            return list(threads.map(lambda outer: outer.after_local_step(self.done), self.outer))

    def run(self, steps: int, seed: int = 0) -> list[list[list[RoundReport]]]:
        """Local steps whose updates depend on the step alone."""
        shape = self.theta.shape
        return [self.step(0.1 * noise(*shape, seed=1000 * seed + self.done)) for _ in range(steps)]

    def land(self) -> None:
        with ThreadPoolExecutor(self.replicas) as threads:
            list(threads.map(lambda outer: outer.wait(), self.outer))


def training(
    replicas: int, delay_steps: int, group_size: int = 2, elements: int = 37, **method: Any
) -> Training:
    return Training(noise(elements, seed=1).expand(replicas, -1), group_size, delay_steps, **method)


# The definition


@pytest.mark.parametrize("delay_steps", [1, 2, K])
@pytest.mark.parametrize("gamma", [None, 0.3])
def test_the_merge_adds_the_correction_to_what_the_weights_have_become(
    delay_steps: int, gamma: float | None
) -> None:
    """Written out in double precision, from the definition."""
    fleet = training(4, delay_steps, consensus_weight=gamma)
    gamma = 0.7 if gamma is None else gamma
    theta, phi, delta = (x.double() for x in (fleet.theta, fleet.phi, fleet.delta))
    under_way: tuple[int, Tensor, Tensor] | None = None
    for done in range(1, 4 * K + 1):
        updates = 0.1 * noise(4, 37, seed=done)
        fleet.step(updates)
        theta = theta + updates.double()
        if under_way is not None and done == under_way[0]:
            delta = 0.5 * delta + under_way[1] - gamma * phi
            phi = phi + delta
            theta, under_way = theta + phi - under_way[2], None
        if done % K == 0:
            c, mean = 0.7 * (theta - phi) + gamma * phi, torch.empty_like(theta)
            for group in map(list, fleet.grouping.groups(done // K - 1)):
                mean[group] = c[group].mean(dim=0)
            under_way = done + delay_steps, mean, theta.clone()
        assert_close(fleet.theta, theta)
    assert under_way is not None
    fleet.land()
    delta = 0.5 * delta + under_way[1] - gamma * phi
    assert_close(fleet.phi, phi + delta)
    assert_close(fleet.delta, delta)
    assert_close(fleet.theta, theta)  # to land is not to merge


def test_no_delay_is_the_round_that_training_waits_for() -> None:
    blocking, delayed = training(4, 0), training(4, 0)
    for round_index in range(3):
        reports = delayed.run(K)
        assert [len(of_replica) for of_replica in reports[-1]] == [1] * 4
        for step in range(K):
            blocking.train(blocking.theta + 0.1 * noise(4, 37, seed=round_index * K + step))
        blocking.meet(round_index)
        for name in ("theta", "phi", "delta"):
            assert torch.equal(getattr(blocking, name), getattr(delayed, name))


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, K), st.sampled_from([0.0, 0.3, 0.7, 1.1]))
def test_updates_that_do_not_depend_on_the_weights_give_the_phi_and_delta_of_no_delay(
    replicas: int, group_size: int, delay_steps: int, gamma: float
) -> None:
    """Each local update enters exactly one outer gradient."""
    size = min(group_size, replicas)
    fleets = [training(replicas, d, size, consensus_weight=gamma) for d in (0, delay_steps)]
    for fleet in fleets:
        fleet.run(4 * K)
        fleet.land()
    blocking, delayed = fleets
    assert_close(delayed.phi, blocking.phi, 1e-5)
    assert_close(delayed.delta, blocking.delta, 1e-5)


@pytest.mark.parametrize("delay_steps", [1, 3, K])
def test_rounds_begin_after_the_local_phase_and_are_reported_when_they_are_merged(delay_steps: int) -> None:
    fleet = training(2, delay_steps)
    reports = [replicas[0] for replicas in fleet.run(3 * K + 1)]
    merged = {done: report.round_index for done, step in enumerate(reports, 1) for report in step}
    assert merged == {
        K * (r + 1) + delay_steps: r for r in range(3) if K * (r + 1) + delay_steps <= 3 * K + 1
    }
    for transport in fleet.transports:
        assert len(transport.sent) == 3, "the third round is under way, merged or not"
    for report in chain(*reports):
        assert report.exchange.bytes_sent == 37 * 4
        assert report.exchange.group == (0, 1)


# Facts 1 to 4 of docs/method.md, and rho


@pytest.mark.parametrize("delay_steps", [1, K])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_everyone_in_one_group_takes_dilocos_outer_steps(replicas: int, delay_steps: int) -> None:
    """Facts 1 and 2: a bye is the group of one."""
    fleet = training(replicas, delay_steps, replicas, consensus_weight=0.2)
    reference = Diloco(fleet.phi[0], 0.5, 0.7)
    for _ in range(3):
        fleet.run(K - 1)
        fleet.land()
        update = 0.1 * noise(replicas, 37, seed=fleet.done)
        snapshot, before = fleet.theta.double() + update.double(), fleet.phi.double()
        corrections = [outer.state().get("correction") for outer in fleet.outer]
        if corrections[0] is not None:  # d = k: it is merged before the next snapshot
            snapshot = snapshot + torch.stack([c.double() for c in corrections if c is not None])
        fleet.step(update)
        reference.step((snapshot - before).mean(dim=0))
        fleet.land()
        assert_close(fleet.phi, reference.phi.expand(replicas, -1))
        assert_close(fleet.delta, reference.delta.expand(replicas, -1))


@settings(max_examples=15)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, K - 1),
    st.integers(0, 10_000),
    st.sampled_from(["fp32", "int16", "int8", "int4"]),
)
def test_the_mean_follows_diloco_for_any_grouping(
    replicas: int, group_size: int, delay_steps: int, seed: int, payload: str
) -> None:
    """Fact 3, with the outer gradients as they are at the snapshots."""
    size, method = min(group_size, replicas), {"consensus_weight": 0.3, "seed": seed, "payload": payload}
    fleet = training(replicas, delay_steps, size, **method)
    reference = Diloco(fleet.phi.double().mean(dim=0), 0.5, 0.7)
    for _ in range(3):
        fleet.run(K - 1, seed)
        update = 0.1 * noise(replicas, 37, seed=seed + fleet.done)
        reference.step((fleet.theta.double() + update.double() - fleet.phi.double()).mean(dim=0))
        fleet.step(update)
        fleet.land()
        assert_close(fleet.phi.double().mean(dim=0), reference.phi)
        assert_close(fleet.delta.double().mean(dim=0), reference.delta)


@pytest.mark.parametrize("slow_weights", ["host", "device"])
def test_two_replicas_agree_bitwise_on_phi_and_delta_but_not_on_theta(slow_weights: str) -> None:
    """Fact 4."""
    fleet = training(2, 2, slow_weights=slow_weights)
    for _ in range(4):
        fleet.run(K)
        fleet.land()
        assert torch.equal(fleet.phi[0], fleet.phi[1])
        assert torch.equal(fleet.delta[0], fleet.delta[1])
        assert not torch.equal(fleet.theta[0], fleet.theta[1])
        fleet.run(2)
        assert fleet.done % K == 2, "the step of the merge"
        assert not torch.equal(fleet.theta[0], fleet.theta[1])
        fleet.run(K - 2)


@pytest.mark.parametrize("delay_steps", [0, 1, K])
def test_without_gradients_the_spread_shrinks_as_rho_says(delay_steps: int) -> None:
    """theta = phi at every snapshot, so the spread of phi is that of no delay, round for round."""
    start = noise(8, 400, seed=3)
    fleet = Training(start, 2, delay_steps, seed=5)
    variances = [float(fleet.phi.var(dim=0).mean())]
    for _ in range(12):
        for _ in range(K):
            fleet.step(torch.zeros_like(start))
        fleet.land()
        variances.append(float(fleet.phi.var(dim=0).mean()))
        if not delay_steps:
            assert torch.equal(fleet.theta, fleet.phi)
    blocking = Training(start, 2, 0, seed=5)
    for variance in variances[1:]:
        for _ in range(K):
            blocking.step(torch.zeros_like(start))
        assert variance == pytest.approx(float(blocking.phi.var(dim=0).mean()), rel=1e-4)
    factor = (variances[-1] / variances[2]) ** (1 / 10)
    assert factor == pytest.approx(spread_factor(0.5, 0.7, 2), abs=0.1)


@pytest.mark.parametrize("delay_steps", [1, K - 1])
def test_without_gradients_the_merged_weights_are_the_slow_ones(delay_steps: int) -> None:
    start = noise(4, 50, seed=4)
    fleet = Training(start, 2, delay_steps)
    for _ in range(5 * K + delay_steps):
        fleet.step(torch.zeros_like(start))
    assert_close(fleet.theta, fleet.phi)


# In the middle of a flight


@pytest.mark.parametrize(("group_size", "fragments"), [(3, 1), (2, 3)])
def test_arriving_early_changes_nothing(group_size: int, fragments: int) -> None:
    """To evaluate, save or ask for progress, each at every step of a phase, leaves every bit as it would be."""
    plain, disturbed = (training(4, 3, group_size, fragments=fragments) for _ in range(2))
    disturbances = [evaluate, OuterOptimizer.state, OuterOptimizer.progress]
    plain.run(3 * K)
    for done in range(3 * K):
        disturbed.run(1)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(disturbances[done % 3], disturbed.outer))
    plain.land()
    disturbed.land()
    for name in ("theta", "phi", "delta"):
        assert torch.equal(getattr(plain, name), getattr(disturbed, name))


def evaluate(outer: OuterOptimizer) -> None:
    before = outer.weights.read()
    with outer.evaluating() as slow, outer.weights.writing() as write:
        write(0, slow)
    assert torch.equal(outer.weights.read(), before)


def states(fleet: Training) -> list[dict[str, Tensor]]:
    with ThreadPoolExecutor(fleet.replicas) as threads:
        found = threads.map(lambda outer: outer.state(), fleet.outer)
        return [{name: tensor.clone() for name, tensor in state.items()} for state in found]


def resumed(fleet: Training, delay_steps: int, **method: Any) -> Training:
    """Another process with what a checkpoint of `fleet` holds, now."""
    other = training(fleet.replicas, delay_steps, fleet.grouping.group_size, **method)
    other.train(fleet.theta)
    for outer, state in zip(other.outer, states(fleet), strict=True):
        outer.restore(state)
    other.done = fleet.done
    return other


@pytest.mark.parametrize("saved", range(K, 3 * K))
@pytest.mark.parametrize("delay_steps", [2, K])
@pytest.mark.parametrize("payload", ["fp32", "int4"])
def test_state_continues_a_run_bit_for_bit_from_any_step(saved: int, delay_steps: int, payload: str) -> None:
    fleet = training(4, delay_steps, payload=payload)
    fleet.run(saved)
    other = resumed(fleet, delay_steps, payload=payload)
    expected, found = fleet.run(4 * K - saved), other.run(4 * K - saved)
    fleet.land()
    other.land()
    for name in ("theta", "phi", "delta"):
        assert torch.equal(getattr(fleet, name), getattr(other, name))
    assert list(map(told, found)) == list(map(told, expected)), (
        "the round that was under way is reported as it would have been"
    )


def told(step: list[list[RoundReport]]) -> Any:
    return [[figures(report) for report in of_replica] for of_replica in step]


def figures(report: RoundReport) -> Any:
    exchange = report.exchange
    return (
        report.round_index,
        report.fragment,
        report.spread,
        exchange.group,
        exchange.bytes_sent,
        exchange.compared_elements,
        exchange.squared_error,
        exchange.resent_elements,
    )


def test_a_checkpoint_holds_a_correction_only_while_a_round_is_not_merged() -> None:
    fleet = training(2, 1)
    for done in range(1, 2 * K + 2):
        fleet.run(1)
        (state, _) = states(fleet)
        assert ("correction" in state) == ("delayed_rounds" in state) == (done in (K, 2 * K))


def test_resumed_without_rounds_the_correction_is_merged_at_once() -> None:
    fleet = training(2, 2)
    fleet.run(K)
    (state, _) = states(fleet)
    parameter = fleet.theta[0].clone()
    NoRounds(TorchWeights([parameter])).restore(state)
    assert torch.equal(parameter, fleet.theta[0] + state["correction"])


@pytest.mark.parametrize("delay_steps", [0, 1])
def test_resumed_with_other_local_steps_the_correction_is_merged_at_once(delay_steps: int) -> None:
    fleet = training(2, 3)
    fleet.run(K)
    other = Training(fleet.theta, 2, 0)
    other.outer = [
        OuterOptimizer(
            TorchWeights(master),
            transport,
            Place(transport.rank, 2),
            NolocoSettings(
                local_steps=2, overlap=OverlapSettings("delayed", delay_steps), deadline_seconds=20
            ),
        )
        for transport, master in zip(other.transports, other.masters, strict=True)
    ]
    held = states(fleet)
    for outer, state in zip(other.outer, held, strict=True):
        outer.restore(state)
    other.done, theta = fleet.done, fleet.theta
    updates = [0.1 * noise(2, 37, seed=seed) for seed in (1, 2)]
    for update in updates:
        other.step(update)
    merged = theta + sum(updates) + torch.stack([state["correction"] for state in held])
    for replica, transport in enumerate(other.transports):
        assert_close(transport.sent[-1][1], 0.7 * merged[replica])


def test_the_delay_may_change_between_rounds() -> None:
    fleet, plain = training(3, 0), training(3, 0)
    for d in (0, 2, K, 1, 0):
        for outer in fleet.outer:
            outer.delay_steps = d
        fleet.run(K)
    plain.run(5 * K)
    fleet.land()
    assert_close(fleet.phi, plain.phi, 1e-5)


def test_a_partner_that_does_not_answer_is_named_when_somebody_waits() -> None:
    (transport, _) = loopback_world(2)
    settings = NolocoSettings(local_steps=2, overlap=OverlapSettings("delayed", 1), deadline_seconds=0.05)
    outer = OuterOptimizer(TorchWeights([torch.ones(4)]), transport, Place(0, 2), settings)
    assert [outer.after_local_step(done) for done in (1, 2)] == [[], []]
    outer.progress()
    with pytest.raises(PartnerTimeoutError, match=r"no answer from partner 1 \(rank 1\) in round 0 after 0."):
        outer.after_local_step(3)


# The exchange without waiting


@pytest.mark.parametrize("group", [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("stretch", [7, 1000])
def test_progress_alone_completes_an_exchange_of_any_group(group: Group, stretch: int) -> None:
    """In one thread, which could wait for nobody: both phases, stretch after stretch."""
    vectors = noise(len(group), 101, seed=15)
    transports = loopback_world(len(group), CHUNK_BYTES)
    exchanges = [Exchange(t, Place(t.rank, len(group)), 5, stretch=stretch) for t in transports]
    times, means = torch.zeros(len(group), 101), torch.zeros(len(group), 101)
    for exchange, vector in zip(exchanges, vectors, strict=True):
        exchange.begin(vector, group, 3, "a test")
    while int(times.sum()) < times.numel():
        before = int(times.sum())
        for exchange, seen, whole in zip(exchanges, times, means, strict=True):
            for start, stop, mean in exchange.progress():
                seen[start:stop] += 1
                whole[start:stop] = mean
        assert int(times.sum()) > before
    assert torch.equal(times, torch.ones_like(times))
    for exchange, mean in zip(exchanges, means, strict=True):
        assert list(exchange.finish()) == []
        assert exchange.report.wait_seconds == 0
        assert torch.equal(mean, means[0])
    assert_close(means[0], vectors.mean(dim=0))


def test_progress_without_an_exchange_yields_nothing() -> None:
    exchange = Exchange(loopback_world(2)[0], Place(0, 2), 0)
    assert list(exchange.progress()) == []
    exchange.begin(torch.ones(3), (0, 1), 0, "round 0")
    assert list(exchange.progress()) == []


class Clock:
    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def monotonic(self) -> float:
        return self.times.pop(0)


class Silent:
    """A flight on which nothing lands; remembers for how long it is waited for."""

    wait_seconds = 0.0
    deadline_seconds = 0.0

    def arrived(self) -> list[Any]:
        return []

    def done(self) -> bool:
        return bool(self.deadline_seconds)

    def arrivals(self, deadline_seconds: float) -> Any:
        self.deadline_seconds = deadline_seconds
        return iter(())

    def finish(self, deadline_seconds: float) -> None:
        assert deadline_seconds == self.deadline_seconds


def test_the_deadline_counts_from_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flights are waited for since their posting: 100 s of local steps between must not use the deadline up."""
    monkeypatch.setattr(messages, "time", Clock(5.0, 105.0))
    waiting, flight = messages.Waiting(10.0), Silent()
    arrivals = waiting.collect(flight)
    assert next(arrivals) is None
    waiting.start("waiting for rank 1")
    assert list(arrivals) == []
    assert flight.deadline_seconds == 110.0


@pytest.mark.parametrize(
    ("library", "variable", "moved_by"),
    [
        ("Open MPI v5.0.11", "OMPI_MCA_btl_tcp_progress_thread", "between hosts a thread of Open MPI"),
        ("MPICH Version: 5.0.2", "MPIR_CVAR_ASYNC_PROGRESS", "a thread of MPICH"),
        ("Intel(R) MPI Library 2021.11", "I_MPI_ASYNC_PROGRESS", "a thread of Intel MPI"),
    ],
)
def test_who_moves_messages_is_told_by_library_and_setting(
    library: str, variable: str, moved_by: str
) -> None:
    floor = "calls of MPI at every microbatch"
    assert progress_of(library, {variable: "1"}) == f"{moved_by} ({variable})"
    assert progress_of(library, {variable: "0"}) == progress_of(library, {}) == floor
    assert progress_of("Another MPI", {variable: "1"}) == floor


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("Open MPI v5.0.11, package: Open MPI root@host Distribution", "Open MPI v5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25", "MPICH 5.0.2"),
        (
            "Intel(R) MPI Library 2021.19.0 for Linux* OS\n",
            "Intel(R) MPI Library 2021.19.0 for Linux* OS",
        ),
    ],
)
def test_a_library_is_named_in_one_line(version: str, name: str) -> None:
    assert library_name(version) == name


# Memory


def held(fleet: Training) -> list[Tensor]:
    """The vectors that the outer optimizers keep from round to round."""
    vectors = [vector for outer in fleet.outer for vector in (outer.slow_weights, outer.momentum)]
    return vectors + [vector for of_round in fleet.memory for vector in of_round.values()]


def test_nothing_is_allocated_from_round_to_round() -> None:
    fleet = training(2, 2, elements=5000)
    fleet.run(2 * K + 2)
    places = []
    for _ in range(3):
        places.append([vector.data_ptr() for vector in held(fleet)])
        fleet.run(K)
    assert all(before == after for before, after in pairwise(places))


@pytest.mark.parametrize("delay_steps", [0, 2])
def test_config_tells_the_bytes_of_the_outer_state(delay_steps: int) -> None:
    fleet = training(2, delay_steps, elements=1000)
    fleet.run(2 * K + 2)
    noloco = NolocoSettings(overlap=OverlapSettings("delayed", delay_steps))
    told = outer_state(noloco, replicas=2)
    assert told.startswith(f"{sum(vector.nbytes for vector in held(fleet)) // 2000} bytes per parameter (")
    in_groups = outer_state(NolocoSettings(group_size=4), replicas=4)
    assert f"at most {2 * 4 * STRETCH // 2**20} MiB to receive in" in in_groups
