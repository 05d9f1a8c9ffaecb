"""What jobs give each other of their inner optimizers, and of states that the loop registers."""

import json
import re
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_noloco.attach.inner import Inner
from megatron_noloco.attach.registered import check_functions, loaded, saved
from megatron_noloco.attach.torch_module import torch_engine


def trained(optimizer: Any, model: nn.Module) -> None:
    torch.manual_seed(0)
    optimizer.zero_grad()
    model(torch.rand(8, 3)).square().mean().backward()
    optimizer.step()


class Keeping(torch.optim.SGD):
    """Keeps a state of the test's choice."""

    kept: ClassVar[dict[str, Any]] = {}

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= self.kept
        return super().step(closure)


def inner_of(model: nn.Module, *parts: Any) -> Inner:
    return Inner(torch_engine(model), parts)


class OfEightBits(Tensor):
    """Stands for a moment that only its optimizer can read."""


@pytest.mark.parametrize(
    "kept",
    [
        {"ema": torch.zeros(2, 3)},
        {"exp_avg": torch.zeros(3), "step": torch.zeros(2)},
        {
            "exp_avg": torch.zeros(2, 3, dtype=torch.uint8),
            "exp_avg_sq": torch.zeros(2, 3).as_subclass(OfEightBits),
        },
        {"rows": [1.0], "columns": 7},
    ],
)
def test_fields_that_are_not_known_are_named(kept: dict[str, Any]) -> None:
    """Whatever they hold; also a known one of another shape, as a factored moment has."""
    model = nn.Linear(3, 2)
    optimizer = Keeping([model.weight], lr=0.1)
    Keeping.kept = kept
    trained(optimizer, model)
    line = f"^Keeping keeps {', '.join(sorted(kept))}, which other jobs cannot"
    with pytest.raises(ValueError, match=line):
        inner_of(model, optimizer).facts()


@pytest.mark.parametrize("kept", [3, torch.tensor(0.5), torch.tensor(7.0)])
def test_numbers_are_taken_as_they_were_kept(kept: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = Keeping(model.parameters(), lr=0.1)
    Keeping.kept = {"step": kept}
    trained(optimizer, model)
    facts = json.loads(json.dumps(inner_of(model, optimizer).facts()))
    assert facts["others"] == {"inner.step": float(kept)}
    fresh = Keeping(model.parameters(), lr=0.1)
    inner_of(model, fresh).load(facts, {})
    assert [fresh.state[one]["step"] for one in model.parameters()] == [kept, kept]
    assert {type(fresh.state[one]["step"]) for one in model.parameters()} == {type(kept)}


def test_optimizers_and_schedule_continue_from_taken_state() -> None:
    """To the last bit; the weights of one of the optimizers have taken fewer steps than others."""
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)) for _ in range(2)]
    parts = []
    for model in models:
        adam = torch.optim.AdamW(model[0].parameters(), lr=0.1)
        sgd = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        parts.append((adam, sgd, torch.optim.lr_scheduler.CosineAnnealingLR(adam, 9)))

    def step(index: int, frozen: bool = False) -> list[Tensor]:
        models[index][0].bias.requires_grad_(not frozen)
        for optimizer in parts[index][:2]:
            trained(optimizer, models[index])
        parts[index][2].step()
        return [one.detach().clone() for one in models[index].parameters()]

    for number in range(4):
        step(0, frozen=number < 2)
    given = inner_of(models[0], *parts[0])
    facts, vectors = json.loads(json.dumps(given.facts())), given.vectors()
    assert vectors.keys() == {"inner.exp_avg", "inner.exp_avg_sq", "inner.momentum_buffer"}
    assert facts["named"].keys() == {"0.bias"}
    models[1].load_state_dict(models[0].state_dict())
    own = inner_of(models[1], *parts[1])
    own.check("adamw and sgd", facts, vectors)
    own.load(facts, vectors)
    assert loaded(own.functions, saved(given.functions)) == []
    for _ in range(3):
        assert all(map(torch.equal, step(0), step(1)))
    line = "inner is adamw here, and adamw and sgd for others and others 1 where the"
    with pytest.raises(ValueError, match=line):
        inner_of(models[1], parts[1][0]).check("adamw and sgd", facts, vectors)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_of_a_group_only_what_changes_is_taken_over(rate: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    before, theirs = dict(optimizer.param_groups[0]), {"lr": 0.5, "step": 3, "params": [7], "eps": 1.0}
    inner = inner_of(model, optimizer)
    inner.load({"others": {}, "settings": {"0": theirs}}, {})
    (group,) = optimizer.param_groups
    rate_of = group.pop("lr")
    assert (rate_of, type(rate_of)) == (0.5, type(rate))
    assert {name: value for name, value in before.items() if name != "lr"} == group
    with pytest.raises(ValueError, match="its lr cannot be read"):
        inner.check("adamw", {"others": {}, "settings": {"0": {"lr": "0.5"}}}, {})


def test_an_optimizer_of_other_weights_is_refused() -> None:
    """Those of a loss that was not attached, and of a model that was copied after its optimizer was made."""
    model, loss = nn.Linear(2, 2), nn.Linear(2, 3)
    loss.bias.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"SGD steps 1 tensors \(the first of shape \[3, 2\]\) that are no weights"
    ):
        inner_of(model, torch.optim.SGD([*model.parameters(), *loss.parameters()]))


def test_optimizers_are_found_inside_of_others() -> None:
    """A chain of Megatron-core's, of which one has no weights here, and one of Accelerate around DeepSpeed's."""
    model = nn.Linear(2, 2)
    adam, sgd = torch.optim.AdamW([model.weight]), torch.optim.SGD([model.bias])
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1)

    def around(optimizer: Any) -> Any:
        nothing: Any = lambda *_: {}  # noqa: E731
        return SimpleNamespace(
            optimizer=optimizer, param_groups=[], state_dict=nothing, load_state_dict=nothing
        )

    chain = around(None)
    chain.chained_optimizers = [around(None), around(around(adam))]
    found = inner_of(model, chain, around(sgd), schedule)
    assert found.kind == "adamw and sgd"
    assert found.functions.keys() == {"part 2 of inner"}


def test_what_has_no_state_is_no_inner_optimizer() -> None:
    model: Any = nn.Linear(2, 2)
    for nothing in (model, iter([torch.optim.SGD(model.parameters())])):
        with pytest.raises(ValueError, match=r"attach: inner is a \w+; give the optimizer, or a list of"):
            Inner(torch_engine(model), nothing)


def given(*values: Any) -> dict[str, Any]:
    return {f"state {at}": (lambda value=value: value, None) for at, value in enumerate(values)}


def test_registered_states_come_back_as_plain_values() -> None:
    milestones = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.zeros(1)]), [3, 3]).milestones
    value = {"a": np.float32(0.5), np.int64(2): [np.bool_(True), (1, "text", None)], "m": milestones}
    found: list[Any] = []
    assert loaded({"state 0": (lambda: None, found.append)}, saved(given(value))) == []
    assert repr(found) == repr([{"a": 0.5, 2: [True, (1, "text", None)], "m": milestones}])


def test_a_part_of_a_tensor_is_not_given_to_other_ranks() -> None:
    """As an average of weights that `fully_shard` divides; what each rank has as a whole is given."""
    sharded, whole = (
        SimpleNamespace(to_local=None, placements=[SimpleNamespace(is_replicate=lambda kind=kind: kind)])
        for kind in (False, True)
    )
    found = saved(given({"ema": [sharded]}, [whole]), for_all_ranks=True)
    assert "it has a part of a DTensor, which other ranks cannot load" in str(found["state 0"])
    assert "DTensor" not in str(found["state 1"])


def test_unloadable_registered_state_costs_itself_alone() -> None:
    def fails(state: Any) -> None:
        raise KeyError("horizon")

    found: list[Any] = []
    theirs = saved(given(lambda: 0, defaultdict(list, a=[]), 1, torch.ones(2)))
    names = [*theirs, "state 4"]
    functions: Any = {name: (None, fails if at == 2 else found.append) for at, name in enumerate(names)}
    more = "more than numbers, text and tensors"
    expected = [f"state 0 begins anew: .*{more}", f"state 1 begins anew: .*{more}",
                "state 2 begins anew: .*KeyError: 'horizon'", "state 4 begins anew: it was not given"]  # fmt: skip
    for line, pattern in zip(loaded(functions, theirs), expected, strict=True):
        assert re.fullmatch(f"{pattern}.*", line), line
    assert torch.equal(*found, torch.ones(2))


@pytest.mark.parametrize("nothing", [[], {"data": len}, {"data": (len, 3)}, {"data": (len,)}])
def test_what_are_no_two_functions_is_not_registered(nothing: Any) -> None:
    with pytest.raises(ValueError, match="attach: registered"):
        check_functions(nothing)
