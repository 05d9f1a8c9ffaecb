"""The files of tools/studies: a mistake in one would show after hours."""

import json
from pathlib import Path

import pytest

from megatron_noloco.config import RunConfig
from tools.simulator.report import BASELINES, baseline
from tools.study import configure

FILES = sorted((Path(__file__).parents[2] / "tools" / "studies").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_run_has_a_valid_configuration(file: Path) -> None:
    study = json.loads(file.read_text())
    for name in study["runs"]:
        RunConfig.from_dict(configure(study, name))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_method_can_be_compared(file: Path) -> None:
    study = json.loads(file.read_text())
    if "target" in study:  # of a loss that is to be reached, not compared at the end
        return
    for method in study["runs"]:
        assert {baseline(name, method) for name in BASELINES} <= study["runs"].keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_run_is_in_a_study_twice(file: Path) -> None:
    """But one replica alone may be, which is the same beside any number of others."""
    study = json.loads(file.read_text())
    names = [name for name in study["runs"] if not name.startswith("alone")]
    configurations = [json.dumps(configure(study, name), sort_keys=True) for name in names]
    assert len(set(configurations)) == len(configurations)
