"""The simulator is the trainer: the same losses to rounding, from the same JSON."""

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.config import RunConfig
from tests.kit.ranks import run_ranks, slow
from tests.kit.tiny import MUON, MUON_ROUNDING, metrics, run_whole, tiny, write_config, write_text
from tools import evidence, study
from tools.simulator import simulation
from tools.simulator.simulation import Simulation
from tools.simulator.trained import train

METHODS: dict[str, dict[str, Any]] = {
    "pairs": {"group_size": 2},
    "groups of 3 of 4": {"group_size": 3, "consensus_weight": 0.4},
    "DiLoCo": {"method": "diloco", "outer_momentum": 0.9, "outer_nesterov": True},
    "final average of a delayed round": {"final_average": True, "overlap_steps": 1},
    "fragments": {"fragments": 2, "pairing": "cycle"},
    "no rounds": {"enabled": False, "fragments": 2},
}
# Of the tiny config's schedule only the steps are left.
NOT_WSD = dict.fromkeys(("warmup_min_ratio", "warmup_type", "cos_min_ratio"))
MUON_WSD = {**MUON, "scheduler": {"type": "WSD", "params": {"decay_num_steps": 15, **NOT_WSD}}}


def small(
    folder: Path, replicas: int, steps: int, evaluation: dict[str, int], **blocks: Any
) -> dict[str, Any]:
    """Return the JSON of a run with rounds after every 2 local steps."""
    run = {
        "noloco": {"recipe": "paper", "local_steps": 2, "final_average": False},
        "parallel": {"replicas": replicas},
        "data": {"text": write_text(folder)},
        "training": {"train_iters": steps},
        "evaluation": evaluation,
    }
    return tiny(blocks, tiny(run))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("groups of 3 of 4", {}),
        ("DiLoCo", {}),
        ("fragments", MUON_WSD),
        *(slow(name, {}) for name in ("pairs", "final average of a delayed round", "fragments", "no rounds")),
    ],
)
def test_four_replicas_learn_as_in_the_trainer(name: str, optimizer: dict[str, Any], tmp_path: Path) -> None:
    evaluation, blocks = {"interval": 2, "iters": 3}, {**optimizer, "noloco": METHODS[name]}
    raw = small(tmp_path, 4, 8, evaluation, training={"output_dir": str(tmp_path)}, **blocks)
    run_ranks(4, run_whole, write_config(tmp_path, raw))
    simulated = list(Simulation(RunConfig(**raw)).run())
    rounding = MUON_ROUNDING if "type" in optimizer.get("optimizer", {}) else 1
    by_replica = metrics(tmp_path, "evaluation")
    trained = by_replica[0]
    assert [row.step for row in simulated] == [row["step"] for row in trained] == [2, 4, 6, 8]
    for index, (ours, theirs) in enumerate(zip(simulated, trained, strict=True)):
        assert ours.replica_losses == pytest.approx(theirs["validation/replica_losses"], abs=2e-5 * rounding)
        assert ours.mean_model_loss == pytest.approx(
            theirs["validation/mean_model_loss"], abs=2e-5 * rounding
        )
        # Each replica compares a quarter of the weights.
        quarters = [rows[index]["validation/spread"] ** 2 for rows in by_replica]
        assert ours.spread == pytest.approx(statistics.mean(quarters) ** 0.5, rel=1e-3 * rounding)
    sent = [rows[-1]["total/sent_bytes"] for rows in metrics(tmp_path, "step")]
    assert simulated[-1].sent_bytes == max(sent)


def test_the_standard_method_of_muon_rounds_to_bf16(tmp_path: Path) -> None:
    raw = small(tmp_path, 2, 4, {"iters": 1}, **MUON)
    exact, rounded = (
        list(Simulation(RunConfig(**tiny({"optimizer": {"params": {"ns_method": name}}}, raw))).run())
        for name in ("gram", "standard")
    )
    assert rounded != exact
    assert rounded[-1].mean_model_loss == pytest.approx(exact[-1].mean_model_loss, abs=0.01)


def test_coded_exchanges_under_way_at_an_evaluation_are_finished(tmp_path: Path) -> None:
    """For that partners need each other: whoever waits for one alone would wait for ever."""
    noloco = {"fragments": 2, "payload": "int8", "overlap_steps": 1, "deadline_seconds": 20.0}
    raw = small(tmp_path, 4, 4, {"interval": 2, "iters": 1}, noloco=noloco)
    assert [found.step for found in Simulation(RunConfig(**raw)).run()] == [2, 4]


def test_replicas_with_text_of_their_own(tmp_path: Path) -> None:
    """Of equal texts the second half of the replicas reads what the first half reads; losses are of each text."""
    texts = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        texts.append(write_text(tmp_path / name))
    raw = small(tmp_path, 4, 2, {"iters": 2}, noloco={"enabled": False}, simulator={"texts": texts})
    found = study.simulate(raw, tmp_path)
    losses = found["replica_losses"]
    assert losses[:2] == pytest.approx(losses[2:], abs=1e-6)
    assert losses[0] != pytest.approx(losses[1], abs=1e-6)
    for mean, *replicas in found["by_text"].values():
        assert mean == pytest.approx(found["mean_model_loss"], abs=1e-6)
        assert replicas == pytest.approx(losses, abs=1e-6)
    with pytest.raises(ValueError, match="3 texts do not divide the 32 samples"):
        Simulation(RunConfig(**raw), texts=[*texts, texts[0]])


def test_compiled_run_without_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    line = r"^--compiled needs a C\+\+ compiler: there is no no-such-compiler; .*$"
    with pytest.raises(ValueError, match=line):
        Simulation(RunConfig(**small(tmp_path, 2, 2, {"iters": 1})), compiled=True)


def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new simulation continues from the file, to the same bits."""
    monkeypatch.setattr(simulation, "SAVE_SECONDS", 0)
    noloco = {"overlap_steps": 1, "payload": "int8", "local_steps": 2}
    raw = small(tmp_path, 4, 8, {"interval": 2, "iters": 1}, noloco=noloco, **MUON)
    config, saved = RunConfig(**raw), tmp_path / "run.pt"
    whole = list(Simulation(config).run())
    for found in Simulation(config).run(saved):
        if found.step == 4:
            break
    assert saved.exists()
    assert list(Simulation(config).run(saved)) == whole
    assert not saved.exists()


def test_a_study_compares_methods_at_their_best_learning_rates(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    model = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16}
    base = small(tmp_path, 2, 4, {"iters": 1}, optimizer=optimizer, model=model)
    one = ["parallel.replicas=1", "noloco.enabled=false"]
    runs = {"synchronous": [*one, "gradient_accumulation_steps=8"], "alone": one, "NoLoCo": []}
    plan = {"base": base, "seeds": [1, 2], "runs": runs}
    path = tmp_path / "results.jsonl"
    results = study.Runs(plan, path, 1, study.simulate).all()
    for name in runs:
        tried = {key.learning_rate: run for key, run in results.items() if (key.name, key.seed) == (name, 1)}
        best = min(tried, key=lambda rate: tried[rate]["mean_model_loss"])
        assert min(tried) < best < max(tried)
        assert set(tried) <= {0.01 * 2**power for power in range(-20, 20)}
        assert [key.learning_rate for key in results if (key.name, key.seed) == (name, 2)] == [best]
    evidence.write(tmp_path / "evidence.csv", [study.row_of("a", *one) for one in results.items()])
    rows = evidence.read(tmp_path / "evidence.csv")
    for name, method in evidence.methods_of(rows).items():
        found = evidence.found(name, {name: method})
        assert found is not None
        for seed, run in found.best.items():
            key = study.Key(name, run.learning_rate, seed)
            assert run == study.row_of("a", key, results[key])
        assert found.best.keys() == {1, 2}
        assert (found.best[1].sent > 0) == (name == "NoLoCo")

    with path.open("a") as file:
        file.write('{"name": "cut sho')
    lines = path.read_text()
    assert study.Runs(plan, path, 1, study.simulate).all() == results
    assert path.read_text() == lines, "nothing is run again"


@pytest.mark.slow
def test_a_run_of_a_study_by_the_trainer_is_as_simulated(tmp_path: Path) -> None:
    raw = small(tmp_path, 2, 3, {"interval": 2, "iters": 2}, model={"num_layers": 1})
    runs = tmp_path / "runs"
    runs.mkdir()
    trained, simulated = train(raw, runs), asdict(list(Simulation(RunConfig(**raw)).run())[-1])
    assert [step for step, _ in trained.pop("history")] == [2, 3]
    assert trained.keys() == simulated.keys()
    for figure, found in trained.items():
        assert found == pytest.approx(simulated[figure], rel=1e-3), figure
    assert trained["mean_model_loss"] == pytest.approx(simulated["mean_model_loss"], abs=2e-5)
    assert not list(runs.iterdir())
