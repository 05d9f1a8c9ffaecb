"""Every family is, there and back, the model that transformers has, and trains like it."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_noloco.config import RunConfig
from megatron_noloco.huggingface import export
from megatron_noloco.huggingface.folder import ModelFolder
from megatron_noloco.model.families import FAMILIES
from megatron_noloco.plans.topology import Topology
from tests.kit.models import assert_equal, exported, imported, load, logits_there, save
from tests.kit.ranks import run_ranks
from tests.kit.tiny import FAMILY_MODELS, HF_SIZES, MIXTURES, microbatch, train


def llama3(factor: float) -> dict[str, Any]:
    """Rotary embeddings as in Llama 3.1 and later."""
    return {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def yarn(factor: float) -> dict[str, Any]:
    """A context of so many tokens before that frequencies are scaled wholly, in part, and not at all."""
    return {"rope_type": "yarn", "rope_theta": 1e3, "factor": factor, "original_max_position_embeddings": 64}


# Keys of a config.json of transformers' own, of models that stand for a family
THEIRS: dict[str, dict[str, Any]] = {
    "Llama 1, 2": {"model_type": "llama", "rms_norm_eps": 1e-4},
    "Llama 3": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "Llama 3.1": {"model_type": "llama", "max_position_embeddings": 16384, "rope_parameters": llama3(8.0)},
    "Llama 3.2": {"model_type": "llama", "max_position_embeddings": 16384, "rope_parameters": llama3(32.0)},
    "Llama with YaRN": {"model_type": "llama", "rope_parameters": yarn(16.0)},
    "Qwen2, Qwen2.5": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 5},
    "Qwen2.5 with YaRN": {"model_type": "qwen2", "rope_parameters": yarn(4.0)},
    "Qwen3": {"model_type": "qwen3", "head_dim": 12},
    "Qwen3 with YaRN": {"model_type": "qwen3", "head_dim": 12, "rope_parameters": yarn(4.0)},
    "Mistral": {"model_type": "mistral", "sliding_window": None},
    "Mistral with a window": {"model_type": "mistral", "sliding_window": 5},
    "Mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3-MoE": {
        "model_type": "qwen3_moe",
        "head_dim": 12,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "StarCoder2": {"model_type": "starcoder2", "norm_epsilon": 1e-4},
    "StarCoder2 with a window": {"model_type": "starcoder2", "sliding_window": 5},
}
PARALLEL = {
    f"{'tied' if tied else 'untied'}, pp {pp}, tp {tp}": (
        tied,
        {"pipeline_model_parallel_size": pp, "tensor_model_parallel_size": tp},
    )
    for tied in (False, True)
    for pp in (1, 2)
    for tp in (1, 2)
}
QUICK = "tied, pp 2, tp 2"


def write_theirs(folder: Path, keys: dict[str, Any]) -> dict[str, Tensor]:
    """A model that transformers made and saved, every weight of it drawn at random; its tensors."""
    sizes = {"vocab_size": 259, **HF_SIZES}
    settings = sizes | keys
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.2, generator=generator)
    model.save_pretrained(folder, max_shard_size="50KB")
    return load(folder)


def test_there_is_a_model_of_every_family() -> None:
    assert {keys["model_type"] for keys in THEIRS.values()} == set(FAMILIES)
    assert {model["family"] for model in FAMILY_MODELS.values()} == set(FAMILIES)


def sequence_parallel(family: str, sizes: dict[str, int]) -> dict[str, bool]:
    """Core trains experts on several tensor-parallel ranks no other way."""
    needed = family in MIXTURES and sizes.get("tensor_model_parallel_size", 1) > 1
    return {"sequence_parallel": True} if needed else {}


# In the default run there is another of their kind: test_publish.py, Llama 3.2, and Qwen3 with YaRN.
BY_HAND = ("Llama 1, 2", "Llama 3", "Llama 3.1", "Llama with YaRN", "Qwen2.5 with YaRN")
CASES = [
    pytest.param(model, name, marks=[] if name == QUICK and model not in BY_HAND else [pytest.mark.slow])
    for model in THEIRS
    for name in PARALLEL
]


@pytest.fixture(scope="module")
def differences(pytestconfig: pytest.Config) -> Iterator[dict[str, list[float]]]:
    """Of logits, in fp32, by model; the largest are shown in the end, and are in docs/huggingface.md."""
    found: dict[str, list[float]] = defaultdict(list)
    yield found
    plugins = pytestconfig.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        for model, values in found.items():
            line = f"{model}: largest difference of logits {max(values):.1e}, {len(values)} layouts"
            plugins.get_plugin("terminalreporter").write_line("\n" + line)


@pytest.mark.parametrize(("model", "parallel"), CASES)
def test_transformers_model_round_trips_with_equal_logits(
    model: str, parallel: str, tmp_path: Path, differences: dict[str, list[float]]
) -> None:
    tied, sizes = PARALLEL[parallel]
    ranks_needed = math.prod(sizes.values())
    sizes = sizes | sequence_parallel(THEIRS[model]["model_type"], sizes)
    theirs = write_theirs(tmp_path / "theirs", THEIRS[model] | {"tie_word_embeddings": tied})
    changes = {"parallel": sizes, "training": {"output_dir": str(tmp_path / "run")}}
    raw = imported(tmp_path, tmp_path / "theirs", changes)
    ranks = run_ranks(ranks_needed, save, raw, 0)
    ours = next(rank["logits"] for rank in ranks if rank["logits"] is not None)
    expected = logits_there(tmp_path / "theirs")[..., : ours.size(-1)]
    assert float(expected.std()) > 0.1, "logits that say nothing compare nothing"
    difference = float((ours - expected).abs().max())
    assert difference < export.TOLERANCE
    differences[model].append(difference)
    back, out = exported(tmp_path / "run", tmp_path / "hf")
    assert "logits: largest difference" in out
    assert_equal(back, theirs)
    before, after = (ModelFolder(tmp_path / name).architecture for name in ("theirs", "hf"))
    assert after == replace(before, seq_length=16)
    assert float((logits_there(tmp_path / "hf")[..., : ours.size(-1)] - expected).abs().max()) < 1e-6


# What makes a family another one is seen in the logits

WITHOUT = {
    "Llama 3.2": {"rope_parameters": llama3(8.0), "rope_scaling": None},
    "Qwen3 with YaRN": {"rope_parameters": yarn(5.0), "rope_scaling": None},
    "StarCoder2": {"hidden_act": "gelu"},
    "a window that is one token longer": {"sliding_window": 6},
}


@pytest.mark.parametrize("what", WITHOUT)
def test_the_comparison_of_logits_sees_it(what: str, tmp_path: Path) -> None:
    model = what if what in THEIRS else "Mistral with a window"
    write_theirs(tmp_path / "theirs", THEIRS[model])
    expected = logits_there(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | WITHOUT[what]))
    assert float((logits_there(tmp_path / "theirs") - expected).abs().max()) > 5 * export.TOLERANCE


# Training

LIKE_THEIRS = [
    "Llama 3.2",
    "Qwen2, Qwen2.5",
    "Qwen3 with YaRN",
    "Mistral with a window",
    "Mixtral",
    "Qwen3-MoE",
    "StarCoder2",
]


def trained_there(folder: Path, config: RunConfig, steps: int) -> list[float]:
    """The losses of transformers' model under torch's AdamW, with the batches of `train` of one rank."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    params = config.optimizer.params
    optimizer = torch.optim.AdamW(model.parameters(), params.lr, params.betas, params.eps, weight_decay=0.0)  # type: ignore[union-attr,arg-type]
    groups, losses = Mock(topology=Topology(), position=Topology().position(0)), []
    for step in range(steps):
        optimizer.zero_grad()
        of_step = []
        for index in range(config.microbatches):
            tokens, labels, _ = microbatch(config, groups, step, 0, index)
            loss = nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
            (loss / config.microbatches).backward()
            of_step.append(float(loss))
        optimizer.step()
        losses.append(sum(of_step) / len(of_step))
    return losses


@pytest.mark.parametrize("model", LIKE_THEIRS)
def test_twenty_steps_have_the_losses_of_transformers(
    model: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """AdamW in fp32 on a folder that was imported; the largest difference of a loss, in nats, is shown."""
    write_theirs(tmp_path / "theirs", THEIRS[model] | {"tie_word_embeddings": True})
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}
    changes = {"optimizer": optimizer, "scheduler": None, "gradient_clipping": 0.0}
    raw = imported(tmp_path, tmp_path / "theirs", changes)
    if raw["model"]["family"] in MIXTURES:
        # Core balances the experts of each layer, transformers those of all layers together: both do without.
        raw["model"]["moe_router_load_balancing_type"] = "none"
    (found,) = run_ranks(1, train, raw, 20)
    ours = [sum(losses) / len(losses) for losses in found["losses"]]
    theirs = trained_there(tmp_path / "theirs", RunConfig(**raw), 20)
    assert theirs[-1] < theirs[0] - 0.1, "losses that stay say nothing"
    difference = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    assert difference < 1e-4
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\n{model}: largest difference of 20 losses {difference:.1e}")
