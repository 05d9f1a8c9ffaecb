"""Configs that `convert` writes train: a DeepSpeed JSON, and a script of Megatron-LM, at reduced size."""

import json
import shutil
from pathlib import Path

import pytest

from tests.kit.configs import FILES, SMALLEST
from tests.kit.datasets import write_dataset
from tests.kit.ranks import run_command, run_ranks
from tests.kit.tiny import metrics, run_whole
from tests.kit.tokenizers import make_tokenizer

STEPS = 3


def losses(config: Path, ranks: int, folder: Path) -> list[float]:
    content = json.loads(config.read_text())
    content["training"] |= {"train_iters": STEPS, "log_interval": 1, "output_dir": str(folder / "run")}
    content["checkpoint"] = {"save_interval": 0}
    content["scheduler"]["params"]["total_num_steps"] = 10 * STEPS
    config.write_text(json.dumps(content))
    run_ranks(ranks, run_whole, str(config))
    return [row["train/loss"] for row in metrics(folder / "run", "step")[0]]


def test_a_deepspeed_json_trains(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"A text of number {n}. " * 30 for n in range(60)))
    base = SMALLEST | {"data": {"text": str(tmp_path / "corpus.txt")}, "evaluation": {"iters": 1}}
    (tmp_path / "base.json").write_text(json.dumps(base))
    given = json.loads((FILES / "zero2.json").read_text())
    del given["fp16"]
    given |= {"train_batch_size": 16, "bf16": {"enabled": True}}
    (tmp_path / "ds_config.json").write_text(json.dumps(given))
    output = tmp_path / "run.json"
    run_command(
        *("convert", str(tmp_path / "ds_config.json"), "--config", str(tmp_path / "base.json")),
        *("--output", str(output)),
    )
    found = losses(output, 2, tmp_path)
    assert len(found) == STEPS
    assert found[-1] < found[0]


def test_a_megatron_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(FILES / "llama.sh", tmp_path)
    for folder in ("tokenizer", "data"):
        (tmp_path / folder).mkdir()
    make_tokenizer(tmp_path / "tokenizer")
    documents = [[n % 250 + 2 for n in range(length)] for length in range(40, 140)]
    write_dataset(tmp_path / "data" / "corpus_text_document", documents, vocab_size=300)
    run_command("convert", "llama.sh", "--world-size", "4", "--output", "run.json")
    found = losses(tmp_path / "run.json", 4, tmp_path)
    assert len(found) == STEPS
    assert found[-1] < found[0]
