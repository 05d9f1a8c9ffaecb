"""A run on a blend, documents told apart: `evaluate` finds what it logged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_noloco.checkpoint import catalog
from tests.kit.configs import SMALLEST
from tests.kit.datasets import write_dataset
from tests.kit.ranks import run_command, run_ranks
from tests.kit.tiny import metrics, run_whole
from tests.kit.tokenizers import make_tokenizer, tokenizer_at

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas, trained on two datasets of a Hugging Face tokenizer; the last step is a round."""
    folder = tmp_path_factory.mktemp("blend")
    make_tokenizer(folder)
    end = tokenizer_at(folder).end_of_document
    draw = np.random.default_rng(0)
    for name in "ab":
        documents = [np.append(draw.integers(0, 270, draw.integers(5, 40)), end) for _ in range(100)]
        write_dataset(folder / name, documents, vocab_size=300)
    config = SMALLEST | {
        "parallel": {"replicas": 2},
        "model": SMALLEST["model"] | {"num_query_groups": 2},
        "data": {
            "data_path": ["0.25", str(folder / "a"), "0.75", str(folder / "b")],
            "split": "8,1,1",
            "reset_attention_mask": True,
            "eod_mask_loss": True,
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(folder),
        },
        "training": {"train_iters": STEPS, "log_interval": 2, "output_dir": str(folder / "run")},
        "checkpoint": {"save_interval": STEPS},
        "evaluation": {"iters": 4},
    }
    (folder / "run.json").write_text(json.dumps(config))
    run_ranks(2, run_whole, str(folder / "run.json"))
    return folder / "run"


def datasets(row: dict[str, Any]) -> list[str]:
    before = "validation/replica_losses of "
    return [name.removeprefix(before) for name in row if name.startswith(before)]


def test_the_wait_for_data_is_written_down(run: Path) -> None:
    for row in metrics(run, "step")[0]:
        assert 0 <= row["data/wait_seconds"] < row["speed/seconds_per_step"]


def test_evaluation_is_per_dataset_and_in_the_blends_proportions(run: Path) -> None:
    (row,) = metrics(run, "evaluation")[0]
    first, second = (row[f"validation/replica_losses of {name}"] for name in datasets(row))
    assert first != second
    for replica in range(2):
        parts = (first[replica], second[replica])
        expected = sum(weight * loss for weight, loss in zip((0.25, 0.75), parts, strict=True))
        assert row["validation/replica_losses"][replica] == pytest.approx(expected, rel=1e-6)


def test_evaluate_equals_log_with_copied_tokenizer(run: Path) -> None:
    (manifest, *_) = catalog.read_manifests(catalog.step_folder(run / "checkpoints", STEPS))
    assert manifest.tokenizer["digest"] == tokenizer_at(run / "tokenizer").digest
    (run.parent / "tokenizer.json").unlink(missing_ok=True)  # the original
    (run / "config.json").write_text("{}")  # a run's own, say: it does not make a Hugging Face folder
    lines = run_command("evaluate", str(run), "--samples", "8")
    found = [float(line.split("loss ")[1].split()[0]) for line in lines if " on the blend of " not in line]
    means = [float(line.split("loss ")[1].split()[0]) for line in lines if " on the blend of " in line]
    (row,) = metrics(run, "evaluation")[0]
    logged_means = [*row["validation/replica_losses"], row["validation/mean_model_loss"]]
    assert 3 * means == pytest.approx(logged_means, abs=2e-4)
    logged = [
        losses[model]
        for model in range(3)
        for losses in (
            (*row[f"validation/replica_losses of {name}"], row[f"validation/mean_model_loss of {name}"])
            for name in datasets(row)
        )
    ]
    start = "each of 2 replicas (equal weights) on the validation split"
    assert all(line.startswith(start) for line in lines if " on the blend of " not in line)
    assert 3 * found == pytest.approx(logged, abs=2e-4)
