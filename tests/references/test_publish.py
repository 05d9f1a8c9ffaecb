"""Export, import and generate: the model that leaves is the trained one, and the way back loses nothing."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_noloco.huggingface import export
from tests.kit.checkpoints import flip_a_bit
from tests.kit.golden import check
from tests.kit.hf_folders import change_weights
from tests.kit.models import assert_equal, exported, imported, load, logits_there, save
from tests.kit.ranks import call, refusal_of, run_ranks
from tests.kit.tiny import (
    FAMILY_MODELS,
    HF_SIZES,
    MUON,
    run_whole,
    sizes,
    tiny,
)

STEPS = 2
LOUD = {"init_method_std": 0.2}  # attention that matters: with small weights a wrong one would hardly show


# The exported model is the trained one

BF16 = {"bf16": {"enabled": True}}
TIED = {"untie_embeddings_and_output_weights": False}


# Models of other families on several ranks, tied, are in test_families.py.
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "virtual stages": (sizes(pp=2, vpp=2), {}),
    "one key/value head": (sizes(pp=2), {"model": {"num_query_groups": 1}}),
    "a key/value head per query": (sizes(tp=2), {"model": {"num_query_groups": None}}),
    "wide heads": ({}, {"model": {"kv_channels": 16, "rotary_base": 5e5, "norm_epsilon": 1e-3}}),
    "bf16, tied, dp 2": (sizes(dp=2), BF16 | {"model": TIED}),
    "Muon, dp 3, whose flat weights are padded": (
        sizes(dp=3),
        MUON | {"model": {"num_layers": 2, "num_query_groups": 4}},
    ),
    "experts, dp 2 x ep 2": (sizes(dp=2, ep=2), {"model": FAMILY_MODELS["mixtral"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_exported_model_gives_the_trainers_logits(case: str, tmp_path: Path) -> None:
    parallel, changes = CASES[case]
    model = {"parallel": parallel, "model": LOUD | changes.get("model", {})}
    raw = tiny({**changes, **model, "training": {"output_dir": str(tmp_path / "run")}})
    world_size = math.prod(size for name, size in parallel.items() if name in sizes(pp=2, tp=2, dp=2))
    ranks = run_ranks(world_size, save, raw, STEPS)
    expected = next(rank["logits"] for rank in ranks if rank["logits"] is not None)
    dtype = "bfloat16" if "bf16" in changes else "float32"  # the working weights are the master's, rounded
    output = tmp_path / "hf"
    _, out = exported(tmp_path / "run", output, "--dtype", dtype)
    assert "logits: largest difference" in out
    assert not (output / export.UNCHECKED).exists()
    assert float(expected.std()) > 0.1, "logits that say nothing compare nothing"
    assert float((logits_there(output) - expected).abs().max()) < export.TOLERANCE


# The check can fail


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of three replicas that went apart, two stages each; replica 0 diverged in its evaluation."""
    folder = tmp_path_factory.mktemp("replicas")
    blocks = {"noloco": {"enabled": False}, "training": {"output_dir": str(folder)}}
    raw = tiny({"parallel": sizes(pp=2), "model": LOUD, **blocks})
    return folder, run_ranks(6, save, raw, STEPS, [None, 1.5, 2.0])


Q = "model.layers.3.self_attn.q_proj.weight"
WRONG = {
    "the wrong rotary convention": change_weights(
        lambda w: w.update({Q: w[Q].view(4, 2, 4, 32).transpose(1, 2).reshape(32, 32)})
    ),
    "not a number": change_weights(lambda w: w.update({Q: w[Q] * math.nan})),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_export_is_found_and_stays_unchecked(wrong: str, replicas: Any, tmp_path: Path) -> None:
    output = tmp_path / "hf"
    write = export.export

    def export_wrongly(*arguments: Any) -> Path:
        unchecked = write(*arguments)
        WRONG[wrong](unchecked)
        return unchecked

    def meanwhile() -> None:
        export.export = export_wrongly

    code, out, err = call("export", str(replicas[0]), "--output", str(output), meanwhile=meanwhile)
    assert code == 1
    assert f"{output}/unchecked: the exported model differs" in err
    assert [path.name for path in output.iterdir()] == [export.UNCHECKED]
    assert not float(out.split("trainer's own ")[1].split()[0]) < export.TOLERANCE
    exported(replicas[0], output)  # an unchecked export is written over


# Which weights


def test_the_mean_is_that_of_the_replicas(replicas: Any, tmp_path: Path) -> None:
    folder, ranks = replicas
    single = [
        exported(folder, tmp_path / f"{replica}", "--combine", f"replica={replica}")[0]
        for replica in range(3)
    ]
    for replica, weights in enumerate(single):
        own = ranks[2 * replica]["weights"]["embedding.word_embeddings.weight"][:257]
        assert torch.equal(weights["model.embed_tokens.weight"], own)
    mean, out = exported(folder, tmp_path / "mean")
    expected = {
        name: torch.from_numpy(np.mean([weights[name].numpy() for weights in single], axis=0))
        for name in mean
    }
    assert_equal(mean, expected)
    assert not torch.equal(mean[Q], single[0][Q])
    lines = out.splitlines()
    assert "replica 1: validation loss 1.5000 in the last evaluation" in lines
    assert "mean model: validation loss 1.2500 (at step 2)" in lines
    card = (tmp_path / "mean" / "README.md").read_text()
    for words in ("mean of 3 replicas", "local steps: 2", "loss 2.0000"):
        assert words in card
    assert '"/' not in card, "no path of this machine"


def test_best_is_the_lowest_recorded_loss(replicas: Any, tmp_path: Path) -> None:
    best, _ = exported(replicas[0], tmp_path / "best", "--combine", "best")
    assert_equal(best, exported(replicas[0], tmp_path / "1", "--combine", "replica=1")[0])
    assert "replica 1 of 3" in (tmp_path / "best" / "README.md").read_text()


def test_weights_in_several_files(replicas: Any, tmp_path: Path) -> None:
    whole, _ = exported(replicas[0], tmp_path / "whole")
    output = tmp_path / "files"
    in_files, _ = exported(replicas[0], output, "--max-shard-size", "20KB")
    files = sorted(output.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 20_000 + 2_000 or len(load_file(file)) == 1 for file in files)
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert_equal(in_files, whole)
    torch.testing.assert_close(logits_there(output), logits_there(tmp_path / "whole"), rtol=0, atol=0)


def test_what_only_a_resume_needs_is_not_needed(replicas: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(replicas[0], tmp_path / "run")
    for file in copy.glob("checkpoints/*/*/resume_*"):
        file.unlink()
    weights, _ = exported(copy, tmp_path / "hf")
    assert_equal(weights, exported(replicas[0], tmp_path / "whole")[0])


# What is refused: one line, exit code 2


def damage(run: Path) -> None:
    flip_a_bit(next(run.glob("checkpoints/*/replica_01/stage_01*.safetensors")))


def forget_losses(run: Path) -> None:
    for path in run.glob("checkpoints/*/replica_*/stage_01*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"counters": {}}))


def put_a_file(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text("mine")


def put_a_folder_in_the_way(run: Path) -> None:
    (run / "hf").mkdir()
    (run / "hf" / "thesis.tex").write_text("mine")


REFUSED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "damaged": (damage, ()),
    "unknown way": (lambda _: None, ("--combine", "median")),
    "a replica that is not there": (lambda _: None, ("--combine", "replica=9")),
    "best of unknown": (forget_losses, ("--combine", "best")),
    "no folder": (put_a_file("file"), ("--output", "RUN/file/hf")),
    "a folder in the way": (put_a_folder_in_the_way, ()),
}


def test_an_export_that_cannot_be_made_is_one_line(replicas: Any, tmp_path: Path) -> None:
    """In tests/golden/export_lines.txt."""

    def cases() -> Iterator[tuple[str, str]]:
        for what, (spoil, options) in REFUSED.items():
            run = shutil.copytree(replicas[0], tmp_path / what)
            spoil(run)
            given = [option.replace("RUN", str(run)) for option in options]
            said = refusal_of("export", run, "--output", run / "hf", *given)
            assert not (run / "hf" / "model.safetensors").exists()
            yield " ".join([what, *options]), said.replace(str(run), "RUN")

    check("export_lines", cases())


# A Hugging Face Llama comes in and goes out again


def llama(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Tensor]:
    """A random one, saved by transformers; its tensors."""
    keys: dict[str, Any] = {"vocab_size": 257, **HF_SIZES, **changes}
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**keys)).to(dtype)
    model.save_pretrained(folder, max_shard_size="50KB")
    return load(folder)


def test_bf16_weights_come_back_unchanged(tmp_path: Path) -> None:
    """From a training in fp32; test_families.py has those in fp32 of all families."""
    theirs = llama(tmp_path / "llama", torch.bfloat16, rope_theta=5e5)
    common = {"parallel": sizes(tp=2), "training": {"output_dir": str(tmp_path / "run")}}
    run_ranks(2, save, imported(tmp_path, tmp_path / "llama", common), 0)
    assert_equal(exported(tmp_path / "run", tmp_path / "hf", "--dtype", "bfloat16")[0], theirs)


@pytest.mark.parametrize("parallel", [sizes(tp=2), sizes(dp=2)])
def test_fp32_weights_become_the_master_weights(parallel: dict[str, int], tmp_path: Path) -> None:
    """Of a run in bf16, too: a step that changes nothing returns the folder's weights bit for bit."""
    theirs = llama(tmp_path / "llama")
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 200)
    changes = BF16 | {
        "noloco": {"enabled": False},
        "data": {"text": str(tmp_path / "text.txt")},
        "evaluation": {"iters": 0},
        "optimizer": {
            "type": "SGD",
            "params": {"lr": 1e-30, "betas": None, "eps": None, "weight_decay": None},
        },
        "parallel": parallel,
        "training": {"output_dir": str(tmp_path / "run"), "train_iters": 1},
    }
    imported(tmp_path, tmp_path / "llama", changes)
    run_ranks(2, run_whole, str(tmp_path / "imported.json"))
    back, _ = exported(tmp_path / "run", tmp_path / "hf")
    assert_equal(back, theirs)


# Talking to the result


def test_generate_continues_a_prompt_until_the_context_is_full(tmp_path: Path) -> None:
    """From a folder and from a checkpoint; with a vocabulary larger than the tokenizer's some ids have no text."""
    llama(tmp_path / "llama", vocab_size=1000, initializer_range=0.5)
    raw = imported(tmp_path, tmp_path / "llama", {"training": {"output_dir": str(tmp_path / "run")}})
    run_ranks(1, save, raw, 0)
    hf = tmp_path / "hf"
    exported(tmp_path / "run", hf)
    assert AutoTokenizer.from_pretrained(hf).decode([65, 999, 66]) == "AB"

    def generate(*options: str, of: Path = hf) -> tuple[int, str, str]:
        return call("generate", str(of), "--prompt", "é, ", "--tokens", "40", *options)

    code, text, err = generate("--temperature", "0")
    assert (code, err) == (0, "")
    assert text.startswith("é, ")
    assert len(text) > 5
    assert generate("--tokens", "12", "--temperature", "0")[1:] == (text, ""), "the context has 16 tokens"
    assert generate("--temperature", "0", "--seed", "1")[1] == text
    assert generate("--temperature", "0", of=tmp_path / "run")[1] == text
    drawn = [generate("--seed", seed)[1] for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]
    code, text, err = generate("--prompt", "")
    assert code == 0, err
    assert text.strip(), "a document begins"
    code, _, err = generate("--temperature", "1e-60")
    assert (code, len(err.splitlines())) == (2, 1)
