"""The command `tune`, with a program in the trainer's place that computes the loss from the learning rate."""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_noloco.config import RunConfig, load_config
from megatron_noloco.engine.schedules import rates_in
from megatron_noloco.preflight.search import SHORT_RUN_RATE_RATIO, best_factor, bracket
from megatron_noloco.preflight.short_run import shortened
from tests.kit.configs import SMALLEST, edited
from tests.kit.ranks import call_here, output_of

CONFIGS = Path(__file__).parents[2] / "configs"
# The best rate is 0.1; five times as much diverges.
TRAINER = """
import json, math, sys
from pathlib import Path
config = json.loads(Path(sys.argv[1]).read_text())
assert config["evaluation"]["mean_model"] and not config["wandb"]["enabled"]
steps, rate = config["training"]["train_iters"], config["optimizer"]["params"]["lr"]
loss = 1 + math.log(10 * rate) ** 2 if rate < 0.5 else None
folder = Path(config["training"]["output_dir"]) / "replica_00"
folder.mkdir()
row = {"kind": "evaluation", "step": steps, "validation/mean_model_loss": loss}
(folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    raw: dict[str, Any] = SMALLEST | {
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
        "parallel": {"replicas": 1},
        "training": {"train_iters": 1000, "output_dir": f"{tmp_path / 'run'}/"},
    }
    path = tmp_path / "my-run.json"
    path.write_text(json.dumps(raw))
    (tmp_path / "trainer.py").write_text(TRAINER)
    return path


def test_the_block_to_paste_has_the_rate_of_the_files_length(file: Path) -> None:
    shown = output_of("tune", file, "--", sys.executable, file.parent / "trainer.py")
    assert "diverged" in shown
    found = json.loads(shown.splitlines()[-1])["optimizer"]
    assert found["type"] == "AdamW"
    assert found["params"]["lr"] == pytest.approx(0.1 / SHORT_RUN_RATE_RATIO, rel=0.02)
    # What was run is not run again.
    assert output_of("tune", file, "--", "false").splitlines()[-1] == shown.splitlines()[-1]


def test_a_short_run_that_fails_ends_the_search_with_its_log(file: Path) -> None:
    code, _, err = call_here("tune", file, "--", "false")
    assert code == 1
    line = r"a short run has ended before its last local step; see \S+run-tune/\w+/log\.txt\n$"
    assert re.search(line, err)


@pytest.mark.parametrize("name", ["quickstart", "llama_125m_recipe"])
def test_shortened_run_keeps_schedule_shape(name: str) -> None:
    whole = load_config(CONFIGS / f"{name}.json")
    short = shortened(whole, whole.training.train_iters // 4, 2.0)
    of_peak, last = [], []
    for run in (whole, RunConfig(**short.given())):
        steps = run.training.train_iters
        rates = rates_in(run.as_deepspeed()["scheduler"], [1.0], range(1, steps + 1))
        of_peak.append(max(rates, key=lambda step: rates[step]) / steps)
        last.append(rates[steps][0])
    assert of_peak[1] == pytest.approx(of_peak[0], abs=0.05)
    assert last[1] == pytest.approx(last[0], abs=0.01)


@given(
    total=st.integers(3, 200),
    warm_up=st.integers(0, 100),
    decay=st.integers(1, 100),
    steps=st.integers(5, 150),
)
def test_a_sound_wsd_is_sound_in_a_short_run(total: int, warm_up: int, decay: int, steps: int) -> None:
    """Also where it ends before the run does."""
    assume(warm_up + decay <= total)
    params = {"total_num_steps": total, "warmup_num_steps": warm_up, "decay_num_steps": decay}
    scheduler = {"type": "WSD", "params": params}
    whole = RunConfig(**edited({"scheduler": scheduler, "training": {"train_iters": 100}}))
    short = RunConfig(**shortened(whole, steps).given())
    assert short.scheduler is not None
    assert bool(short.scheduler.params.warmup_num_steps) == bool(warm_up)


def test_peaks_of_the_schedule_are_multiplied_too() -> None:
    scheduler = {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 1e-3, "total_num_steps": 10, "warmup_num_steps": 2},
    }
    raw = shortened(RunConfig(**edited({"scheduler": scheduler})), 5, 4.0).given()
    assert raw["scheduler"]["params"]["warmup_max_lr"] == raw["optimizer"]["params"]["lr"] == 4e-3
    assert raw["scheduler"]["params"]["total_num_steps"] == 5


def test_the_best_of_a_parabola_is_found_from_any_start() -> None:
    for start in (0.01, 1.0, 30.0):
        losses = bracket(lambda factor: (math.log(factor) - math.log(0.7)) ** 2, start)
        assert best_factor(losses) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (lambda factor: math.inf, "training diverges at the learning rates of the file, and at 0.000976562 times"),
        (lambda factor: factor, "the loss is best at the lowest .* tried, 0.000976562 times those of the file"),
        (lambda factor: 1.0, "the loss is best at the lowest learning rates that were tried"),
        (lambda factor: -factor, "the loss is best at the highest .* tried, 1024 times those of the file; give"),
    ],
)  # fmt: skip
def test_a_search_without_a_best_rate_ends(loss: Callable[[float], float], line: str) -> None:
    """As where training makes a pretrained model worse, the less the lower the rates."""
    with pytest.raises(ValueError, match=line):
        bracket(loss, 1.0)
