"""Fine-tuning a Hugging Face folder on conversations: what has a loss is learnt, along routes, and evaluated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_noloco.cli.main import main
from megatron_noloco.data.fast_tokenizer import FastTokenizer
from tests.harness import run_command, run_ranks
from tests.integration.tiny import metrics, run_whole, tiny, write_config
from tests.unit.test_records import CHAT, TEMPLATE, chat_tokenizer

NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
STEPS = 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, a tokenizer and a chat template."""
    folder = chat_tokenizer(tmp_path_factory.mktemp("llama"), TEMPLATE)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=FastTokenizer(folder).vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 replicas of 2 stages, several conversations of unequal length in each sample."""
    folder = tmp_path_factory.mktemp("run")
    records = [
        {
            "messages": [
                {"role": "user", "content": " ".join(NUMBERS[: 1 + place % 8])},
                {"role": "assistant", "content": NUMBERS[1 + place % 8]},
            ]
        }
        for place in range(200)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    changes: dict[str, Any] = {
        "noloco": {"local_steps": 4, "routing": {"interval": "microbatch"}},
        "parallel": {"replicas": 2, "pipeline_model_parallel_size": 2},
        "model": {"seq_length": 128},
        "data": {"text": None, "sft_data_path": str(folder / "chat.jsonl"), "split": "9,1"},
        "training": {"train_iters": STEPS, "output_dir": str(folder / "run")},
        "checkpoint": {"save_interval": STEPS},
        "evaluation": {"full": True, "iters": 1},
    }
    raw = tiny(changes) | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    template = write_config(folder, raw)
    assert main(["import", str(llama), "--config", template, "--output", str(folder / "run.json")]) == 0
    run_ranks(4, run_whole, str(folder / "run.json"))
    return folder / "run"


def test_the_answers_are_learnt(run: Path) -> None:
    for replica in metrics(run):
        losses = [row["train/loss"] for row in replica]
        assert losses[-1] < losses[0] / 2, losses
        assert sum(row["routing/share"] for row in replica) > 0


def test_evaluate_finds_the_loss_per_token_of_the_answers(run: Path) -> None:
    """Not per microbatch: they have unequal numbers of them."""
    lines = run_command("evaluate", str(run))
    found = [float(line.split("loss ")[1].split()[0]) for line in lines]
    (row,) = metrics(run, "evaluation")[0]
    logged = [*row["validation/replica_losses"], row["validation/mean_model_loss"]]
    assert found == pytest.approx(logged, abs=2e-4)


def test_an_export_keeps_the_template(run: Path, llama: Path, tmp_path: Path) -> None:
    run_command("export", str(run), "--output", str(tmp_path / "exported"))
    exported, imported = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "exported", llama))
    assert exported.apply_chat_template(CHAT) == imported.apply_chat_template(CHAT)
