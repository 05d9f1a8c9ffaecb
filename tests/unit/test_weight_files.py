"""Which tensors of a Hugging Face folder are read: all that are there, or none."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_noloco.huggingface.pretrained import read_architecture
from megatron_noloco.huggingface.weight_files import NotFiniteWeightError, PretrainedWeights
from megatron_noloco.model.architecture import Architecture
from tests.unit.test_huggingface import exported, hf_config, make_model, random_weights, write_folder

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
INDEX = "model.safetensors.index.json"
Weights = dict[str, Tensor]


def weights_of(model: Architecture) -> Weights:
    return exported(random_weights(model), model)


def write_shards(folder: Path, model: Architecture, index: bool = True) -> Path:
    """In three files, the last of which has the last norm."""
    weights = weights_of(model)
    write_folder(folder, model, {})
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {f"model-0000{n + 1}-of-00003.safetensors": names[n::3] for n in range(3)}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, folder / file)
    if index:
        weight_map = {name: file for file, held in files.items() for name in held}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def assert_read(folder: Path, expected: Weights) -> None:
    with PretrainedWeights(folder, read_architecture(folder)) as read:
        found = read.hf_tensors()
        for name, tensor in random_weights(read_architecture(folder)).items():
            assert read(name).shape == tensor.shape
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# Other names for the same tensors


def without_prefix(weights: Weights) -> Weights:
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def with_buffers(weights: Weights) -> Weights:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    return weights | buffer | {"model.rotary_emb.inv_freq": torch.ones(3)}


def named_by_its_head(weights: Weights) -> Weights:
    return {HEAD if name == EMBEDDING else name: tensor for name, tensor in weights.items()}


def with_the_same_head(weights: Weights) -> Weights:
    return weights | {HEAD: weights[EMBEDDING].clone()}


@pytest.mark.parametrize("change", [without_prefix, with_buffers, named_by_its_head, with_the_same_head])
def test_the_same_model_under_other_names(change: Callable[[Weights], Weights], tmp_path: Path) -> None:
    model = make_model(tied=True, multiple=1, model="qwen3")
    weights = weights_of(model)
    assert_read(write_folder(tmp_path, model, change(weights)), weights)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("model_prefix", [True, False])
def test_experts_as_transformers_5_stacks_them(family: str, model_prefix: bool, tmp_path: Path) -> None:
    """Transformers itself writes the folder: both have the same logits only if no expert is exchanged."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    model = make_model(multiple=1, model=family)
    weights = weights_of(model)
    of_family = getattr(transformers, hf_config(model)["architectures"][0])
    config = transformers.AutoConfig.for_model(**hf_config(model))
    theirs = of_family.from_pretrained(None, config=config, state_dict=weights, dtype="float32")
    stacked = theirs.state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in stacked)
    names = (lambda weights: weights) if model_prefix else without_prefix
    assert_read(write_folder(tmp_path, model, names(stacked)), weights)


# Files


@pytest.mark.parametrize("index", [True, False])
def test_shards_say_what_they_hold(index: bool, tmp_path: Path) -> None:
    model = make_model(multiple=1)
    assert_read(write_shards(tmp_path, model, index), weights_of(model))


def test_the_same_model_in_other_formats_is_not_read(tmp_path: Path) -> None:
    model = make_model(multiple=1)
    write_folder(tmp_path, model, weights_of(model))
    for name in ("consolidated.safetensors", "pytorch_model.bin", "model.fp16.safetensors"):
        (tmp_path / name).write_bytes(b"?")
    assert_read(tmp_path, weights_of(model))


def change_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    index |= {NORM: changes["norm"]}
    listed = {name: file for name, file in index.items() if file}
    (folder / INDEX).write_text(json.dumps({"weight_map": listed}))


def add_the_first_shard_again(folder: Path) -> None:
    (folder / INDEX).unlink()
    first = load_file(folder / "model-00001-of-00003.safetensors")
    last = folder / "model-00003-of-00003.safetensors"
    save_file(load_file(last) | first, last)


def without_index_and_second_shard(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()


def leave_only_bin(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").touch()


# What is done to three shards and an index, and what the line says
SHARDS: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: save_file({"a": torch.ones(1)}, folder / "model.safetensors"), "model.safetensors: not"),
    (
        lambda folder: save_file({"a": torch.ones(1)}, folder / "model-00004-of-00004.safetensors"),
        "model-00004-of-00004.safetensors: not a part of the model of",
    ),
    (lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.safetens"),
    (without_index_and_second_shard, "model-00002-of-00003.safetensors: missing, though"),
    (
        lambda folder: change_index(folder, norm="model-00001-of-00003.safetensors"),
        f"{NORM} is listed in model-00001-of-00003.safetensors, but is in model-0000",
    ),
    (lambda folder: change_index(folder, norm=None), f"{NORM} is listed in no file, but is in model-0000"),
    (add_the_first_shard_again, "model-00003-of-00003.safetensors: lm_head.weight is in"),
    (leave_only_bin, "model.safetensors: missing; pytorch_model.bin is not read; weights must be"),
    (lambda folder: (folder / "adapter_config.json").touch(), "adapter_config.json: an adapter beside the"),
]


@pytest.mark.parametrize(("spoil", "line"), SHARDS, ids=[line[:30] for _, line in SHARDS])
def test_files_that_do_not_make_up_one_model(
    spoil: Callable[[Path], object], line: str, tmp_path: Path
) -> None:
    folder = write_shards(tmp_path, make_model())
    spoil(folder)
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        PretrainedWeights(folder, read_architecture(folder))
    assert "\n" not in str(caught.value)


# A config.json that contradicts the file

EXPERT = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
# Model, whether its head is tied, what is done to its tensors, what the line says
TENSORS: list[tuple[str, bool, Callable[[Weights], object], str]] = [
    ("llama", True, lambda w: w.update({HEAD: w[EMBEDDING] + 1}), f"{EMBEDDING} differs from {HEAD}"),
    ("llama", True, lambda w: w.update({HEAD: w[EMBEDDING] + 1}), "set tie_word_embeddings to false in"),
    ("llama", False, lambda w: w.pop(HEAD), f"no tensor {HEAD}; tie_word_embeddings is false in config.json"),
    ("llama", False, lambda w: w.update({"norm.weight": w[NORM] + 1}), f"norm.weight differs from {NORM}"),
    (
        "llama",
        False,
        lambda w: w.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}),
        "tensors that the llama of 2 layers in config.json does not have: model.layers.2.mlp.up_proj.weight; ",
    ),
    ("llama", False, lambda w: w.update({"score.weight": torch.ones(1)}), "does not have: score.weight"),
    (
        "llama",
        False,
        lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(24)}),
        "q_proj.bias; model_type or num_hidden_layers there does not fit them; only if they are",
    ),
    ("mixtral", False, lambda w: w.update({EXPERT: torch.ones(1)}), f"does not have: {EXPERT}"),
    (
        "llama",
        False,
        lambda w: [w.update({f"module.{name}": w.pop(name)}) for name in sorted(w)],
        "and 18 more; tensors that the llama of 2 layers in config.json does not have: module.lm_head.weight",
    ),
]


@pytest.mark.parametrize(("family", "tied", "spoil", "line"), TENSORS, ids=range(len(TENSORS)))
def test_tensors_that_contradict_the_config(
    family: str, tied: bool, spoil: Callable[[Weights], object], line: str, tmp_path: Path
) -> None:
    model = make_model(tied=tied, model=family)
    weights = weights_of(model)
    spoil(weights)
    write_folder(tmp_path, model, weights)
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        PretrainedWeights(tmp_path, read_architecture(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_weights_are_refused_at_read(value: float, tmp_path: Path) -> None:
    model = make_model(model="mixtral")
    weights = weights_of(model)
    weights[NORM][1] = value
    write_folder(tmp_path, model, weights)
    with PretrainedWeights(tmp_path, read_architecture(tmp_path)) as read:
        for reading in (read.hf_tensors, read.check_finite):
            with pytest.raises(NotFiniteWeightError, match=f"model.safetensors: {NORM} holds NaN or"):
                reading()


def test_stacked_experts_of_another_number(tmp_path: Path) -> None:
    model = make_model(model="mixtral")
    weights = weights_of(model)
    experts = [name for name in weights if ".experts." in name]
    for name in experts:
        del weights[name]
    stack = "model.layers.0.mlp.experts.down_proj"
    weights[stack] = torch.ones(5, 20, 24)
    write_folder(tmp_path, model, weights)
    with pytest.raises(ValueError, match=re.escape(f"{stack} is [5, 20, 24], not [3, 20, 24]")):
        PretrainedWeights(tmp_path, read_architecture(tmp_path))
