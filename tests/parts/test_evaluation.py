"""Evaluation: what the replicas send each other, the memory that it takes, and the losses of a blend."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_noloco.monitor.evaluation import Evaluation, Losses
from megatron_noloco.outer import (
    Channel,
    Exchange,
    NoRounds,
    OuterOptimizer,
    PartnerTimeoutError,
    TorchWeights,
    mean_model,
)
from megatron_noloco.outer.vectors import BUCKET
from megatron_noloco.plans.topology import Position, Topology
from megatron_noloco.settings import PAPER, NolocoSettings
from megatron_noloco.training.evaluator import Evaluator
from tests.kit.loopback import LoopbackTransport, loopback_world

PIECES = (30, 13)  # elements of a replica's weights


class Refreshed(TorchWeights):
    """Remembers the first element of each piece whenever it is refreshed."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters)
        self.seen: list[list[float]] = []

    def refresh(self) -> None:
        self.seen.append([float(part[0]) for part in self.parts()])


class Replica:
    """A replica that has weights only; `loss` computes its loss from them."""

    def __init__(
        self,
        transport: LoopbackTransport,
        replicas: int,
        loss: Callable[[list[Tensor]], float],
        method: str = "noloco",
        weights: Sequence[float] = (1.0,),
        with_mean: bool = True,
        deadline_seconds: float = 20.0,
        bucket: int = BUCKET,
    ) -> None:
        value = float(transport.rank)
        self.masters = [torch.full((length,), value) for length in PIECES]
        self.sent: list[int] = []
        post = transport.post

        def listen(sends: Any, receives: Any, tag: int) -> Any:
            self.sent += [message.buffer.numel() for message in sends]
            return post(sends, receives, tag)

        transport.post = listen  # type: ignore[method-assign]
        topology = Topology(replicas)
        place = topology.place(transport.rank)
        self.weights = Refreshed(self.masters)
        self.outer: Any = NoRounds(self.weights)
        if method != "none":
            self.outer = OuterOptimizer(self.weights, transport, place, NolocoSettings(**PAPER))
            self.outer.slow_weights.add_(10.0)  # an evaluation between rounds: fast and slow weights differ
        engine: Any = SimpleNamespace(
            groups=SimpleNamespace(topology=topology, position=topology.position(transport.rank))
        )
        *losses, means = (
            Exchange(transport, place, channel, deadline_seconds)
            for channel in (Channel.LOSSES, Channel.MEAN_LOSSES, Channel.MEAN_MODEL)
        )
        means.bucket = bucket
        sources: Any = [
            SimpleNamespace(weight=weight, dataset=SimpleNamespace(name=f"dataset {place}"))
            for place, weight in enumerate(weights)
        ]
        in_place = partial(mean_model, self.outer, means) if with_mean else None
        self.evaluator = Evaluator(engine, Any, sources, tuple(losses), in_place)
        measured: Any = self.evaluator
        measured._loss = lambda source, *share: (sources.index(source) + loss(self.masters), 10.0)


def first(weights: list[Tensor]) -> float:
    return float(weights[0][0])


def build(replicas: int, **options: Any) -> list[Replica]:
    return [
        Replica(transport, replicas, **{"loss": first, **options}) for transport in loopback_world(replicas)
    ]


def evaluate(fleet: list[Replica]) -> list[Evaluation]:
    with ThreadPoolExecutor(len(fleet)) as threads:
        return list(threads.map(lambda replica: replica.evaluator.evaluate(1), fleet))


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("bucket", [7, BUCKET])
def test_mean_model_is_mean_of_slow_weights(replicas: int, bucket: int) -> None:
    """The loss tells every weight from every other."""
    factors = torch.arange(float(sum(PIECES)))
    fleet = build(replicas, loss=lambda weights: float(torch.cat(weights) @ factors), bucket=bucket)
    apart = torch.arange(float(replicas))
    slow = torch.randn(sum(PIECES), generator=torch.Generator().manual_seed(0)) + apart.unsqueeze(1)
    for replica, vector in zip(fleet, slow, strict=True):
        replica.outer.slow_weights.copy_(vector)
    mean = slow.mean(dim=0)
    for rank, (replica, evaluation) in enumerate(zip(fleet, evaluate(fleet), strict=True)):
        assert evaluation.replica_losses == {place: place * float(factors.sum()) for place in range(replicas)}
        assert evaluation.mean_model_loss == pytest.approx(float(mean @ factors), rel=1e-5, abs=1e-3)
        assert evaluation.spread == pytest.approx(float(apart.std()))
        assert evaluation.datasets == {}
        assert all(bool((part == rank).all()) for part in replica.masters)
        assert torch.equal(replica.outer.slow_weights, slow[rank])
        # The model computes with the mean, then again with its own weights.
        assert replica.weights.seen[0] == pytest.approx([float(mean[0]), float(mean[PIECES[0]])])
        assert replica.weights.seen[1:] == [[rank, rank]]


def test_without_rounds_the_fast_weights_are_averaged() -> None:
    fleet = build(2, method="none")
    assert [evaluation.mean_model_loss for evaluation in evaluate(fleet)] == [0.5, 0.5]
    assert [[float(part[0]) for part in replica.masters] for replica in fleet] == [[0.0, 0.0], [1.0, 1.0]]


def test_without_the_mean_model_no_weights_travel() -> None:
    fleet = build(2, with_mean=False)
    evaluations = evaluate(fleet)
    assert [replica.sent for replica in fleet] == [[4], [4]], "each loss, and whether it is a number"
    for evaluation in evaluations:
        assert evaluation.replica_losses == {0: 0.0, 1: 1.0}
        assert math.isnan(evaluation.mean_model_loss)
        assert math.isnan(evaluation.spread)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_diverged_replica_is_reported_alone(replicas: int, figure: float) -> None:
    fleet = build(replicas, loss=lambda weights: figure if first(weights) == 1 else first(weights))
    for evaluation in evaluate(fleet):
        losses = evaluation.replica_losses
        assert math.isnan(losses.pop(1))
        assert [*losses.values()] == [0.0, 2.0, 3.0][: replicas - 1]


def test_a_blend_is_reported_by_dataset_and_in_proportion() -> None:
    for evaluation in evaluate(build(2, weights=(0.25, 0.75))):
        assert evaluation.replica_losses == {0: 0.75, 1: 1.75}
        assert evaluation.mean_model_loss == 11.25
        assert evaluation.datasets == {
            "dataset 0": Losses({0: 0.0, 1: 1.0}, 10.5),
            "dataset 1": Losses({0: 1.0, 1: 2.0}, 11.5),
        }


class Allocations(TorchDispatchMode):
    """The largest memory, in bytes, that was taken for a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        known = {tensor.untyped_storage().data_ptr() for tensor in given if isinstance(tensor, Tensor)}
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("replicas", [2, 4])
def test_no_further_copy_of_the_model_is_made(replicas: int) -> None:
    fleet = build(replicas, bucket=8)

    def largest(replica: Replica) -> int:
        replica.outer.run_round(0)
        with Allocations() as allocations:
            replica.evaluator.evaluate(1)
        return allocations.largest

    with ThreadPoolExecutor(replicas) as threads:
        assert max(threads.map(largest, fleet)) <= 64 < 4 * sum(PIECES)


@pytest.mark.parametrize("stops_at", range(4))
def test_evaluation_ends_when_job_stops(stops_at: int) -> None:
    """Parts are the passes over the data, the exchange of losses, and those of the mean model."""
    fleet, parts = build(2), list[list[int]]()
    for replica in fleet:
        begun = list[int]()
        parts.append(begun)
        evaluator: Any = replica.evaluator
        evaluator.stops_before = lambda done, part, begun=begun: begun.append(part) or part == stops_at
        evaluator._loss = lambda source, *share, own=evaluator, weights=replica.masters: (
            own._begin_part() or first(weights),
            10.0,
        )
    found = evaluate(fleet)
    assert parts == [list(range(min(stops_at, 2) + 1))] * 2
    assert [evaluation is None for evaluation in found] == [stops_at < 3] * 2
    assert [first(replica.masters) for replica in fleet] == [0.0, 1.0], "the fast weights are back"


def test_a_replica_that_is_gone_is_named() -> None:
    here, _ = loopback_world(2)
    replica = Replica(here, 2, first, deadline_seconds=0.05)
    with pytest.raises(PartnerTimeoutError, match=r"^replica 0: no answer from partner 1 .* an evaluation "):
        replica.evaluator.evaluate(1)


@pytest.mark.parametrize("count", [1, 6, 8])
@pytest.mark.parametrize(
    "sizes", [{}, {"dp": 2}, {"replicas": 3}, {"replicas": 2, "dp": 2, "pp": 2}, {"dp": 2, "pp": 2, "vpp": 2}]
)
def test_ranks_divide_the_microbatches(
    sizes: dict[str, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each microbatch counts once; all ranks compute as many, with virtual stages a multiple of the stages."""
    monkeypatch.setattr(dist, "all_reduce", lambda total, group: None)
    topology = Topology(**sizes)
    source: Any = type(
        "Source", (), {"microbatch": lambda self, index: index, "__len__": lambda self: count}
    )()
    computed, losses, tokens = [], 0.0, 0.0
    for replica in range(topology.replicas):
        for dp in range(topology.dp):
            done = list[int]()

            def evaluate(read: Any, routes: Any, number: int, done: list[int] = done) -> list[Any]:
                assert number % (topology.pp if topology.vpp > 1 else 1) == 0
                indices = [read(0, place) for place in range(number)]
                done += indices
                return [(0, 10.0**index, 2) for index in indices]

            position = Position(replica, topology.pp - 1, dp, 0)
            groups = SimpleNamespace(topology=topology, position=position, replica=None)
            engine: Any = SimpleNamespace(groups=groups, evaluate=evaluate)
            routing: Any = SimpleNamespace(straight=lambda: None)
            evaluator = Evaluator(engine, routing, [source], None, None)
            loss, counted = evaluator._loss(source, replica, topology.replicas)
            losses, tokens = losses + (loss * counted if counted else 0.0), tokens + counted
            computed.append(len(done))
    assert tokens == 2 * count
    assert losses == pytest.approx(2 * sum(10.0**index for index in range(count)), rel=1e-12)
    assert len(set(computed)) == 1
    assert computed[0] < count / len(computed) + (topology.pp if topology.vpp > 1 else 1)
