"""Routed pipelines compute what a single process computes along the same routes; unrouted ones, what core does."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor, nn

from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.model.stage import Stage, transformer_config
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import Groups, build_groups
from megatron_noloco.pipeline.pipeline import Pipeline, ReadMicrobatch
from megatron_noloco.plans.routing import Routes, Routing
from tests.kit.ranks import by_hand, run_ranks, slow
from tests.kit.routing_reference import (
    SEQ_LENGTH,
    VOCABULARY,
    Case,
    Expected,
    Observed,
    build_own_stage,
    crossing_routes,
    expected_part,
    gradient_of,
    named_gradients,
    named_parameters,
    norm,
    observed,
    read,
    reference,
    reference_step,
    row_of,
)
from tests.kit.tiny import Recorded

INTERVALS = ("round", "microbatch")
TOLERANCE = 1e-5
CASES = [
    Case(3, 3, 2),
    Case(2, 2, 4, layers_per_chunk=2, micro_batch_size=2),
    Case(3, 2, 4, vpp=2, layers_per_chunk=2),
    Case(2, 2, 4, tp=2, family="qwen2"),
    Case(2, 2, 4, family="mixtral"),
    Case(2, 2, 4, family="mistral", documents=True),
    Case(2, 2, 4, tp=2, sequence_parallel=True, documents=True),
    Case(2, 2, 4, recompute=True, documents=True),
]
BY_HAND = [  # their parts are in other combinations above
    Case(2, 4, 6),
    Case(2, 2, 4, tp=2),
    Case(2, 3, 6, vpp=2),
    Case(2, 2, 4, tp=2, vpp=2),
    Case(2, 2, 4, tp=2, micro_batch_size=2, documents=True),
    Case(2, 3, 4, documents=True),
    Case(2, 2, 4, vpp=2, documents=True),
]


def reader(case: Case) -> ReadMicrobatch:
    return lambda replica, microbatch: read(replica, microbatch, case)


def train_routed(rank: int, world_size: int, case: Case, routes_of: dict[str, Routes]) -> dict[str, Observed]:
    """One batch along each of the routes, on one and the same pipeline."""
    _, groups, stage = build_own_stage(case)
    pipeline = Pipeline(stage, groups, case.micro_batch_size, SEQ_LENGTH)
    seen = {}
    for name, routes in routes_of.items():
        stage.zero_grad()
        losses = pipeline.run(reader(case), routes, case.microbatches)
        seen[name] = observed(stage, groups, losses)
    return seen


@pytest.mark.parametrize("case", by_hand([*CASES, *BY_HAND], BY_HAND), ids=lambda case: case.name)
def test_gradients_and_losses_are_those_of_the_routes(case: Case) -> None:
    routes_of = {interval: crossing_routes(case, interval) for interval in INTERVALS}
    [expected] = run_ranks(1, reference, case, routes_of)
    ranks = run_ranks(case.topology.world_size, train_routed, case, routes_of)
    for interval in INTERVALS:
        of_all = [rank[interval] for rank in ranks]
        check_gradients(case, of_all, expected[interval])
        check_losses(case, of_all, expected[interval])


def check_gradients(case: Case, ranks: list[Observed], expected: Expected) -> None:
    for rank in ranks:
        full = expected.gradients[rank.position.replica]
        for name, gradient in rank.gradients.items():
            if case.sequence_parallel and row_of(case, name).tp_dim is None:
                gradient = sum_over_tp(name, rank, ranks)  # the engine sums them
            part = expected_part(full, name, rank.position, case)
            error = float((gradient - part).norm() / part.norm())
            assert error < TOLERANCE, f"{name} of {rank.position}: relative error {error:.1e}"
    # Together the ranks hold every parameter of every replica.
    for replica, full in enumerate(expected.gradients):
        assert full.keys() == {
            name for rank in ranks if rank.position.replica == replica for name in rank.gradients
        }


def sum_over_tp(name: str, rank: Observed, ranks: list[Observed]) -> Tensor:
    at = rank.position
    parts = [
        other.gradients[name]
        for other in ranks
        if (other.position.replica, other.position.stage) == (at.replica, at.stage)
    ]
    return torch.stack(parts).sum(dim=0)


def check_losses(case: Case, ranks: list[Observed], expected: Expected) -> None:
    """The last stages together know every replica's losses, each booked to the replica whose data it was."""
    seen = {}
    for rank in ranks:
        if rank.position.stage < case.pp - 1:
            assert rank.losses == []
            continue
        assert len(rank.losses) == case.microbatches
        for microbatch, (origin, loss) in enumerate(rank.losses):
            seen[rank.position.tp, origin, microbatch] = loss
    assert seen == {
        (tp, origin, microbatch): pytest.approx(loss, rel=TOLERANCE)
        for (origin, microbatch), loss in expected.losses.items()
        for tp in range(case.tp)
    }


def evaluate_straight(rank: int, world_size: int, case: Case, routes_of: dict[str, Routes]) -> Observed:
    """A routed batch, then a forward-only pass that stays inside each replica, as the trainer does."""
    _, groups, stage = build_own_stage(case)
    pipeline = Pipeline(stage, groups, case.micro_batch_size, SEQ_LENGTH)
    pipeline.run(reader(case), routes_of["microbatch"], case.microbatches)
    before = named_gradients(stage)
    with torch.no_grad():
        losses = pipeline.run(reader(case), routes_of["off"], case.microbatches, forward_only=True)
    seen = observed(stage, groups, losses)
    assert all(torch.equal(before[name], gradient) for name, gradient in seen.gradients.items())
    return seen


@pytest.mark.parametrize("case", [Case(3, 2, 4), Case(2, 2, 4, vpp=2)], ids=lambda case: case.name)
def test_evaluation_stays_inside_the_replica(case: Case) -> None:
    routes_of = {interval: crossing_routes(case, interval) for interval in ("microbatch", "off")}
    [expected] = run_ranks(1, reference, case, routes_of)
    ranks = run_ranks(case.topology.world_size, evaluate_straight, case, routes_of)
    check_losses(case, ranks, expected["off"])
    for rank in ranks:
        assert all(origin == rank.position.replica for origin, _ in rank.losses)


@pytest.mark.parametrize(
    ("case", "interval"),
    [
        (Case(2, 3, 5, tp=2), "off"),
        (Case(2, 3, 6, vpp=2), "off"),  # with 2 stages core's p2p confuses its directions
        (Case(1, 2, 4, tp=2), "microbatch"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_no_routes_equal_core_communicator_bitwise(case: Case, interval: str) -> None:
    run_ranks(case.topology.world_size, compare_with_core, case, interval)


def compare_with_core(rank: int, world_size: int, case: Case, interval: str) -> None:
    _, groups, stage = build_own_stage(case, routed=interval != "off")
    routes = Routing(case.replicas, case.microbatches, 0, interval).routes(3, 3)  # type: ignore[arg-type]
    pipeline = Pipeline(stage, groups, case.micro_batch_size, SEQ_LENGTH)
    ours = [float(one.loss) for one in pipeline.run(reader(case), routes, case.microbatches)]
    our_gradients = named_gradients(stage)
    stage.zero_grad()
    assert run_core(case, groups, stage) == ours
    for name, gradient in named_gradients(stage).items():
        assert torch.equal(gradient, our_gradients[name]), f"{name} of {groups.position}"
    dist.barrier()


def run_core(case: Case, groups: Groups, stage: Stage) -> list[float]:
    """The schedule and the communicator as Megatron-core brings them."""
    p2p_communication.torch = cpu._HostTorch()  # asks for CUDA's current device

    def forward_step(batches: Iterator[tuple[Tensor, Tensor, None]], chunk: nn.Module) -> tuple[Tensor, Any]:
        tokens, labels, _ = next(batches)
        output = chunk(tokens, None, None, labels=labels)
        return output, lambda losses: (losses.mean(), float(losses.mean()))

    replica = groups.position.replica
    batches = [reader(case)(replica, microbatch) for microbatch in range(case.microbatches)]
    schedule = get_forward_backward_func(case.pp, case.vpp if case.vpp > 1 else None)
    return schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in stage.chunks],
        model=list(stage.chunks),
        num_microbatches=case.microbatches,
        seq_length=SEQ_LENGTH,
        micro_batch_size=case.micro_batch_size,
        forward_only=False,
        p2p_communicator=P2PCommunicator(groups.pp, stage.config),
        pg_collection=groups.collection,
    )


def train_engine_step(rank: int, world_size: int, case: Case, routes: Routes, precision: str) -> Any:
    changes: dict[str, Any] = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    config, groups, stage = build_own_stage(case, **changes)
    recorded = Recorded()
    engine = ReplicaEngine(stage, groups, config.as_deepspeed(), recorded)
    engine.train_batch(reader(case), routes)
    dist.barrier()
    return groups.position, recorded["train/grad_norm"][0]


@pytest.mark.parametrize(
    ("case", "precision", "tolerance"),
    [
        slow(Case(2, 2, 4, tp=2), "fp32", TOLERANCE),
        (Case(2, 2, 4), "bf16", 0.02),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_the_gradient_norm_is_that_of_the_replicas_own_stages(
    case: Case, precision: str, tolerance: float
) -> None:
    """From whatever replica's data their gradients come."""
    routes = crossing_routes(case, "microbatch")
    [expected] = run_ranks(1, reference, case, {"microbatch": routes})
    norms = [norm(gradients) for gradients in expected["microbatch"].gradients]
    assert min(abs(a - b) / a for i, a in enumerate(norms) for b in norms[:i]) > 5 * tolerance
    found = run_ranks(case.topology.world_size, train_engine_step, case, routes, precision)
    for position, grad_norm in found:
        assert grad_norm == pytest.approx(norms[position.replica], rel=tolerance)


LEARNING_RATE, CLIP = 1.0, 0.5


def train_clipped_step(rank: int, world_size: int, case: Case, routes: Routes) -> Any:
    optimizer = {"type": "SGD", "params": {"lr": LEARNING_RATE}}
    config, groups, stage = build_own_stage(case, optimizer=optimizer, gradient_clipping=CLIP)
    engine = ReplicaEngine(stage, groups, config.as_deepspeed())
    engine.train_batch(reader(case), routes)
    dist.barrier()
    moved = {name: parameter.detach().clone() for name, parameter in named_parameters(stage).items()}
    return groups.position, moved


@pytest.mark.parametrize(
    "case",
    [Case(3, 3, 2, tied=True), Case(2, 2, 4, tp=2, vpp=2, sequence_parallel=True, recompute=True, tied=True)],
    ids=lambda case: case.name,
)
def test_clipped_step_follows_own_gradient(case: Case) -> None:
    """Every replica clips by its own norm; tied embeddings add up over its own first and last stage."""
    routes = crossing_routes(case, "microbatch")
    [(expected, norms)] = run_ranks(1, reference_step, case, routes, LEARNING_RATE, CLIP)
    assert min(norms) > 2 * CLIP
    for position, moved in run_ranks(case.topology.world_size, train_clipped_step, case, routes):
        full = expected[position.replica]
        for name, found in moved.items():
            part = expected_part(full, row_of(case, name).source, position, case)
            error = float((found - part).norm() / part.norm())
            assert error < TOLERANCE, f"{name} of {position}: relative error {error:.1e}"


class Parrot(nn.Module):
    """A chunk that passes on the number that the tokens hold, times its weight (one).

    The loss is activation x label, so that a message in the wrong place shows in the loss (forward) or in the
    first stage's gradient (backward). It sleeps now and then, so that ranks overtake each other.
    """

    def __init__(self, groups: Groups, config: Any) -> None:
        super().__init__()
        self.pre_process, self.post_process = groups.first_stage, groups.last_stage
        self.config = config
        self.model_type = self.vp_stage = None
        self.weight = nn.Parameter(torch.ones(()))
        self.received: Tensor | None = None
        self.random = random.Random(dist.get_rank())

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        self.received = received[0]

    def forward(self, tokens: Tensor | None, *_: None, labels: Tensor | None = None) -> Tensor:
        if self.random.random() < 1 / 16:
            time.sleep(self.random.uniform(0, 0.004))
        if tokens is not None:
            hidden = tokens.T[..., None].float().expand(-1, -1, self.config.hidden_size)
        else:
            assert self.received is not None
            hidden = self.received
        hidden = hidden * self.weight
        return hidden if labels is None else hidden.mean(dim=2).T * labels


def train_long(rank: int, world_size: int, case: Case, steps: int, interval: str) -> int:
    cpu.prepare()
    groups = build_groups(case.topology, routed=True)
    run = case.config()
    config = transformer_config(run.architecture(VOCABULARY), run.compute, groups.topology)
    stage = Stage([Parrot(groups, config)], config)  # type: ignore[list-item]
    recorded = Recorded()
    pipeline = Pipeline(stage, groups, case.micro_batch_size, SEQ_LENGTH, recorded)
    routing = Routing(case.replicas, case.microbatches, seed=1, interval=interval)  # type: ignore[arg-type]
    crossed = hops = 0

    def number(step: int, replica: int, microbatch: int) -> int:
        """Small enough for fp32 to hold its square exactly."""
        return ((step * case.replicas + replica) * case.microbatches + microbatch) % 1021 + 1

    for step in range(steps):

        def tell(replica: int, microbatch: int, step: int = step) -> tuple[Tensor, Tensor, None]:
            text = torch.full((case.micro_batch_size, SEQ_LENGTH), number(step, replica, microbatch))
            return text, text, None

        stage.zero_grad()
        routes = routing.routes(step, step // 10)
        losses = pipeline.run(tell, routes, case.microbatches)
        hops += sum(hops_to_others(routes, groups, microbatch) for microbatch in range(case.microbatches))
        for microbatch, (origin, loss, _) in enumerate(losses):
            assert float(loss) == number(step, origin, microbatch) ** 2
            crossed += origin != groups.position.replica
        if groups.first_stage:
            own = [number(step, groups.position.replica, m) for m in range(case.microbatches)]
            mean_square = sum(n**2 for n in own) / len(own)
            [weight] = stage.parameters()
            assert float(gradient_of(weight)) == pytest.approx(mean_square, rel=TOLERANCE)
    message_bytes = SEQ_LENGTH * case.micro_batch_size * config.hidden_size * 4
    assert sum(recorded["total/routed_bytes"]) == hops * message_bytes
    dist.barrier()
    return crossed


def hops_to_others(routes: Routes, groups: Groups, microbatch: int) -> int:
    """How often this rank sends to another replica: the activation onwards, the gradient back."""
    replica, stage = groups.position.replica, groups.position.stage
    onwards = not groups.last_stage and routes.next_replica(stage, replica, microbatch) != replica
    back = not groups.first_stage and routes.previous_replica(stage - 1, replica, microbatch) != replica
    return onwards + back


@pytest.mark.parametrize(
    ("case", "steps", "interval"),
    [
        slow(Case(4, 2, 8), 300, "microbatch"),
        slow(Case(4, 2, 8), 60, "round"),
        (Case(3, 3, 8), 30, "microbatch"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_does_not_hang_nor_mistake_a_message(case: Case, steps: int, interval: str) -> None:
    crossed = run_ranks(case.topology.world_size, train_long, case, steps, interval, timeout=240)
    share = sum(crossed) / (case.replicas * steps * case.microbatches)
    assert share == pytest.approx(1 - 1 / case.replicas, abs=0.25)
