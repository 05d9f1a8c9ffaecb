"""Evaluation: what the replicas tell each other, and what becomes of the figures of a blend."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_noloco.training.evaluate import Evaluator


class Averaging:
    """The other replica always sends zeros."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.report = SimpleNamespace(standard_deviation=0.5)

    def whole_mean(self, own: Tensor, everyone: tuple[int, ...], tag: int) -> Tensor:
        self.sent.append(own.numel())
        return own / len(everyone)


def evaluator(
    monkeypatch: pytest.MonkeyPatch, mean_model: bool, weights: tuple[float, ...] = (1.0,)
) -> Evaluator:
    """One of two replicas; its loss on a dataset is the dataset's place plus its first weight."""
    masters = [torch.ones(3), torch.full((4,), 2.0)]
    groups = SimpleNamespace(topology=SimpleNamespace(replicas=2), position=SimpleNamespace(replica=0))
    engine: Any = SimpleNamespace(groups=groups, master_weights=masters, refresh_working_weights=lambda: None)
    sources: Any = [
        SimpleNamespace(weight=weight, dataset=SimpleNamespace(name=f"dataset {place}"))
        for place, weight in enumerate(weights)
    ]
    averaging: Any = Averaging()
    made = Evaluator(engine, None, averaging, Any, sources, mean_model)
    monkeypatch.setattr(made, "_loss", lambda source: sources.index(source) + float(masters[0][0]))
    return made


def test_the_mean_model_costs_one_exchange_of_the_weights_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = evaluator(monkeypatch, mean_model=True)
    evaluation = made.evaluate()
    assert made.averaging.sent == [2, 7]
    assert evaluation.replica_losses == [1.0, 0.0]
    assert evaluation.mean_model_loss == 0.5
    assert evaluation.spread == 0.5
    assert evaluation.datasets == []
    assert [part.tolist() for part in made.engine.master_weights] == [[1.0] * 3, [2.0] * 4]


def test_without_the_mean_model_no_weights_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    made = evaluator(monkeypatch, mean_model=False)
    evaluation = made.evaluate()
    assert made.averaging.sent == [2]
    assert evaluation.replica_losses == [1.0, 0.0]
    assert math.isnan(evaluation.mean_model_loss)
    assert math.isnan(evaluation.spread)


def test_a_blend_is_told_by_dataset_and_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = evaluator(monkeypatch, mean_model=True, weights=(0.25, 0.75)).evaluate()
    assert evaluation.replica_losses == [1.75, 0.0]
    assert evaluation.mean_model_loss == 1.25
    assert [(part.name, part.replica_losses, part.mean_model_loss) for part in evaluation.datasets] == [
        ("dataset 0", [1.0, 0.0], 0.5),
        ("dataset 1", [2.0, 0.0], 1.5),
    ]
