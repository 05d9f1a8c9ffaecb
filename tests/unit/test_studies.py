"""The files of tools/studies: a mistake in one would show after hours."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.config import RunConfig
from megatron_noloco.errors import UserError
from tools import study
from tools.evidence import BASELINES, baseline
from tools.options import configure
from tools.study import Key, Runs, Train, digest

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


def refuse(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    raise UserError("a: must be 1\nb: must be 2")


def fail(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    raise ValueError("too many values to unpack (expected 2)")


def run_study(run: Train, folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: str) -> None:
    """As on the command line, each run in a process of its own; the last run has the changes."""
    raw = json.loads(FILES[0].read_text())["base"]
    runs = {"one": [], "alone": [], "synchronous": list(changes)}
    (folder / "study.json").write_text(json.dumps({"base": raw, "seeds": [1], "runs": runs}))
    monkeypatch.setattr(study, "train", run)
    monkeypatch.setattr(
        sys, "argv", ["study", str(folder / "study.json"), "--output", str(folder / "output"), "--trainer"]
    )
    study.main()


def test_user_mistake_has_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^study: a: must be 1\nb: must be 2$"):
        run_study(refuse, tmp_path, monkeypatch)


def test_impossible_run_is_refused_before_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = r"^study: noloco\.local_steps 9999 is more than training\.train_iters"
    with pytest.raises(SystemExit, match=line):
        run_study(fail, tmp_path, monkeypatch, "noloco.local_steps=9999")


def test_a_fault_of_the_program_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="too many values to unpack"):
        run_study(fail, tmp_path, monkeypatch)
