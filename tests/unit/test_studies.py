"""The files of tools/studies: a mistake in one would show after hours."""

import copy
import json
from pathlib import Path

import pytest

from megatron_noloco.config import RunConfig
from tools.simulator.own import take_own
from tools.simulator.report import BASELINES, Key, baseline
from tools.study import Runs, configure, digest

FILES = sorted((Path(__file__).parents[2] / "tools" / "studies").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_runs_are_valid_different_and_comparable(file: Path) -> None:
    study = json.loads(file.read_text())
    configurations = {name: configure(study, name) for name in study["runs"]}
    for configuration in copy.deepcopy(configurations).values():
        take_own(configuration)
        RunConfig.from_dict(configuration)
    # One replica alone is the same beside any number of others.
    others = [raw for name, raw in configurations.items() if not name.startswith("alone")]
    different = [json.dumps(raw, sort_keys=True) for raw in others]
    assert len(set(different)) == len(different)
    if "target" not in study:  # a loss to reach, without a comparison at the end
        needed = {baseline(name, method) for name in BASELINES for method in study["runs"]}
        assert needed <= study["runs"].keys()


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    study = {
        "base": {"training": {}, "optimizer": {"params": {"lr": 1.0}}},
        "seeds": [1],
        "runs": {"one": []},
    }
    path = tmp_path / "results.jsonl"
    same = digest(configure(study, "one", 1.0, 1))
    row = {"name": "one", "learning_rate": 1.0, "seed": 1, "mean_model_loss": 2.0, "json": same}
    path.write_text(json.dumps(row) + "\n")
    runs = Runs(study | {"tune": False}, path, 1, lambda raw, folder: {})
    assert list(runs.all()) == [Key("one", 1.0, 1)]
    changed = study | {"tune": False, "runs": {"one": ["training.train_iters=3"]}}
    with pytest.raises(
        ValueError, match=r"Key\(name='one'.* is there of other settings; give another --output"
    ):
        Runs(changed, path, 1, lambda raw, folder: {}).all()
