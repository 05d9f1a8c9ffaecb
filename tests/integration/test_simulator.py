"""The simulator is the trainer: the same losses to rounding, from the same JSON."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.config import RunConfig
from tests.harness import run_ranks
from tests.integration.tiny import metrics, run_whole, tiny, write_config, write_text
from tools import study
from tools.simulate_convergence import apply
from tools.simulator.simulation import Simulation

METHODS: dict[str, dict[str, Any]] = {
    "pairs": {"group_size": 2},
    "groups of 3 of 4": {"group_size": 3, "consensus_weight": 0.4},
    "cycles": {"pairing": "cycle"},
    "DiLoCo": {"method": "diloco"},
    "fragments": {"fragments": 2, "pairing": "cycle"},
    "no rounds": {"enabled": False, "fragments": 2},
}


@pytest.mark.parametrize("name", METHODS)
def test_four_replicas_learn_as_in_the_trainer(name: str, tmp_path: Path) -> None:
    raw = tiny(
        {
            "noloco": {"local_steps": 2, **METHODS[name]},
            "parallel": {"replicas": 4},
            "data": {"text": write_text(tmp_path)},
            "training": {"train_iters": 8, "output_dir": str(tmp_path)},
            "evaluation": {"interval": 2, "iters": 3},
        }
    )
    run_ranks(4, run_whole, write_config(tmp_path, raw))
    simulated = list(Simulation(RunConfig.from_dict(raw)).run())
    by_replica = metrics(tmp_path, "evaluation")
    trained = by_replica[0]
    assert [row.step for row in simulated] == [row["step"] for row in trained] == [2, 4, 6, 8]
    for index, (ours, theirs) in enumerate(zip(simulated, trained, strict=True)):
        assert ours.replica_losses == pytest.approx(theirs["validation/replica_losses"], abs=2e-5)
        assert ours.mean_model_loss == pytest.approx(theirs["validation/mean_model_loss"], abs=2e-5)
        # Each replica compares a quarter of the weights.
        quarters = [rows[index]["validation/spread"] ** 2 for rows in by_replica]
        assert ours.spread == pytest.approx(statistics.mean(quarters) ** 0.5, rel=1e-3)
    sent = [rows[-1]["total/sent_bytes"] for rows in metrics(tmp_path, "step")]
    assert simulated[-1].sent_bytes == max(sent)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel": {"replicas": "auto"}}, "parallel: give a number of replicas"),
        ({"parallel": {"pipeline_model_parallel_size": 2}}, "parallel: give a number of replicas"),
        ({"bf16": {"enabled": True}}, "optimizer.type must be AdamW, and the precision fp32"),
        (
            {"model": {"untie_embeddings_and_output_weights": False}},
            "untie_embeddings_and_output_weights must",
        ),
    ],
)
def test_what_is_not_simulated_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    base = {"parallel": {"replicas": 2}, "data": {"text": write_text(tmp_path)}}
    with pytest.raises(ValueError, match=reason):
        Simulation(RunConfig.from_dict(tiny(changes, tiny(base))))


def test_a_change_on_the_command_line() -> None:
    raw: dict[str, Any] = {"noloco": {"local_steps": 2}}
    for change in ("noloco.local_steps=5", "noloco.method=diloco", "optimizer.params.betas=[0.9,0.99]"):
        apply(raw, change)
    assert raw == {
        "noloco": {"local_steps": 5, "method": "diloco"},
        "optimizer": {"params": {"betas": [0.9, 0.99]}},
    }


def test_a_study_compares_methods_at_their_best_learning_rates(tmp_path: Path) -> None:
    base = tiny(
        {
            "noloco": {"local_steps": 2},
            "parallel": {"replicas": 2},
            "model": {"num_layers": 1},
            "data": {"text": write_text(tmp_path)},
            "training": {"train_iters": 4},
            "evaluation": {"iters": 2},
        }
    )
    one = ["parallel.replicas=1", "noloco.enabled=false"]
    runs = {"synchronous": [*one, "gradient_accumulation_steps=8"], "alone": one, "NoLoCo": []}
    plan = {"base": base, "learning_rates": [1e-6, 0.01], "seeds": [1, 2], "runs": runs}
    keys = [study.Key(name, rate, seed) for name in runs for rate in (1e-6, 0.01) for seed in (1, 2)]
    results = {key: study.simulate(study.configure(plan, key)) for key in keys}
    rows = {row.name: row for row in study.table(results)}
    assert {row.learning_rate for row in rows.values()} == {0.01}, "with the other one nothing is learnt"
    assert (rows["alone"].benefit, rows["synchronous"].benefit) == (0, 1)
    share = (rows["alone"].loss - rows["NoLoCo"].loss) / (rows["alone"].loss - rows["synchronous"].loss)
    assert rows["NoLoCo"].benefit == pytest.approx(share)
    assert rows["NoLoCo"].megabytes > rows["alone"].megabytes == 0
    assert study.as_csv(rows.values()).count("\n") == 4

    path = tmp_path / "results.jsonl"
    rows_of = [json.dumps({**key._asdict(), **results[key]}) for key in keys]
    path.write_text("\n".join(rows_of) + '\n{"name": "cut sho')
    assert study.read(path) == results
    assert study.run(plan, path, jobs=1) == results, "nothing is run again"
