"""One config under torchrun and DeepSpeed's launcher: the same run. mpirun is in test_launched_runs.py."""

import itertools
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness import free_port, run_launcher, run_ranks, run_torchrun
from tests.integration.tiny import metrics, run_whole, tiny, write_config, write_text

RANKS = 2  # replicas of one stage; test_two_hosts has stages


def run_deepspeed(ranks: int, module: str, args: list[str]) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).parent / "deepspeed"
    if not script.exists() and shutil.which("deepspeed") is None:
        pytest.skip("no deepspeed launcher beside the Python interpreter")
    command = [sys.executable, str(script), "--num_gpus", str(ranks), "--master_port", str(free_port())]
    return run_launcher([*command, "--module", module, *args], 300, {"DS_ACCELERATOR": "cpu"})


def patient(launch: Any) -> Any:
    return partial(launch, timeout=300)  # to import Megatron and DeepSpeed takes a busy machine a minute


LAUNCHERS = {"torchrun": patient(run_torchrun), "deepspeed": run_deepspeed}


def config(folder: Path, launcher: str, text: str) -> dict[str, Any]:
    return tiny(
        {
            "parallel": {"replicas": RANKS},
            "model": {"num_layers": 2},
            "data": {"text": text},
            "training": {"train_iters": 4, "output_dir": str(folder / launcher)},
            "evaluation": {"iters": 1},
        }
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output folder of the run under each launcher, and of one whose ranks are forked."""
    folder = tmp_path_factory.mktemp("launchers")
    text = write_text(folder)
    for name, launch in LAUNCHERS.items():
        path = write_config(folder / name, config(folder, name, text))
        finished = launch(RANKS, "megatron_noloco", ["train", "--config", path, "--progress", "lines"])
        assert finished.returncode == 0, f"{name}\n{finished.stdout}\n{finished.stderr}"
        assert f"started by {name}; exchanges over torch" in finished.stdout
    run_ranks(RANKS, run_whole, write_config(folder / "forked", config(folder, "forked", text)))
    return {name: folder / name for name in (*LAUNCHERS, "forked")}


@pytest.mark.parametrize("other", LAUNCHERS)
def test_same_run_as_of_forked_ranks(runs: dict[str, Path], other: str) -> None:
    for reference, found in zip(metrics(runs["forked"]), metrics(runs[other]), strict=True):
        assert [row["step"] for row in found] == [1, 2, 3, 4]
        for name in ("train/loss", "train/grad_norm", "train/learning_rate"):
            assert [row[name] for row in found] == [row[name] for row in reference], name
        assert [row.get("round/spread") for row in found] == [row.get("round/spread") for row in reference]
    found, reference = (metrics(runs[name], "evaluation") for name in (other, "forked"))
    assert [len(replica) for replica in found] == [1, 1]
    for row in itertools.chain(*found, *reference):
        assert row.pop("time/evaluation_seconds") > 0
    assert found == reference


def test_both_replicas_learned_from_text_of_their_own(runs: dict[str, Path]) -> None:
    first, second = metrics(runs["forked"])
    assert [row["train/loss"] for row in first] != [row["train/loss"] for row in second]
    assert first[-1]["train/loss"] < first[0]["train/loss"]
