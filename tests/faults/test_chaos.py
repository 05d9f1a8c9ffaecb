"""A rank is killed during a save; the next start loses nothing but the steps since the last complete one.

The number in a test's name is the seed of the rank and the moment. For more of them: `pytest -m slow`.
test_launched_runs.py kills runs under each launcher.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.checkpoint import catalog
from tests.kit.disturbed import Death, Run, assert_same_state
from tests.kit.ranks import slow
from tests.kit.tiny import write_text

STEPS, RANKS = 20, 4
CHANGES: dict[str, Any] = {
    "parallel": {"replicas": 2, "pipeline_model_parallel_size": 2},
    "noloco": {"local_steps": 4, "routing": "microbatch"},
    "model": {"hidden_dropout": 0.1},
    "training": {"train_iters": STEPS},
    "checkpoint": {"save_interval": 5},
}
TOUCHES_OF_A_SAVE = 18  # about: files and folders that one rank opens, makes and renames
SAVE_MILLISECONDS = 40.0  # about


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Run(folder / "run", CHANGES, write_text(folder, 200_000))
    run.launch(RANKS)
    return run


@pytest.mark.parametrize("seed", [*range(2), *map(slow, range(100, 120))])
def test_killed_during_a_save(seed: int, undisturbed: Run, tmp_path: Path) -> None:
    draw = random.Random(seed)
    death = Death(
        rank=draw.randrange(RANKS),
        touch=draw.randint(1, 3 * TOUCHES_OF_A_SAVE),
        milliseconds=draw.choice([0.0, draw.uniform(0, SAVE_MILLISECONDS)]),
    )
    run = undisturbed.clean(tmp_path)
    run.launch_to_die(RANKS, [death])
    whole = [path for path in catalog.steps(run.checkpoints) if catalog.is_complete(path)]
    (first, *_) = run.launch(RANKS)
    continued = [line for line in first.out.splitlines() if line.startswith("continuing from ")]
    assert [line.split(":")[0] for line in continued] == [f"continuing from {path}" for path in whole[:1]], (
        death
    )
    assert_same_state(run.step_folder(STEPS), undisturbed.step_folder(STEPS))
    assert run.exact_metrics() == undisturbed.exact_metrics()
