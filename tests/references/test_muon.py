"""Muon in the engine against a plain reference. tests/layouts compares it with itself."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.engine.gradients import PartialGradients
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.plans.routing import Routes
from megatron_noloco.plans.topology import Position
from tests.kit import routing_reference
from tests.kit.ranks import run_ranks, slow
from tests.kit.routing_reference import Case, Gradients, build_own_stage, crossing_routes, norm, read
from tests.kit.tiny import MUON_ROUNDING, tiny, train

STEPS = 3
PARAMS: dict[str, Any] = {
    "muon_lr": 0.02,
    "adam_lr": 0.01,
    "momentum": 0.9,
    "betas": [0.8, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
}
MUON: dict[str, Any] = {"optimizer": {"type": "Muon", "params": PARAMS}}


# Against a plain reference


def plain_muon(rank: int, world_size: int, case: Case, routes: Routes) -> list[Gradients]:
    """Weights of every replica's whole model after the steps, without DeepSpeed or Megatron's pipeline."""
    models = routing_reference._whole_models(case)
    momenta: list[Gradients] = [{} for _ in models]
    others = [
        [
            {"params": [p for name, p in model.named_parameters() if p.dim() > 1 and not is_linear(name)]},
            {"params": [p for _, p in model.named_parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        for model in models
    ]
    adams = [
        torch.optim.AdamW(
            parameter_groups,
            lr=PARAMS["adam_lr"],
            betas=PARAMS["betas"],
            eps=PARAMS["eps"],
            weight_decay=PARAMS["weight_decay"],
        )
        for parameter_groups in others
    ]
    for _ in range(STEPS):
        gradients = routing_reference._expected(case, models, routes).gradients
        for model, of_model, momentum, adam in zip(models, gradients, momenta, adams, strict=True):
            scale = min(1.0, 1.0 / norm(of_model))  # the case's gradient_clipping is 1
            assert scale < 1, "every step is clipped"
            for name, parameter in model.named_parameters():
                parameter.grad = of_model[name] * scale
                if is_linear(name):
                    muon_step(name, parameter, momentum)
            adam.step()
    return [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]


def is_linear(name: str) -> bool:
    return name.endswith(
        ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
    )


@torch.no_grad()
def muon_step(name: str, weight: Tensor, momenta: Gradients) -> None:
    gradient, mu, rate = weight.grad, PARAMS["momentum"], PARAMS["muon_lr"]
    assert gradient is not None
    momentum = momenta.setdefault(name, torch.zeros_like(gradient))
    momentum += (1 - mu) * (gradient - momentum)
    direction = (1 - mu) * gradient + mu * momentum
    weight *= 1 - rate * PARAMS["weight_decay"]
    for rows in matrices(name, len(weight)):
        weight[rows] -= rate * orthogonal(direction[rows]) * max(1, len(rows) / weight.shape[1]) ** 0.5


def matrices(name: str, rows: int) -> list[Tensor]:
    """The rows of each matrix: two groups of 2 queries' heads, a key, a value, 8 channels each; gate and up."""
    numbers = torch.arange(rows)
    if "linear_qkv" in name:
        return [part.flatten() for part in numbers.view(2, 32).split([16, 8, 8], dim=1)]
    return list(numbers.chunk(2)) if "linear_fc1" in name else [numbers]


def orthogonal(matrix: Tensor) -> Tensor:
    """Five quintic Newton-Schulz iterations."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x if wide is matrix else x.T


def engine_with_muon(
    rank: int, world_size: int, case: Case, routes: Routes
) -> tuple[Position, Gradients, Gradients, int]:
    """Weights before and after the steps, and the matrices orthogonalised."""
    config, groups, stage = build_own_stage(case, **MUON)
    engine = ReplicaEngine(stage, groups, config.as_deepspeed())
    muon = engine._deepspeed.basic_optimizer
    newton_schulz, calls = muon._newton_schulz, []
    muon._newton_schulz = lambda matrix, steps: (
        calls.append(matrix.shape) or newton_schulz(matrix, steps=steps)
    )
    before = {row.name: parameter.detach().clone() for row, parameter in stage.named_rows()}
    for _ in range(STEPS):
        engine.train_batch(lambda replica, microbatch: read(replica, microbatch, case), routes)
    after = {row.name: parameter.detach().clone() for row, parameter in stage.named_rows()}
    dist.barrier()
    return groups.position, before, after, len(calls)


@pytest.mark.parametrize(
    ("case", "interval"),
    [
        (Case(1, 1, 2, layers_per_chunk=2), "off"),
        (Case(2, 2, 4, vpp=2), "microbatch"),
        (Case(2, 2, 4, tp=2), "microbatch"),
        *(slow(Case(2, 2, 4), interval) for interval in ("off", "microbatch")),
        *(slow(Case(2, 2, 4, **more), "off") for more in ({"tp": 2}, {"vpp": 2})),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else value,
)
def test_weights_after_three_steps_are_those_of_the_reference(case: Case, interval: str) -> None:
    routes = crossing_routes(case, interval)
    [expected] = run_ranks(1, plain_muon, case, routes)
    ranks = run_ranks(case.topology.world_size, engine_with_muon, case, routes)
    for position, before, after, calls in ranks:
        layers = case.vpp * case.layers_per_chunk
        assert calls == STEPS * layers * 7, "q, k, v, projection, gate, up and down of every layer"
        for name, weight in after.items():
            full = expected[position.replica][name]
            part = routing_reference.row_of(case, name).slice(full, position.tp, case.tp)
            error = float((weight - part).norm() / (part - before[name]).norm())
            assert error < 2e-4 * MUON_ROUNDING, f"{name} of {position}: {error:.1e} of its movement"


# The norm and the learning rates


def run(changes: dict[str, Any] | None = None, steps: int = 5) -> dict[str, Any]:
    return run_ranks(1, train, tiny(changes, tiny(MUON)), steps)[0]


def test_the_norm_is_that_of_the_gradient() -> None:
    """Not of the orthogonalised one."""
    (plain,) = run_ranks(1, train, tiny(), 1)
    assert run(steps=1)["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-6)


def test_clipping_does_not_scale_the_step() -> None:
    free = run({"gradient_clipping": 0.0}, steps=1)
    clipped = run({"gradient_clipping": 0.01}, steps=1)
    assert free["grad_norms"][0] > 1
    for name, weight in free["weights"].items():
        if is_linear(name):
            start, allowed = free["start"][name], 1e-4 * MUON_ROUNDING
            torch.testing.assert_close(clipped["weights"][name] - start, weight - start, rtol=0, atol=allowed)


def learning_rates(rank: int, world_size: int, raw: dict[str, Any], steps: int) -> list[list[float]]:
    """Of all groups, step by step: Muon's, then AdamW's with and without weight decay."""
    seen = []
    complete = PartialGradients.complete

    def noted(gradients: PartialGradients) -> None:
        seen.append([group["lr"] for group in gradients._optimizer.param_groups])
        complete(gradients)

    PartialGradients.complete = noted  # type: ignore[method-assign]
    train(rank, world_size, raw, steps)
    return seen


def test_a_schedule_keeps_the_ratio_of_the_learning_rates() -> None:
    (rates,) = run_ranks(1, learning_rates, tiny(MUON), 5)
    assert len({muon for muon, *_ in rates}) > 2
    assert all(adam == [pytest.approx(muon / 2)] * 2 for muon, *adam in rates)
    assert [muon for muon, *_ in rates] == run()["learning_rates"], "the log has that of the linear maps"
