"""Checkpoints of earlier releases: this version continues the runs as those releases did, and exports them.

`recorded/checkpoint-*.tar.xz` hold a config, its text and the checkpoint after step 4 of 8: two replicas of 2,000
weights, with a round under way (overlap). `LOSSES` are those of steps 5 to 8 of replica 0 as the releases went on.
"""

import json
import tarfile
from pathlib import Path

import pytest

from megatron_noloco.config.saved import upgrade_saved_config
from tests.harness import call, run_ranks
from tests.integration.tiny import metrics, run_whole

RECORDED = Path(__file__).parent / "recorded"
LOSSES = {
    "0.1": [5.509329557418823, 5.492835998535156, 5.475536346435547, 5.46737003326416],
    "0.2": [5.509329557418823, 5.492835998535156, 5.475536346435547, 5.467369794845581],
}


@pytest.mark.parametrize("release", LOSSES)
def test_a_run_of_an_earlier_release_goes_on_as_it_would_have(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = unpack(release, tmp_path)
    config.write_text(json.dumps(upgrade_saved_config(json.loads(config.read_text()))))
    monkeypatch.chdir(config.parent)  # 0.1 compared the path of the text, not the text
    run_ranks(2, run_whole, config.name)
    steps = metrics(config.parent / f"run-{release}")[0]
    assert [row["step"] for row in steps] == [5, 6, 7, 8]
    assert [row["origin/loss of 0"] for row in steps] == pytest.approx(LOSSES[release], abs=1e-5)


@pytest.mark.parametrize("release", LOSSES)
def test_a_checkpoint_of_an_earlier_release_is_exported(release: str, tmp_path: Path) -> None:
    config, folder = unpack(release, tmp_path), tmp_path / "exported"
    step = config.parent / f"run-{release}" / "checkpoints" / "step_00000004"
    assert call("export", str(step), "--output", str(folder))[0] == 0
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 4


def unpack(release: str, folder: Path) -> Path:
    """Lay out the run of a release; return its config, beside which its text and its output folder lie."""
    with tarfile.open(RECORDED / f"checkpoint-{release}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    config = folder / f"checkpoint-{release}" / "config.json"
    checkpoints = config.parent / f"run-{release}" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (config.parent / "step_00000004").rename(checkpoints / "step_00000004")
    return config
