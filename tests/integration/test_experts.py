"""Expert parallelism: the training is that without it, and each expert is averaged with itself."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.config import RunConfig
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import parameters_of_stages
from tests.harness import by_hand, run_ranks, slow
from tests.integration.chaos import Run
from tests.integration.test_engine import assert_same_training, initial_weights
from tests.integration.test_other_layout import SAVED, layout, saved_run
from tests.integration.tiny import FAMILY_MODELS, MUON, MUON_ROUNDING, VOCABULARY, tiny, train

STEPS = 4
MODEL = {**FAMILY_MODELS["mixtral"], "num_layers": 2, "init_method_std": 0.1}
SGD = {
    "scheduler": None,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0, **dict.fromkeys(("betas", "eps", "weight_decay"))}},
}
BF16 = {"bf16": {"enabled": True}}  # for which DeepSpeed has another optimizer
PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def run(optimizer: str, ranks: int = 1, dp: int = 1, ep: int = 1, **more: Any) -> list[dict[str, Any]]:
    """Every data-parallel size has the same batch."""
    parallel = {"data_parallel_size": dp, "expert_model_parallel_size": ep, **more}
    changes = {"model": MODEL, "parallel": parallel, "gradient_accumulation_steps": 4 // dp}
    return run_ranks(ranks, train, tiny(changes, tiny(OPTIMIZERS[optimizer])), STEPS)


EXPERT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
TABLE = table_of(RunConfig(**tiny({"model": MODEL})).architecture(VOCABULARY))

# The largest difference of losses and of norms, and that of weights as a part of their movement
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": SGD,
    "SGD with ZeRO 2": SGD | {"zero_optimization": {"stage": 2}},
    "Muon": MUON,
    "SGD in bf16": SGD | BF16,
}
TOLERANCES = {
    "SGD": (1e-5, 1e-5),
    "SGD with ZeRO 2": (1e-5, 1e-5),
    "Muon": (1e-4, 1e-3),
    "SGD in bf16": (0.03, 0.3),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ep 2 of dp 4, ZeRO 2": ("SGD with ZeRO 2", {"dp": 4, "ep": 2}),
    "ep 2, tp 2": ("SGD", {"dp": 2, "ep": 2, **TP2}),
    "ep 2, pp 2, Muon": ("Muon", {"dp": 2, "ep": 2, **PP2}),
    "ep 2 of dp 4, bf16": ("SGD in bf16", {"dp": 4, "ep": 2}),
    "ep 2 of dp 4, Muon": ("Muon", {"dp": 4, "ep": 2}),
    "ep 2, tp 2, bf16": ("SGD in bf16", {"dp": 2, "ep": 2, **TP2}),
}
BY_HAND = ("ep 2 of dp 4, Muon", "ep 2, tp 2, bf16")  # their parts are in other cases


@cache
def on_one_rank(optimizer: str) -> list[dict[str, Any]]:
    return run(optimizer)


@cache
def initial() -> dict[str, Tensor]:
    return run_ranks(1, initial_weights, tiny({"model": MODEL}))[0]


@pytest.mark.parametrize("case", by_hand(CASES, BY_HAND))
def test_the_training_is_that_of_one_rank(case: str) -> None:
    """Losses, norms of the gradients, which are clipped, weights, and the fp32 weights that ZeRO divides."""
    optimizer, sizes = CASES[case]
    pp, tp = (sizes.get(f"{kind}_model_parallel_size", 1) for kind in ("pipeline", "tensor"))
    topology = Topology(1, pp, sizes["dp"], tp, ep=sizes["ep"])
    found, (expected,) = run(optimizer, topology.world_size, **sizes), on_one_rank(optimizer)
    of_losses, of_weights = (
        tolerance * (MUON_ROUNDING if optimizer == "Muon" else 1) for tolerance in TOLERANCES[optimizer]
    )
    assert_same_training(found, [expected], of_losses)
    assert min(expected["grad_norms"]) > 0.5, "every step is clipped"
    for name, full in expected["weights"].items():
        row = TABLE.find(name)
        if "bf16" in case and not row.decays:
            continue  # a norm's weight is near 1, where bf16 has steps larger than its movement
        movement = float((full - initial()[name]).norm())
        held = {rank: one["weights"][name] for rank, one in enumerate(found) if name in one["weights"]}
        assert len(held) == topology.dp * tp // (1 if row.expert is None else topology.ep)
        for rank, part in held.items():
            error = part - row.slice(full, topology.position(rank).tp, topology.tp)
            assert float(error.norm()) < of_weights * movement, (name, rank)
    if "bf16" not in case:
        assert_master_weights_are_divided(found, topology)
    config = RunConfig(**tiny({"model": MODEL}, tiny(OPTIMIZERS[optimizer])))
    for stage, planned in enumerate(parameters_of_stages(config, config.architecture(VOCABULARY), topology)):
        for rank, one in enumerate(found):
            if topology.position(rank).stage == stage:
                assert planned.parameters == sum(part.numel() for part in one["weights"].values())
                assert planned.owned == len(one["master"])


def assert_master_weights_are_divided(found: list[dict[str, Any]], topology: Topology) -> None:
    """In fp32 they are the weights, each on one of the ranks that have it; beside them there is padding."""
    master = torch.cat([rank["master"] for rank in found])
    once = torch.cat(
        [
            weight.flatten()
            for rank, of_rank in enumerate(found)
            for name, weight in of_rank["weights"].items()
            if topology.owners(dp := topology.position(rank).dp, TABLE.find(name).expert is not None)[0] == dp
        ]
    )
    padding = master.new_zeros(len(master) - len(once))
    assert torch.equal(master.sort().values, torch.cat([once, padding]).sort().values)


# Exchanges


@pytest.mark.parametrize("topology", [Topology(4, 2, 4, 2, ep=2), Topology(2, 1, 6, 1, ep=3)], ids=str)
def test_partners_have_the_same_experts(topology: Topology) -> None:
    for rank in range(topology.world_size):
        at, place = topology.position(rank), topology.place(rank)
        for replica in topology.numbers:
            partner = topology.position(place.rank_of(replica))
            assert (partner.replica, partner.stage, partner.tp) == (replica, at.stage, at.tp)
            assert topology.experts(partner.dp, 12) == topology.experts(at.dp, 12)
            assert topology.owners(partner.dp, experts=True) == topology.owners(at.dp, experts=True)
    together = [topology.experts(dp, 12) for dp in range(topology.ep)]
    assert sorted(expert for own in together for expert in own) == list(range(12))


def weights(run: Run, replica: int, vector: str) -> dict[str, Tensor]:
    reader = CheckpointReader(Ensemble.read([run.step_folder(SAVED)]))
    return {row.name: reader.read(row.name, [replica], vector).clone() for row in reader.table}


@pytest.mark.parametrize(("pp", "interval"), [(1, "off"), slow(2, "microbatch")])
def test_rounds_are_those_without_it(pp: int, interval: str, tmp_path: Path) -> None:
    """Two replicas, two rounds: both runs end with the same weights, read from checkpoints of both layouts."""
    mixture = [{"noloco": {"local_steps": 2, "routing": interval}}, {"model": {**MODEL, "num_layers": 4}}]
    without = saved_run(tmp_path / "without", [*mixture, layout(pp, dp=2)])
    apart = saved_run(tmp_path / "apart", [*mixture, layout(pp, dp=2, ep=2)])
    for vector in ("slow_weights", "fast_weights"):
        for replica in range(2):
            found, expected = weights(apart, replica, vector), weights(without, replica, vector)
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)
    experts = [weights(without, replica, "fast_weights")[EXPERT] for replica in range(2)]
    assert float((experts[0] - experts[1]).abs().max()) > 1e-3, "what an expert is averaged with is seen"
