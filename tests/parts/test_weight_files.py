"""Which tensors of a Hugging Face folder are read: all that are there, or none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_noloco.errors import UserError
from megatron_noloco.huggingface.folder import ModelFolder
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.model.architecture import Architecture
from tests.kit.hf_folders import exported, make_model, random_weights, write_folder

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Weights = dict[str, Tensor]


def weights_of(model: Architecture) -> Weights:
    return exported(random_weights(model), model)


def write_shards(folder: Path, model: Architecture) -> Path:
    weights = weights_of(model)
    write_folder(folder, model, {})
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {f"model-0000{n + 1}-of-00003.safetensors": names[n::3] for n in range(3)}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def assert_read(folder: Path, model: Architecture) -> None:
    with PretrainedWeights(folder, ModelFolder(folder).architecture) as read:
        for name, tensor in random_weights(model).items():
            assert torch.equal(read(name), tensor), name


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = make_model(multiple=1)
    assert_read(write_shards(tmp_path, model), model)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_weights_are_refused_at_read(value: float, tmp_path: Path) -> None:
    model = make_model(model="mixtral")
    weights = weights_of(model)
    weights[NORM][1] = value
    write_folder(tmp_path, model, weights)
    opened = PretrainedWeights(tmp_path, ModelFolder(tmp_path).architecture)
    with opened as read, pytest.raises(UserError, match=f"{NORM} holds NaN or"):
        read("decoder.final_layernorm.weight")
