"""Fine-tuning a Hugging Face folder on conversations: what has a loss is learnt, along routes, and evaluated."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_noloco.huggingface.folder import ModelFolder
from megatron_noloco.model.families import training_flops
from tests.kit.chats import CHAT, TEMPLATE, stopping_tokenizer
from tests.kit.ranks import run_command, run_ranks
from tests.kit.tiny import metrics, run_whole, tiny, write_config
from tests.kit.tokenizers import tokenizer_at

NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
STEPS = 16
PEAK_TFLOPS = 0.5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def make_llama(folder: Path, initializer_range: float = 0.02) -> Path:
    """A model with random weights, a tokenizer and a chat template that ends answers with a token of its own."""
    stopping_tokenizer(folder, TEMPLATE.replace("<end>", "<stop>"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer_at(folder).vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=initializer_range,
        )
    )
    model.save_pretrained(folder)
    return folder


def fine_tune(llama: Path, folder: Path, records: list[Any], changes: dict[str, Any]) -> Path:
    """2 replicas of 2 stages on random routes, several conversations of unequal length in each sample; the run."""
    (folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    common: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "noloco": {"local_steps": 4, "routing": "microbatch"},
        "parallel": {"replicas": 2, "pipeline_model_parallel_size": 2},
        "model": {"seq_length": 128},
        "data": {"text": None, "sft_data_path": str(folder / "chat.jsonl")},
        "training": {"output_dir": str(folder / "run")},
    }
    template = write_config(folder, tiny(changes, tiny(common)))
    run_command("import", str(llama), "--config", template, "--output", str(folder / "run.json"))
    run_ranks(4, run_whole, str(folder / "run.json"))
    return folder / "run"


def asked(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def run(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [asked(" ".join(NUMBERS[: 1 + place % 8]), NUMBERS[1 + place % 8]) for place in range(200)]
    changes = {
        "data": {"split": "9,1"},
        "training": {"train_iters": STEPS},
        "checkpoint": {"save_interval": STEPS},
        "evaluation": {"full": True, "iters": 1},
    }
    return fine_tune(llama, tmp_path_factory.mktemp("run"), records, changes)


def test_a_resume_needs_no_pretrained_folder(tmp_path: Path) -> None:
    """Nor reads it: weights are those of the checkpoint, the tokenizer is the run's copy."""
    llama = make_llama(tmp_path / "llama")
    records = [asked(" ".join(NUMBERS[:place]), NUMBERS[place]) for place in range(1, 9)] * 4
    run = fine_tune(llama, tmp_path, records, {"data": {"split": "9,1"}, "training": {"train_iters": 4}})
    shutil.rmtree(llama)
    raw = json.loads((tmp_path / "run.json").read_text())
    raw["training"]["train_iters"] = 8
    (tmp_path / "run.json").write_text(json.dumps(raw))
    run_command("config", "--check", str(tmp_path / "run.json"))
    run_ranks(4, run_whole, str(tmp_path / "run.json"))
    assert [[row["step"] for row in replica][-1] for replica in metrics(run)] == [8, 8]


def test_the_answers_are_learnt(run: Path) -> None:
    for replica in metrics(run):
        losses = [row["train/loss"] for row in replica]
        assert losses[-1] < losses[0] / 2, losses
        assert sum(row["routing/share"] for row in replica) > 0


def test_evaluate_finds_the_loss_per_token_of_the_answers(run: Path) -> None:
    """Not per microbatch: they have unequal numbers of them. Equal weights are measured once."""
    lines = run_command("evaluate", str(run))
    found = [float(line.split("loss ")[1].split()[0]) for line in lines]
    (row,) = metrics(run, "evaluation")[0]
    logged = [*row["validation/replica_losses"], row["validation/mean_model_loss"]]
    assert 3 * found == pytest.approx(logged, abs=2e-4)
    (line,) = run_command("evaluate", str(run), "--data", str(run.parent / "chat.jsonl"))
    assert "bits per byte of text (" in line, "other chats are read as the run reads its own"


def test_an_export_keeps_the_template(run: Path, llama: Path, tmp_path: Path) -> None:
    run_command("export", str(run), "--output", str(tmp_path / "exported"))
    (tokens,) = re.findall(
        "tokens of all replicas together: ([0-9]+)", (tmp_path / "exported" / "README.md").read_text()
    )
    assert 0.5 < int(tokens) / (2 * 2 * STEPS * 128) < 1, "padding is left out"
    settings = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    vocabulary = tokenizer_at(llama).vocabulary
    assert settings["eos_token_id"] == [vocabulary["<end>"], vocabulary["<stop>"]]
    exported, imported = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "exported", llama))
    assert exported.apply_chat_template(CHAT) == imported.apply_chat_template(CHAT)


@pytest.fixture(scope="module")
def chats() -> dict[str, str]:
    generator = torch.Generator().manual_seed(0)
    words = [NUMBERS[i] for i in torch.randint(len(NUMBERS), (60,), generator=generator)]
    phrases = [" ".join(words[i : i + 3]) for i in range(0, 60, 3)]
    return dict(zip(phrases[:10], phrases[10:], strict=True))


@pytest.fixture(scope="module")
def by_heart(chats: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that reads each chat in a sample of its own."""
    folder = tmp_path_factory.mktemp("by_heart")
    assert len(chats) == 10
    steps = 80
    changes = {
        "train_micro_batch_size_per_gpu": 2,
        "scheduler": {"params": {"total_num_steps": steps}},
        "model": {"seq_length": 64},
        "data": {"split": "1,0,0", "sft_packing": False},
        "training": {"train_iters": steps, "log_interval": 10, "peak_tflops": PEAK_TFLOPS},
        "checkpoint": {"save_interval": steps},
    }
    model = make_llama(folder / "llama", 0.1)  # learns faster
    return fine_tune(model, folder, [asked(*chat) for chat in chats.items()], changes)


def test_ten_chats_are_learnt_by_heart_and_said_again(
    by_heart: Path, chats: dict[str, str], tmp_path: Path
) -> None:
    """The way of a user: an imported model, fine-tuned, exported, and asked with its template by transformers."""
    assert all(rows[-1]["train/loss"] < 0.1 for rows in metrics(by_heart)), (
        "prompts, which nobody could learn, have none"
    )
    run_command("export", str(by_heart), "--output", str(tmp_path / "exported"))
    assert run_ranks(1, answers, tmp_path / "exported", list(chats))[0] == list(chats.values())


def test_padding_counts_in_no_speed(by_heart: Path, chats: dict[str, str]) -> None:
    llama = by_heart.parent / "llama"
    template = AutoTokenizer.from_pretrained(llama).apply_chat_template
    lengths = [len(template(asked(*chat)["messages"])["input_ids"]) - 1 for chat in chats.items()]
    tokens = 4 * sum(lengths) / len(lengths)  # of 4 samples; the last token of a chat is a label only
    assert max(lengths) < 64, "each sample is padded"
    flops = training_flops(replace(ModelFolder(llama).architecture, seq_length=64)) / 64  # of a token
    for row in metrics(by_heart)[0]:
        seconds = row["speed/seconds_per_step"]
        assert seconds * row["speed/tokens_per_second"] == pytest.approx(tokens, rel=0.005)
        work = 1e12 * PEAK_TFLOPS * seconds * row["speed/mfu"]  # of each of 2 stages
        assert 2 * work == pytest.approx(tokens * flops, rel=0.005)


def answers(rank: int, world_size: int, folder: Path, questions: list[str]) -> list[str]:
    """What the model says to each question, without its end, which it must reach."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            asked(question, "")["messages"][:1],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        said = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].size(1) :]
        assert said[-1] == tokenizer.convert_tokens_to_ids("<stop>")
        found.append(tokenizer.decode(said, skip_special_tokens=True))
    return found
