"""Conversion to and from Hugging Face, and what is refused of a folder."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from megatron_noloco.cli.exit_codes import StoppedError
from megatron_noloco.cli.huggingface import _say_losses
from megatron_noloco.config import RunConfig
from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.data.fast_tokenizer import FastTokenizer
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.huggingface import evaluate, export, pretrained
from megatron_noloco.huggingface.evaluate import Result
from megatron_noloco.huggingface.export import assign_to_files
from megatron_noloco.huggingface.pretrained import (
    check_fits,
    check_tokenizer,
    config_for_any_version,
    model_fields,
    read_architecture,
    tokenizer_of,
)
from megatron_noloco.huggingface.whole_model import check_room
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import FAMILIES, Parameter, architecture_of, table_of
from tests.harness import REPOSITORY, full_disk, output_of, refusal_of
from tests.unit.configs import SMALLEST

HEADS, HEAD_SIZE, HIDDEN, FFN, LAYERS, VOCABULARY = 4, 6, 20, 24, 2, 259


YARN = {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 16}

# Of each family, with its own fields
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama 3.1": {"family": "llama", "rope_scaling_factor": 32.0, "rotary_base": 5e5},
    "llama with YaRN": {"family": "llama", **YARN},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "qwen3 with YaRN": {"family": "qwen3", **YARN},
    "mistral": {"family": "mistral"},
    "mistral with a window": {"family": "mistral", "sliding_window": 9},
    "mixtral": {"family": "mixtral", "num_moe_experts": 3, "moe_router_topk": 2, "sliding_window": 9},
    "qwen3_moe": {"family": "qwen3_moe", "num_moe_experts": 5, "moe_router_topk": 3},
    "starcoder2": {"family": "starcoder2"},
    "starcoder2 with a window": {"family": "starcoder2", "sliding_window": 9},
}


def make_model(
    groups: int = 2, tied: bool = False, multiple: int = 128, model: str = "llama"
) -> Architecture:
    """Sizes that are all different, so that no two can be mistaken for one another."""
    common = Architecture(
        family="llama",
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        kv_channels=HEAD_SIZE,
        seq_length=32,
        vocab_size=VOCABULARY,
        padded_vocab_size=-(-VOCABULARY // multiple) * multiple,
        rotary_base=10000.0,
        norm_epsilon=1e-5,
        tied_embeddings=tied,
        init_method_std=0.02,
    )
    return replace(common, **MODELS[model])


def random_weights(model: Architecture) -> dict[str, Tensor]:
    """Ours; rows that pad the vocabulary are zero, as an import makes them."""
    generator = torch.Generator().manual_seed(0)
    rows = [row for row in table_of(model) if row.hf_shapes]  # without the copy of a tied output layer
    weights = {row.name: torch.randn(row.shape, generator=generator) for row in rows}
    for tensor in weights.values():
        if tensor.size(0) == model.padded_vocab_size:
            tensor[VOCABULARY:] = 0
    return weights


def exported(weights: dict[str, Tensor], model: Architecture) -> dict[str, Tensor]:
    table = table_of(model)
    pairs = (table.find(name).to_hf(tensor).items() for name, tensor in weights.items())
    return {name: tensor.contiguous() for pair in pairs for name, tensor in pair}


def hf_config(model: Architecture) -> dict[str, Any]:
    return FAMILIES[model.family].hf_config(model, "bfloat16")


def write_folder(folder: Path, model: Architecture, weights: dict[str, Tensor] | None = None) -> Path:
    """A Hugging Face folder in one file, without a tokenizer; if no weights are given, all are 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(model)))
    if weights is None:
        weights = {
            name: torch.ones(shape) for row in table_of(model) for name, shape in row.hf_shapes.items()
        }
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


# The table


@pytest.mark.parametrize(("groups", "multiple", "tied"), [(1, 1, False), (2, 128, True), (HEADS, 128, False)])
def test_there_and_back_is_the_identity(groups: int, multiple: int, tied: bool) -> None:
    model = make_model(groups, tied, multiple)
    weights = random_weights(model)
    theirs = exported(weights, model)
    assert theirs["model.embed_tokens.weight"].shape == (VOCABULARY, HIDDEN)
    for name, tensor in weights.items():
        back = table_of(model).find(name).from_hf(theirs.__getitem__)
        assert torch.equal(back, tensor), name


# The configuration

Spoil = Callable[[Path], object]
MISSING = object()


def change_config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        keys = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in keys.items() if value is not MISSING}))

    return spoil


@pytest.mark.parametrize("family", MODELS)
def test_config_of_transformers_describes_same_model(tmp_path: Path, family: str) -> None:
    """It reads ours, and writes its own: transformers 5 without the keys that only 4 reads, for one."""
    model = make_model(multiple=1, model=family)
    config = transformers.AutoConfig.for_model(**hf_config(model))
    assert (config.model_type, config.dtype) == (model.family, torch.bfloat16)
    config.save_pretrained(tmp_path)
    assert read_architecture(tmp_path) == model


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# What decides the model in published config.json files; then the number of weights in the tensors beside them
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.2-1B": (
        {
            "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": LLAMA3 | {"factor": 32.0}, "rope_theta": 500000.0, "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        1_235_814_400,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
            "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        596_049_920,
    ),
    "Mixtral-8x7B-v0.1": (
        {
            "model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
            "tie_word_embeddings": False, "vocab_size": 32000,
        },
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe", "attention_bias": False, "attention_dropout": 0.0,
            "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        30_532_122_624,
    ),
    "StarCoder2-3B": (
        {
            "model_type": "starcoder2", "attention_dropout": 0.1, "embedding_dropout": 0.1,
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042,
            "intermediate_size": 12288, "max_position_embeddings": 16384, "mlp_type": "default",
            "norm_epsilon": 1e-05, "num_attention_heads": 24, "num_hidden_layers": 30,
            "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
            "sliding_window": 4096, "use_bias": True, "vocab_size": 49152,
        },
        3_030_371_328,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_with_all_their_weights(name: str) -> None:
    keys, parameters = PUBLISHED[name]
    found = architecture_of(keys)
    assert table_of(found).parameter_count == parameters
    assert found.family == keys["model_type"]
    assert found.rotary_base == keys["rope_theta"]
    assert found.rope_scaling_factor == (32.0 if "Llama" in name else None)
    assert found.sliding_window == keys.get("sliding_window")


@pytest.mark.parametrize(("config", "name"), [("llama_3.2_1b", "Llama-3.2-1B"), ("qwen3_0.6b", "Qwen3-0.6B")])
def test_the_configs_that_continue_published_models(config: str, name: str, tmp_path: Path) -> None:
    """Their `model` is what `import` writes for the model, whose config.json transformers writes here."""
    keys, _ = PUBLISHED[name]
    transformers.AutoConfig.for_model(**keys).save_pretrained(tmp_path)
    raw = json.loads((REPOSITORY / "configs" / f"{config}.json").read_text())
    settings = {"seq_length": raw["model"]["seq_length"], "make_vocab_size_divisible_by": 1}
    assert raw["model"] == model_fields(read_architecture(tmp_path)) | settings
    assert raw["training"]["pretrained"] == raw["data"]["tokenizer_model"] == f"models/{name}"


def bases(base: float, factor: float | None) -> dict[str, Any]:
    return {"rotary_base": base, "rope_scaling_factor": factor}


def yarn(**rope: Any) -> dict[str, Any]:
    return {"rope_scaling": rope, "max_position_embeddings": 32768}


DEFAULT, BASE = {"rope_type": "default"}, {"rope_theta": 5e5}
YARN_FIELDS = YARN | {"yarn_original_max_position_embeddings": 32768, "rope_scaling_factor": None}
# What transformers takes for keys that a config.json lacks, what makes no difference there, and rotary embeddings
# as its versions 4 and 5 write them
READ_AS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("mistral", {"sliding_window": MISSING}, {"sliding_window": 4096}),
    ("mistral", {"num_key_value_heads": MISSING, "num_attention_heads": 16}, {"num_query_groups": 8}),
    ("mistral", {"layer_types": ["full_attention"] * 2}, {"sliding_window": None}),
    ("mixtral", {"sliding_window": MISSING}, {"sliding_window": None}),
    ("mixtral", {"num_local_experts": MISSING, "num_experts_per_tok": MISSING}, {"num_moe_experts": 8}),
    ("mixtral", {"rope_parameters": MISSING, "rope_theta": MISSING}, {"rotary_base": 1e6}),
    ("mixtral", {"rms_norm_eps": MISSING}, {"norm_epsilon": 1e-5}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, {}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, {}),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, {}),
    ("qwen2", {"head_dim": MISSING, "hidden_size": 24}, {"kv_channels": 6}),
    ("qwen3", {"head_dim": MISSING}, {"kv_channels": 128}),
    ("qwen3_moe", {"head_dim": MISSING, "hidden_size": 24}, {"kv_channels": 6}),
    ("qwen3_moe", {"num_local_experts": MISSING, "num_experts": 7}, {"num_moe_experts": 7}),  # as published
    ("qwen3_moe", {"num_local_experts": MISSING, "num_experts": MISSING}, {"num_moe_experts": 128}),
    ("qwen3_moe", {"moe_intermediate_size": MISSING}, {"ffn_hidden_size": 768}),
    ("llama", {"rms_norm_eps": MISSING, "tie_word_embeddings": MISSING}, {"norm_epsilon": 1e-6}),
    ("llama", {"max_position_embeddings": MISSING}, {"seq_length": 2048}),
    ("starcoder2", {"tie_word_embeddings": MISSING, "norm_epsilon": MISSING}, {"tied_embeddings": True}),
    ("starcoder2", {"num_key_value_heads": MISSING, "sliding_window": MISSING}, {"num_query_groups": 2}),
    ("starcoder2", {"use_bias": MISSING, "hidden_act": MISSING}, {}),
    ("starcoder2", {"max_position_embeddings": MISSING}, {"seq_length": 4096}),
    ("llama", {"rope_scaling": DEFAULT}, bases(10000.0, None)),
    ("llama", {"rope_scaling": None, "rope_parameters": None, "rope_theta": 5e5}, bases(5e5, None)),
    (
        "llama",
        {"rope_parameters": DEFAULT | BASE, "rope_theta": None},
        bases(5e5, None),
    ),
    ("llama", {"rope_scaling": LLAMA3, "rope_parameters": None, "rope_theta": 5e5}, bases(5e5, 8.0)),
    ("llama", {"rope_scaling": {**LLAMA3, "type": "llama3", "rope_type": None}}, bases(10000.0, 8.0)),
    (
        "llama",
        {"rope_parameters": LLAMA3 | BASE | {"factor": 32}, "rope_theta": None},
        bases(5e5, 32.0),
    ),
    ("llama", {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | BASE} | BASE, bases(5e5, 8.0)),
    ("qwen2", yarn(type="yarn", factor=4, original_max_position_embeddings=32768), YARN_FIELDS),  # Qwen2.5
    ("qwen3", yarn(rope_type="yarn", factor=4.0), YARN_FIELDS),  # transformers takes max_position_embeddings
    ("llama", yarn(rope_type="yarn", factor=4.0, beta_fast=32, beta_slow=1, mscale=None), YARN_FIELDS),
]


@pytest.mark.parametrize(("family", "keys", "expected"), READ_AS, ids=range(len(READ_AS)))
def test_keys_that_are_missing_or_make_no_difference(
    tmp_path: Path, family: str, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(make_model(model=family))))
    change_config(**keys)(tmp_path)
    found = read_architecture(tmp_path)
    assert {name: getattr(found, name) for name in expected} == expected
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    epsilon = getattr(theirs, FAMILIES[family].hf_norm_epsilon)
    assert (theirs.num_key_value_heads, epsilon) == (found.num_query_groups, found.norm_epsilon)
    assert theirs.max_position_embeddings == found.seq_length
    assert theirs.tie_word_embeddings == found.tied_embeddings
    assert theirs.rope_parameters["rope_theta"] == found.rotary_base
    if "sliding_window" in FAMILIES[family].own_fields:
        assert theirs.sliding_window == found.sliding_window
    elif family == "qwen3_moe":
        assert theirs.num_local_experts == found.num_moe_experts
        assert theirs.num_experts_per_tok == found.moe_router_topk
        assert theirs.moe_intermediate_size == found.ffn_hidden_size
    elif family.startswith("qwen"):
        assert set(theirs.layer_types) == {"full_attention"}


@pytest.mark.parametrize("model", MODELS)
def test_generate_equals_any_transformers_version(model: str, tmp_path: Path) -> None:
    """Version 4 reads another key for the base, so a folder that 5 wrote would be computed with the default."""
    architecture = replace(make_model(multiple=1, model=model), rotary_base=1234.0)
    transformers.AutoConfig.for_model(**hf_config(architecture)).save_pretrained(tmp_path)
    found, expected = config_for_any_version(tmp_path), hf_config(architecture)
    del expected["torch_dtype"]  # transformers 5 writes `dtype`
    assert {key: found[key] for key in expected} == expected


# What is refused: one line, exit code 2


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def write(name: str, content: str) -> Spoil:
    return lambda folder: (folder / name).write_text(content)


def add_a_tokenizer_of_words(folder: Path, **others: int) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {"byte": 0, "[UNK]": 1, **others}
    Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>"} if "</s>" in others else {})
    )


Q = "model.layers.1.self_attn.q_proj.weight"
HF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def change_weight(name: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights[name] = change(weights[name]).contiguous()
        save_file(weights, folder / "model.safetensors")

    return spoil


SHORT = {key: value for key, value in LLAMA3.items() if "original" not in key}
WINDOWS = {"use_sliding_window": True, "max_window_layers": 1}
# Family, keys that are changed in its config, what is said; a row for each rule
NOT_READ: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "gpt2"}, 'model_type is \'gpt2\'; only "llama", "qwen2"'),
    ("llama", {"attention_bias": True}, "attention_bias is True; in llama only False is"),
    ("llama", {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ("llama", {"hidden_size": "20"}, "hidden_size is '20'; it must be a whole number >= 1"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "of type 'linear'; this family has only"),
    ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2.0; Megatron-core"),
    ("llama", {"rope_scaling": SHORT}, "original_max_position_embeddings 32; Megatron-core computes"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"rope_theta": 5e5}, "rope_theta is 500000.0 and rope_theta of rope_parameters is 10000.0;"),
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": None}, "rope_parameters is not read beside"),
    ("llama 3.1", {"rope_scaling": LLAMA3}, "factor of rope_scaling is 8.0 and of rope_parameters 32.0;"),
    ("llama", {"quantization_config": {"bits": 4}}, "weights must not be quantized"),
    ("llama", {"is_causal": False}, "is_causal is false"),
    ("llama", {"pruned_heads": {"0": [1]}}, "pruned_heads is {'0': [1]}; all layers must have all heads"),
    ("llama", {"transformers_weights": "other.safetensors"}, "weights are read from model*.safetensors"),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map names Python code"),
    ("qwen2", {"rope_scaling": LLAMA3}, "rope_scaling is of type 'llama3'; this family has only \"yarn\""),
    ("qwen2", WINDOWS, "max_window_layers 1 of 2 layers"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, 'has "sliding_attention"'),
    ("qwen2", {"rope_scaling": HF_YARN | {"attention_factor": 1.0}}, "1.0; it must be left out"),
    ("qwen3", {"rope_scaling": HF_YARN | {"beta_fast": 16}}, "beta_fast 16; it must be 32.0 with YaRN"),
    ("qwen3", {"rope_parameters": {"full_attention": {}}}, 'its own for "full_attention"'),
    ("qwen3", {"attention_bias": True}, "attention_bias is True; in qwen3 only False is"),
    ("qwen3", WINDOWS, "use_sliding_window is true"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be a whole number >= 1"),
    ("mistral", {"sliding_window": 9, "layer_types": ["full_attention"]}, 'must be "sliding_attention"'),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; in mixtral only 0.0 is"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1; it must be at least 2"),
    ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob is False; in qwen3_moe only True"),
    ("qwen3_moe", {"num_experts": 7}, "num_local_experts is 5 and num_experts is 7; they must be the same"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers is [1]; in qwen3_moe only [] is"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; in qwen3_moe only 1 is"),
    ("starcoder2", {"use_bias": False}, "use_bias is False; in starcoder2 only True is"),
    ("starcoder2", {"hidden_act": "silu"}, "hidden_act is 'silu'; in starcoder2 only 'gelu_pytorch_tanh' is"),
    ("qwen3_moe", WINDOWS | {"max_window_layers": 2}, "use_sliding_window is True"),
]


@pytest.mark.parametrize(("family", "keys", "line"), NOT_READ)
def test_a_config_that_no_family_has(family: str, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        architecture_of(hf_config(make_model(model=family)) | keys)
    assert "\n" not in str(caught.value)


# Keys that transformers reads, and that change no logit in evaluation
HARMLESS = {"attention_dropout", "initializer_range", "output_router_logits", "pad_token_id"}
HARMLESS |= {"router_aux_loss_coef", "residual_dropout", "embedding_dropout"}
# Where `use_sliding_window` is false, and every layer has experts
UNUSED = {
    "qwen2": {"sliding_window"},
    "qwen3": {"sliding_window"},
    "qwen3_moe": {"sliding_window", "intermediate_size"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_that_transformers_computes_with_is_read(family: str) -> None:
    """So nonsense in it is refused: no key is taken on trust, in the installed version of transformers."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    pattern = r"config\.([a-z]\w*)|getattr\((?:self\.)?config, \"(\w+)\""
    found = re.findall(pattern, Path(module.__file__).read_text())
    keys = {key for pair in found for key in pair if key} - HARMLESS - UNUSED.get(family, set())
    assert "hidden_size" in keys
    for key in sorted(keys):
        with pytest.raises(ValueError, match="nonsense"):
            architecture_of(hf_config(make_model(model=family)) | {key: "nonsense"})


# Keys that `import` leaves to the run's own config or tokenizer, or that only transformers' code reads
NOT_CARRIED = {"max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"}
NOT_CARRIED |= {"architectures", "transformers_version", "use_cache", "pretraining_tp", "max_window_layers"}
NOT_CARRIED |= {"output_router_logits", "router_aux_loss_coef"}  # docs/families.md says so
NOT_CARRIED |= {"use_sliding_window"}  # beside it `layer_types` says that no layer has a window
NOT_CARRIED |= {"embedding_dropout", "id2label", "label2id", "problem_type", "return_dict", "_name_or_path"}
NOT_CARRIED |= {"output_attentions", "output_hidden_states", "is_encoder_decoder", "chunk_size_feed_forward"}


def another(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return 2 * value or 1
        case float():
            return 0.75 * value or 0.25
    return value


@pytest.mark.parametrize("model", MODELS)
def test_each_key_that_import_reads_is_exported(model: str, tmp_path: Path) -> None:
    """Each key that transformers writes, with another value, is refused, or comes back from an export."""
    theirs = transformers.AutoConfig.for_model(**hf_config(make_model(model=model)))
    (path := tmp_path / "config.json").write_text(theirs.to_json_string(use_diff=False))
    keys = json.loads(path.read_text())
    carried = []
    for key, value in keys.items():
        path.write_text(json.dumps(keys | {key: another(value)}))
        try:
            found = read_architecture(tmp_path)
        except ValueError:
            continue
        fields = model_fields(found) | pretrained._dropouts(found, json.loads(path.read_text()))
        fields |= {"init_method_std": found.init_method_std, "make_vocab_size_divisible_by": 1}
        run = RunConfig(**SMALLEST | {"model": fields})
        back = export.config_json(run.architecture(found.vocab_size), run.model, "bfloat16")
        if another(value) != value and back.get(key) == another(value):
            carried.append(key)
        else:
            assert another(value) == value or key in NOT_CARRIED | UNUSED.get(keys["model_type"], set()), key
    assert {"attention_dropout", "initializer_range", "hidden_size"} <= {*carried}
    assert ("residual_dropout" in carried) == (model.startswith("starcoder2"))


# What is changed in the folder of a Llama, what the one line says; a row for each rule
REFUSED: list[tuple[Spoil, tuple[str, ...]]] = [
    (change_config(mlp_bias=True), ("config.json: mlp_bias",)),
    (
        change_config(num_key_value_heads=3),
        ("config.json: num_attention_heads 4 does not divide into num_key_value_heads 3",),
    ),
    (change_config(attention_dropout=1.5), ("config.json: attention_dropout: ", "< 1, got 1.5")),
    (change_config(num_hidden_layers=10**6), ("config.json: num_hidden_layers: ", "<= 10000")),
    (shutil.rmtree, ("theirs", "No such file")),
    (write("config.json", "{"), ("config.json", "not a JSON object")),
    (write("model.safetensors.index.json", "{}"), ("index.json", "weight_map")),
    (
        write("model.safetensors.index.json", '{"weight_map": {"a": 1}}'),
        ("index.json", "object of file names"),
    ),
    (change_weight(Q, lambda w: w.to(torch.int8)), (Q, "I8", "quantized")),
    (change_weight(Q, lambda w: w[:-1]), (Q, "[23, 20]", "[24, 20]")),
    (
        change_weight(Q, lambda w: w.fill_(math.nan)),
        (f"model.safetensors: {Q} holds NaN or infinite weights",),
    ),
    (cut_short, ("model.safetensors: cut short",)),
    (add_a_tokenizer_of_words, ("theirs: no end-of-document token", "eos_token")),
    (lambda folder: add_a_tokenizer_of_words(folder, **{"</s>": 259}), ("a vocabulary of 259", "260")),
    (write("tokenizer.model", "?"), ("tokenizer.model", "save_pretrained")),
    (write("tokenizer.json", "{"), ("transformers cannot read it",)),
]


def import_of(folder: Path, changes: dict[str, Any] | None = None) -> tuple[list[Any], Path]:
    """Return a command that imports the folder into the smallest config with changes, and what it writes."""
    config, output = folder.parent / "config.json", folder.parent / "imported.json"
    output.unlink(missing_ok=True)  # it is not overwritten
    config.write_text(json.dumps(SMALLEST | (changes or {})))
    return ["import", folder, "--config", config, "--output", output], output


def imported(folder: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    command, output = import_of(folder, changes)
    output_of(*command)
    return json.loads(output.read_text())


def refused_import(folder: Path, changes: dict[str, Any] | None = None) -> str:
    command, output = import_of(folder, changes)
    line = refusal_of(*command)
    assert not output.exists()
    return line


@pytest.mark.parametrize(("spoil", "fragments"), REFUSED, ids=[row[1][-1] for row in REFUSED])
def test_a_folder_that_cannot_be_imported_is_one_line(
    spoil: Spoil, fragments: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "theirs", make_model())
    spoil(folder)
    line = refused_import(folder)
    assert [fragment for fragment in (str(folder), *fragments) if fragment not in line] == [], line


def test_an_export_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "theirs", make_model())
    command, config = import_of(folder)
    output_of(*command)
    (folder / export.UNFINISHED).touch()
    for command in (
        ["generate", folder, "--prompt", "a"],
        ["evaluate", folder, "--data", "text"],
        ["import", folder, "--config", config, "--output", tmp_path / "again.json"],
        ["config", "--check", config],
    ):
        line = f"{folder}/UNFINISHED: this export ended before its check, or failed it"
        assert line in refusal_of(*command)


@pytest.fixture
def model_of_bytes(tmp_path: Path) -> Path:
    """Return a folder with random weights and the tokenizer of bytes."""
    model = make_model()
    folder = write_folder(tmp_path / "theirs", model, exported(random_weights(model), model))
    ByteTokenizer().save(folder, 32)
    return folder


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_generation_obeys_the_command_not_the_folder(temperature: str, model_of_bytes: Path) -> None:
    """But for the tokens that end a text. transformers reads settings in config.json, too."""
    folder = model_of_bytes

    def generated(**settings: Any) -> str:
        (folder / "generation_config.json").write_text(json.dumps(settings))
        arguments = ["--prompt", "the", "--tokens", "20", "--temperature", temperature]
        return output_of("generate", folder, *arguments)

    expected = generated(eos_token_id=256)
    for settings in (
        {"repetition_penalty": 2.0},
        {"top_p": 0.01, "do_sample": True},
        {"num_beams": 4},
        {"stop_strings": ["e"]},
        {"max_new_tokens": 2, "min_new_tokens": 1},
        {"suppress_tokens": [*range(100)], "no_repeat_ngram_size": 1},
        {"num_return_sequences": 3},  # transformers refuses it, and the next
        {"early_stopping": "x", "temperature": "warm"},
    ):
        assert generated(eos_token_id=256, **settings) == expected, settings
    change_config(top_p=0.01, repetition_penalty=2.0)(folder)
    assert generated(eos_token_id=256) == expected
    ends = ByteTokenizer().encode(expected).tolist()
    assert len(generated(eos_token_id=ends)) < len(expected)
    assert generated() == generated(eos_token_id=[]) == generated(eos_token_id=1 << 70)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"eos_token_id": "</s>"}', 'eos_token_id is "</s>"; it must be the number of a token, or a list'),
        ('{"eos_token_id": [1, true]}', "eos_token_id is [1, true]; it"),
        ("", "not a JSON object"),
        ('{"eos_token_id":', "not a JSON object"),
        ("null", "not a JSON object"),
        ("[1]", "not a JSON object"),
        (None, "Is a directory"),
    ],
)
def test_a_generation_config_that_cannot_be_read_is_named(
    content: str | None, reason: str, model_of_bytes: Path
) -> None:
    file = model_of_bytes / "generation_config.json"
    file.mkdir() if content is None else file.write_text(content)
    assert f"{file}: {reason}" in refusal_of("generate", model_of_bytes, "--prompt", "the", "--tokens", "2")


def test_what_of_a_folder_is_not_evaluated_is_said(
    tmp_path: Path, model_of_bytes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And samples longer than the context are reported."""
    (data := tmp_path / "data").mkdir()
    (data / "a.txt").write_text("a text of more than 33 tokens " * 9)

    def said(length: int | None) -> str:
        evaluate.open_weights([model_of_bytes], str(data), length)
        return capsys.readouterr().err

    line = "--seq-length 33: the model's context is 32 tokens; it was not trained to read longer samples\n"
    assert [said(length) for length in (None, 32, 33)] == ["", "", line]
    (data / "b.png").write_bytes(b"\xff\xff")
    assert said(None) == f"--data {data}: left out: 1 file not in UTF-8 (b.png; 2 bytes)\n"


@pytest.mark.parametrize("end", ["</s>", "<|endoftext|>"])
def test_an_exported_byte_tokenizer_is_the_byte_tokenizer(end: str, tmp_path: Path) -> None:
    """So an export is evaluated on the datasets of its run; another end of documents makes another tokenizer."""
    ByteTokenizer().save(tmp_path, 32)
    if end == "</s>":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            path = tmp_path / name
            path.write_text(path.read_text().replace('"<|endoftext|>"', '"</s>"').replace(": 256", ": 257"))
    assert isinstance(tokenizer_of(tmp_path), ByteTokenizer if end == "<|endoftext|>" else FastTokenizer)


MIXTURE = {"family": "mixtral", "num_moe_experts": 5, "moe_aux_loss_coeff": 0.5}
DROPOUT = {"attention_dropout": 0.1}
RESIDUAL = {"residual_dropout": 0.2, "embedding_dropout": 0.2}
# Family and changes of the folder, the config's block `model` beside the sizes, what becomes of it
TAKEN_OVER: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        "llama",
        {},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "num_layers": 2},
    ),
    ("mixtral", {}, MIXTURE, {"num_moe_experts": 3, "moe_aux_loss_coeff": 0.5}),
    ("llama", {"initializer_range": 0.018042}, {"init_method_std": 0.02}, {"init_method_std": 0.018042}),
    ("llama", DROPOUT, {}, DROPOUT),
    ("llama", DROPOUT, {"attention_dropout": 0.0}, {"attention_dropout": 0.0}),
    ("starcoder2", DROPOUT | RESIDUAL, {}, DROPOUT | {"hidden_dropout": 0.2}),
    ("starcoder2", {"residual_dropout": 0.2}, {"hidden_dropout": 0.1}, {"hidden_dropout": 0.1}),
]


@pytest.mark.parametrize(("family", "change", "given", "expected"), TAKEN_OVER, ids=range(len(TAKEN_OVER)))
def test_import_keeps_what_the_folder_does_not_decide(
    family: str, change: dict[str, Any], given: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "theirs", make_model(multiple=1, model=family))
    change_config(**change)(folder)
    found = imported(folder, {"model": SMALLEST["model"] | given | {"num_layers": 99}})["model"]
    assert {name: found[name] for name in expected} == expected


def test_dropouts_that_are_one_field_of_a_run_must_be_the_same(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "theirs", make_model(multiple=1, model="starcoder2"))
    change_config(residual_dropout=0.2, embedding_dropout=MISSING)(folder)
    line = "embedding_dropout is 0.0 and residual_dropout is 0.2; model.hidden_dropout is one value for both"
    assert f"{folder / 'config.json'}: {line}" in refused_import(folder)


@pytest.mark.parametrize("family", MODELS)
def test_import_finds_the_family(family: str, tmp_path: Path) -> None:
    """And nothing remains of the one that the config had before."""
    model = make_model(groups=1, tied=True, multiple=1, model=family)
    folder = write_folder(tmp_path / "theirs", model)
    for before in ({"family": "mistral", "sliding_window": 7}, {"rope_scaling_factor": 8.0}):
        found = RunConfig(**imported(folder, {"model": SMALLEST["model"] | before}))
        assert found.architecture(257) == replace(model, seq_length=16)


@pytest.mark.parametrize("given", [{}, {"prepend_bos": False}])
def test_import_takes_the_tokenizer_and_how_documents_begin(tmp_path: Path, given: dict[str, Any]) -> None:
    folder = write_folder(tmp_path / "llama", make_model())
    add_a_tokenizer_of_words(folder, **{"</s>": 2, "<s>": 3})
    tokenizer = FastTokenizer(folder)._tokenizer
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    of_model = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    expected = SMALLEST["data"] | of_model | {"prepend_bos": not given}
    assert imported(folder, {"data": SMALLEST["data"] | given})["data"] == expected
    line = f"data.prepend_bos: {folder} puts BOS before each text, and this run does not; set it to true"
    said = pretrained.missing_bos(folder, DataConfig(text="a", tokenizer_model=str(folder), **given))
    assert said.startswith(line) != bool(given)


def test_a_folder_has_its_own_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama", make_model())
    for command, *options in (["generate", "--prompt", "a"], ["evaluate", "--data", "text"]):
        line = refusal_of(command, folder, *options, "--tokenizer", folder)
        assert re.search("--tokenizer: .*is a Hugging Face folder, which has its own; leave it out", line)


def test_import_refuses_another_tokenizer_that_the_config_names(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama", make_model())
    add_a_tokenizer_of_words(folder, **{"</s>": 2})
    problem = f"{folder}: the model's tokenizer reads .*than the run's of bytes.*tokenizer_model {folder}"
    assert re.search(problem, refused_import(folder, {"data": SMALLEST["data"] | {"tokenizer_type": "byte"}}))
    (config := tmp_path / "changed.json").write_text(
        json.dumps(imported(folder) | {"data": SMALLEST["data"]})
    )
    assert re.search(problem, refusal_of("config", "--check", config))


def test_an_evaluation_whose_loss_is_not_finite_fails(capsys: pytest.CaptureFixture[str]) -> None:
    results = [Result("replica 0", "a", math.nan, 9), Result("mean model", "a", 1.0, 9)]
    with pytest.raises(StoppedError, match="the loss is not finite: replica 0 on a; training has diverged"):
        _say_losses(results)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_tokenizers_are_told_apart_by_any_token(tmp_path: Path) -> None:
    """One with further tokens is not refused: their rows of the embedding are there, and may be trained."""
    theirs, more, other = (tmp_path / name for name in ("theirs", "more", "other"))
    for folder, words in ((theirs, {"a": 3}), (more, {"a": 3, "b": 4}), (other, {"b": 3})):
        folder.mkdir()
        add_a_tokenizer_of_words(folder, **{"</s>": 2}, **words)
    check_tokenizer(theirs, FastTokenizer(theirs), VOCABULARY)
    check_tokenizer(theirs, FastTokenizer(more), VOCABULARY)
    with pytest.raises(ValueError, match=f"theirs: the model's tokenizer .* than the run's in {other}; to"):
        check_tokenizer(theirs, FastTokenizer(other), VOCABULARY)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_import_writes_a_config_for_that_model(tp_size: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama", make_model())
    ByteTokenizer().save(folder, 32)
    raw = imported(folder, {"parallel": {"tensor_model_parallel_size": tp_size}})
    assert raw["training"] == {"train_iters": 2, "pretrained": str(folder)}
    assert raw["model"]["seq_length"] == 16
    assert RunConfig(**raw).architecture(257).padded_vocab_size == {1: 259, 2: 260}[tp_size]
    assert (raw["optimizer"], raw["data"]) == (SMALLEST["optimizer"], SMALLEST["data"])


def test_unfit_config_is_refused_per_setting(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, make_model())
    check_fits(folder, make_model())
    other = replace(make_model(model="mistral with a window"), num_layers=3)
    with pytest.raises(ValueError, match=r"family is 'mistral', but 'llama' in .*\n.*num_layers is 3, but 2"):
        check_fits(folder, other)


# The files


def test_files_hold_at_most_what_is_allowed_or_one_tensor() -> None:
    parameters = [
        Parameter(str(n), (size,), hf=(f"{n}: {size}",)) for n, size in enumerate((3, 2, 4, 9, 1, 1, 1))
    ]
    files = assign_to_files(parameters, itemsize=2, max_bytes=10)
    sizes = [[name.split()[1] for name in file] for file in files]
    assert sizes == [["3", "2"], ["4"], ["9"], ["1", "1", "1"]]


def trained() -> Mock:
    """A checkpoint with random weights, as an export sees it."""
    model = make_model()
    weights = random_weights(model)
    config = RunConfig(**SMALLEST | {"model": SMALLEST["model"] | DROPOUT})
    source = Mock(architecture=model, config=config, replicas=[0], tokenizer=ByteTokenizer())
    source.reader.return_value.read = lambda name, replicas: weights[name]
    return source


@pytest.mark.parametrize("output", [".", "../link"])
def test_an_export_fills_the_folder_that_is_there(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of an unfinished one is removed, and the folder kept."""
    monkeypatch.setattr(export, "_model_card", lambda _: "")
    folder = tmp_path / "folder"
    (folder / "old").mkdir(parents=True)
    for path in (folder / "UNFINISHED", folder / "old" / "file"):
        path.touch()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    before = folder.stat().st_ino
    export.export(trained(), Path(output), "float32", 10**9)
    assert (folder / "model.safetensors").exists()
    assert json.loads((folder / "config.json").read_text()).items() >= DROPOUT.items()
    assert not (folder / "old").exists()
    assert folder.stat().st_ino == before
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    ("family", "dropout", "told"), [("llama", 0.1, 1), ("llama", 0.0, 0), ("starcoder2", 0.1, 0)]
)
def test_a_dropout_that_an_export_cannot_hold_is_said(family: str, dropout: float, told: int) -> None:
    model = make_model(model=family)
    config = RunConfig(**SMALLEST | {"model": SMALLEST["model"] | {"hidden_dropout": dropout}})
    lines = [line.partition(":")[0] for line in export.not_exported(model, config.model)]
    assert lines == ["model.hidden_dropout 0.1 is not in the export"] * told


def test_a_model_card_does_not_say_where_the_files_were() -> None:
    config = {
        "data": {"data_path": ["0.3", "/home/me/corpus", "0.7", "more/text"]},
        "training": {"output_dir": "/home/me/runs/a", "train_iters": 5},
        "federation": {"rendezvous": "file:///home/me/meeting"},
    }
    assert export._without_places(config) == {
        "data": {"data_path": ["0.3", "corpus", "0.7", "more/text"]},
        "training": {"output_dir": "a", "train_iters": 5},
        "federation": {"rendezvous": "meeting"},
    }


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"too large: .*/model\.safetensors'$"), full_disk():
        export._write_weights(trained(), tmp_path, torch.float32, 10**9)


# The tokenizer

TEXTS = [
    "To be, or not to be",
    "  two  spaces, a tab\t, lines\r\n\n",
    "".join(map(chr, range(32))) + "\x7f",
    "".join(map(chr, range(0x80, 0x180))),
    "Grüße, 中文, עברית, 🙂👩‍👩‍👧, e\u0301",
    "\ufeff\u2028\U0010ffff",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    ByteTokenizer().save(folder, 32)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_tokenizer_of_an_export_gives_bytes(text: str, tokenizer: Any) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode()) == ByteTokenizer().encode(text).tolist()
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert tokenizer(text)["input_ids"] == ids, "no token is added that training has not seen"


def test_every_byte_decodes_as_ours_does(tokenizer: Any) -> None:
    ids = [*range(256), 256, *range(255, -1, -1)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ByteTokenizer().decode(ids)


def test_the_end_of_a_document_is_a_token(tokenizer: Any) -> None:
    assert tokenizer.eos_token_id == ByteTokenizer.end_of_document == len(tokenizer) - 1
    assert tokenizer.model_max_length == 32


def test_a_model_for_which_a_gpu_has_no_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(80_000_000_001)  # without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80_000_000_000, 0))
    check_room(80_000_000_000)
    with pytest.raises(ValueError, match="put CUDA_VISIBLE_DEVICES= before the command"):
        check_room(80_000_000_001)
