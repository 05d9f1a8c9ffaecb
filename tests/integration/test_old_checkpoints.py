"""Checkpoints of earlier releases are exported; their texts had another order, so their runs do not go on.

`recorded/checkpoint-*.tar.xz` hold a config, its text and the checkpoint after step 4 of 8: two replicas of 2,000
weights, with a round under way (overlap).
"""

import json
import tarfile
from pathlib import Path

import pytest

from tests.harness import call

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("release", ["0.1", "0.2"])
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
