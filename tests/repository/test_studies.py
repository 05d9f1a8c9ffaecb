"""The files of tools/studies: a mistake in one would show after hours."""

import copy
import json
import sys
from pathlib import Path

import pytest

from megatron_noloco.config import RunConfig
from tools import study
from tools.evidence import BASELINES, baseline
from tools.options import configure
from tools.study import Key, Runs, digest

FILES = sorted((Path(__file__).parents[2] / "tools" / "studies").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_runs_are_valid_different_and_comparable(file: Path) -> None:
    plan = json.loads(file.read_text())
    configurations = {name: configure(plan, name) for name in plan["runs"]}
    for configuration in copy.deepcopy(configurations).values():
        configuration.pop("simulator", None)
        RunConfig(**configuration)
    # One replica alone is the same beside any number of others.
    others = [raw for name, raw in configurations.items() if not name.startswith("alone")]
    different = [json.dumps(raw, sort_keys=True) for raw in others]
    assert len(set(different)) == len(different)
    if "target" not in plan:  # a loss to reach, without a comparison at the end
        needed = {baseline(name, method) for name in BASELINES for method in plan["runs"]}
        assert needed <= plan["runs"].keys()


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    plan = {"base": {"training": {}, "optimizer": {"params": {"lr": 1.0}}}, "seeds": [1], "runs": {"one": []}}
    path = tmp_path / "results.jsonl"
    same = digest(configure(plan, "one", 1.0, 1))
    row = {"name": "one", "learning_rate": 1.0, "seed": 1, "json": same}
    row |= {"mean_model_loss": 2.0, "replica_losses": [2.0], "sent_bytes": 0}
    path.write_text(json.dumps(row) + "\n")
    runs = Runs(plan | {"tune": False}, path, 1, lambda raw, folder: {})
    assert list(runs.all()) == [Key("one", 1.0, 1)]
    changed = plan | {"tune": False, "runs": {"one": ["training.train_iters=3"]}}
    line = r"Key\(name='one'.* is there of other settings; give another --output"
    with pytest.raises(ValueError, match=line):
        Runs(changed, path, 1, lambda raw, folder: {}).all()


def test_impossible_run_is_refused_before_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the command line; the last run has the mistake."""
    raw = json.loads(FILES[0].read_text())["base"]
    runs = {"one": [], "alone": [], "synchronous": ["noloco.local_steps=9999"]}
    (tmp_path / "study.json").write_text(json.dumps({"base": raw, "seeds": [1], "runs": runs}))
    command = ["study", str(tmp_path / "study.json"), "--output", str(tmp_path / "output"), "--trainer"]
    monkeypatch.setattr(sys, "argv", command)
    line = r"^study: noloco\.local_steps 9999 is more than training\.train_iters"
    with pytest.raises(SystemExit, match=line):
        study.main()
