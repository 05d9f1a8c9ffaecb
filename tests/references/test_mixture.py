"""The loss that balances experts: its gradient and its figure are those of the formula, in every layout."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_noloco.pipeline.pipeline import Pipeline
from megatron_noloco.plans.routing import Routing
from tests.kit.ranks import run_ranks
from tests.kit.routing_reference import named_gradients
from tests.kit.tiny import (
    FAMILY_MODELS,
    RECOMPUTE,
    build,
    initial_weights,
    microbatch,
    tiny,
    train,
    weights_of,
)

EXPERTS, CHOSEN, COEFFICIENT = 4, 2, 1.0
ROUTER = "decoder.layers.2.mlp.router.weight"
SGD = {"type": "SGD", "params": {"lr": 1.0}}


def config(kind: str = "aux_loss") -> dict[str, Any]:
    model = {
        "moe_router_load_balancing_type": kind,
        "moe_aux_loss_coeff": COEFFICIENT,
        "init_method_std": 0.1,
    }
    changes = {"scheduler": None, "gradient_clipping": 0.0, "model": {**FAMILY_MODELS["mixtral"], **model}}
    return tiny(changes) | {"optimizer": SGD}


def balance(logits: Tensor) -> Tensor:
    """E * sum of f * P over the experts, of logits [tokens, experts]: 1 where all experts have equal shares."""
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(CHOSEN).indices, 1.0)
    return EXPERTS * (chosen.mean(0) / CHOSEN * probabilities.mean(0)).sum()


def plain(rank: int, world_size: int, raw: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """One step of gradient descent on the sum of both losses, by autograd alone; and the mean of `balance`."""
    kind = raw["model"]["moe_router_load_balancing_type"]
    run, groups, stage = build(tiny({"model": {"moe_router_load_balancing_type": "none"}}, raw), world_size)
    logits: list[Tensor] = []
    for layer in stage.chunks[0].decoder.layers:
        gating = layer.mlp.router.gating
        layer.mlp.router.gating = lambda hidden, gating=gating: logits.append(gating(hidden)) or logits[-1]
    figures = []
    for index in range(run.microbatches):
        tokens, labels, _ = microbatch(run, groups, 0, 0, index)
        logits.clear()
        loss = stage.chunks[0](tokens, None, None, labels=labels).float().mean()
        of_layers = [
            balance(layer.flatten(0, 1))
            if kind == "aux_loss"
            else torch.stack([balance(layer[:, sequence]) for sequence in range(layer.size(1))]).mean()
            for layer in logits  # each [tokens, batch, experts]
        ]
        assert len(of_layers) == run.model.num_layers
        total = torch.stack(of_layers).sum()
        ((loss + COEFFICIENT * total * (kind != "none")) / run.microbatches).backward()
        figures.append(float(total) / len(of_layers))
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter -= parameter.grad
    return weights_of(stage), sum(figures) / len(figures)


@cache
def expected(kind: str) -> tuple[dict[str, Tensor], float]:
    return run_ranks(1, plain, config(kind))[0]


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one rank": ({}, 1),
    "2 stages": ({"parallel": {"pipeline_model_parallel_size": 2}}, 2),
    "dp 2": ({"parallel": {"data_parallel_size": 2}, "gradient_accumulation_steps": 2}, 2),
    "tp 2": ({"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}, 2),
    "recomputed": ({"model": RECOMPUTE}, 1),
}


def of_layout(kind: str, layout: str) -> list[dict[str, Any]]:
    changes, ranks = LAYOUTS[layout]
    return run_ranks(ranks, train, tiny(changes, config(kind)), 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_step_is_that_of_the_formula(layout: str) -> None:
    weights, figure = expected("aux_loss")
    without = expected("none")[0][ROUTER]
    start = run_ranks(1, initial_weights, config())[0]
    moved = weights[ROUTER] - start[ROUTER]
    assert float((weights[ROUTER] - without).norm()) > 0.3 * float(moved.norm()), "the loss is felt"
    ranks = of_layout("aux_loss", layout)
    for rank in ranks:
        found = rank["weights"].get(ROUTER)  # not cut, so whole on every rank of its stage
        if found is not None:
            assert float((found.float() - weights[ROUTER]).norm()) < 1e-4 * float(moved.norm())
    assert sum(rank["balance"] for rank in ranks) == pytest.approx(figure, rel=1e-4)


@pytest.mark.parametrize("kind", ["seq_aux_loss", "none"])
def test_other_ways_to_balance(kind: str) -> None:
    weights, figure = expected(kind)
    [found] = of_layout(kind, "one rank")
    moved = weights[ROUTER] - run_ranks(1, initial_weights, config())[0][ROUTER]
    assert float((found["weights"][ROUTER] - weights[ROUTER]).norm()) < 1e-4 * float(moved.norm())
    assert found["balance"] == pytest.approx(figure if kind == "seq_aux_loss" else 0.0, rel=1e-4)


def scaled_gradient(rank: int, world_size: int, raw: dict[str, Any], scale: float) -> Tensor:
    config, groups, stage = build(raw, world_size)
    stage.config.grad_scale_func = lambda loss: loss * scale  # what the engine does in fp16
    pipeline = Pipeline(stage, groups, config.micro_batch_size, config.model.seq_length)
    routes = Routing(1, config.microbatches, 0, "off").straight()
    pipeline.run(
        lambda replica, index: microbatch(config, groups, 0, replica, index), routes, config.microbatches
    )
    return named_gradients(stage)[ROUTER]


def test_a_loss_scale_scales_both_losses() -> None:
    """DeepSpeed divides the whole gradient by it."""
    [gradient] = run_ranks(1, scaled_gradient, config(), 64.0)
    expected_gradient = run_ranks(1, initial_weights, config())[0][ROUTER] - expected("aux_loss")[0][ROUTER]
    assert float((gradient / 64 - expected_gradient).norm()) < 1e-4 * float(expected_gradient.norm())
