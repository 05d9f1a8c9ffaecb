"""`data inspect` and `evaluate` on the command line."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_noloco.data.tokenizer import ByteTokenizer
from tests.kit.chats import CHAT, TEMPLATE, chat_tokenizer, write
from tests.kit.datasets import write_dataset
from tests.kit.ranks import call_here, output_of, refusal_of, run_command
from tests.kit.tokenizers import make_tokenizer


def test_inspect_prints_sizes_and_the_first_documents(tmp_path: Path) -> None:
    texts = ("x" * 70, "two\n", "x" * 28)
    write_dataset(tmp_path / "p", ([*ByteTokenizer().encode(text), 256] for text in texts))
    assert output_of("data", "inspect", tmp_path / "p", "--samples", "2").splitlines() == [
        f"dataset: {tmp_path / 'p'} (0.0 MB, uint16 tokens)",
        "documents: 3, in 3 sequences",
        "tokens: 105",
        "document length: shortest 5, median 29, mean 35.0, longest 71",
        f"document 0: '{'x' * 60}' ...",
        "document 1: 'two\\n'",
    ]
    make_tokenizer(tmp_path)
    shown = output_of("data", "inspect", tmp_path / "p", "--tokenizer-model", tmp_path)
    assert shown.count("document") > 3


def test_inspect_ids_of_another_tokenizer(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "p", [[5, 999]], vocab_size=1000)
    line = "document 0: tokens 5 999 ... (not of this tokenizer: give its own by --tokenizer-model)"
    assert line in output_of("data", "inspect", prefix)


def test_inspect_shows_what_is_learnt_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write(tmp_path / "a.jsonl", {"messages": CHAT[1:]}, {"prompt": "two", "completion": " six"})
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    first, second = output_of("data", "inspect", path, "--tokenizer-model", tokenizer).splitlines()[-2:]
    assert first == (
        "document 0: '<user>two\\n<assistant>' [learnt: 'three four<end>\\n'] '<user>five\\n<assistant>' "
        "[learnt: 'six<end>\\n']"
    )
    assert second == "document 1: 'two' [learnt: ' six<end>']"
    alpaca = {"instruction": "two", "input": "", "output": "six", "text": "all of it"}
    write(tmp_path / "c.jsonl", alpaca)
    shown = output_of("data", "inspect", f"{tmp_path}/c*.jsonl", "--tokenizer-model", tokenizer)
    assert shown.endswith("document 0: '<user>two\\n<assistant>' [learnt: 'six<end>\\n']\n")
    assert output_of(
        "data", "inspect", write(tmp_path / "b.jsonl", {"prompt": "a", "completion": "b"})
    ).endswith("document 0: 'a' [learnt: 'b<|endoftext|>']\n")


def test_inspect_shows_turns_that_are_learnt_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    last_first = (
        "{% if loop.last and message['role'] == 'assistant' %}<last>{% endif %}<{{ message['role'] }}>"
    )
    template = TEMPLATE.replace("<{{ message['role'] }}>", last_first).replace(
        "{% if add_generation_prompt %}", "{% if add_generation_prompt %}<last>"
    )
    path = write(tmp_path / "a.jsonl", {"messages": CHAT[1:]})
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", template)
    *_, one, two, note = output_of("data", "inspect", path, "--tokenizer-model", tokenizer).splitlines()
    assert one == "document 0: '<user>two\\n<last><assistant>' [learnt: 'three four<end>\\n']"
    assert two.startswith(
        "document 0: '<user>two\\n<assistant>three four<end>\\n<user>five\\n<last><assistant>' ["
    )
    assert note.endswith(
        "later turns in samples of their own: 1, since the template writes earlier answers otherwise"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of transformers' own making; its vocabulary is larger than the tokenizer's."""
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


def make_model(folder: Path, model_type: str, **keys: int) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=310,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        initializer_range=0.3,
        **keys,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


class TestEvaluate:
    @pytest.mark.parametrize("keys", [{}, {"sliding_window": 5}], ids=["llama", "mistral with a window"])
    def test_perplexity_is_that_of_transformers(self, keys: dict[str, int], tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = make_model(tmp_path / "model", "mistral" if keys else "llama", **keys)
        text = "two three four Größe 日本語 🙂 five six\n" * 12  # samples cut some of the characters
        (tmp_path / "text.txt").write_text(text)
        line = run_command("evaluate", str(model), "--data", str(tmp_path / "text.txt"))[-1]
        perplexity = float(line.split("perplexity ")[1].split(",")[0])

        theirs = AutoModelForCausalLM.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        losses = []
        for start in range(0, len(ids) - 1, 16):
            piece = ids[start : start + 17]
            with torch.no_grad():
                logits = theirs(piece[None, :-1]).logits[0].double()
            losses.append(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="none"))
        loss = torch.cat(losses).mean()
        assert perplexity == pytest.approx(math.exp(float(loss)), rel=1e-4)
        bits_per_byte = float(line.split("perplexity ")[1].split()[1])
        text_bytes = len(text.encode()) - len(tokenizer.decode(ids[:1]))  # the first token has no loss
        assert bits_per_byte == pytest.approx(
            float(loss) * (len(ids) - 1) / math.log(2) / text_bytes, abs=1e-3
        )
        assert f"({len(ids) - 1} tokens)" in line

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            ("{model}", "a Hugging Face folder has no validation split; give --data"),
            ("{model} --data nowhere", "no file or folder at nowhere"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, model: Path, arguments: str, line: str, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("text")
        assert line in refusal_of("evaluate", *arguments.format(model=model, here=tmp_path).split())


OWN_CODE = {
    "model_type": "own",
    "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
}


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("config.json", {"hidden_size": "x"}, "Field 'hidden_size' expected int, got str"),
        ("config.json", OWN_CODE, "transformers: ValueError: "),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
            "transformers: ValueError: ",
        ),
        ("tokenizer.json", {"added_tokens": "x"}, "transformers: "),
    ],
)
def test_a_folder_that_cannot_generate_is_one_line(
    model: Path, name: str, change: dict[str, Any], line: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "theirs")
    (folder / "own.py").write_text("raise SystemExit")
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    code, out, err = call_here("generate", folder, "--prompt", "two")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(str(folder))
    assert line in err
