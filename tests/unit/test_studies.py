"""The files of tools/studies: a mistake in one would show after hours."""

import copy
import json
from pathlib import Path

import pytest

from megatron_noloco.config import RunConfig
from tools.simulator.own import take_own
from tools.simulator.report import BASELINES, baseline
from tools.study import configure

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
