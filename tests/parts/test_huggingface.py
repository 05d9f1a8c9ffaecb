"""Conversion to and from Hugging Face, and what is refused of a folder."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from megatron_noloco.cli.exit_codes import StoppedError
from megatron_noloco.cli.huggingface import _say_losses
from megatron_noloco.config import RunConfig, load_config
from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.huggingface import evaluate, export, whole_model
from megatron_noloco.huggingface import folder as folder_of_a_model
from megatron_noloco.huggingface.evaluate import Result
from megatron_noloco.huggingface.folder import ModelFolder, model_fields
from megatron_noloco.huggingface.pretrained import import_folder
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.huggingface.whole_model import check_room
from megatron_noloco.model.families import Parameter, architecture_of, table_of
from megatron_noloco.preflight import newcomer
from megatron_noloco.preflight.inviting import keys_of_inviter
from tests.kit.chats import TEMPLATE
from tests.kit.configs import SMALLEST
from tests.kit.faults import full_disk
from tests.kit.golden import check
from tests.kit.hf_folders import (
    HEADS,
    HIDDEN,
    MODELS,
    VOCABULARY,
    YARN,
    change_weights,
    exported,
    hf_config,
    make_model,
    random_weights,
    write_folder,
)
from tests.kit.ranks import REPOSITORY, call, output_of, refusal_of, run_command, run_ranks
from tests.kit.tokenizers import make_tokenizer, tokenizer_at, write_tokenizer

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
    assert ModelFolder(tmp_path).architecture == model


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
    found = architecture_of(transformers.AutoConfig.for_model(**keys))
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
    assert raw["model"] == model_fields(ModelFolder(tmp_path).architecture) | settings
    assert raw["training"]["pretrained"] == raw["data"]["tokenizer_model"] == f"models/{name}"


def bases(base: float, factor: float | None) -> dict[str, Any]:
    return {"rotary_base": base, "rope_scaling_factor": factor}


def yarn(**rope: Any) -> dict[str, Any]:
    return {"rope_scaling": rope, "rope_parameters": MISSING, "max_position_embeddings": 32768}


YARN_FIELDS = YARN | {"yarn_original_max_position_embeddings": 32768, "rope_scaling_factor": None}
# What transformers takes for keys that a config.json lacks, and rotary embeddings as published
READ_AS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("mistral", {"sliding_window": MISSING}, {"sliding_window": 4096}),
    (
        "mixtral",
        {"rope_parameters": MISSING, "rms_norm_eps": MISSING},
        bases(1e6, None) | {"norm_epsilon": 1e-5},
    ),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, {}),
    ("qwen2", {"head_dim": MISSING, "hidden_size": 24}, {"kv_channels": 6}),
    ("qwen3_moe", {"num_local_experts": MISSING, "num_experts": 7}, {"num_moe_experts": 7}),  # as published
    ("starcoder2", {"tie_word_embeddings": MISSING, "norm_epsilon": MISSING}, {"tied_embeddings": True}),
    ("llama", {"rope_scaling": None, "rope_parameters": MISSING, "rope_theta": 5e5}, bases(5e5, None)),
    ("llama", {"rope_scaling": LLAMA3, "rope_parameters": MISSING, "rope_theta": 5e5}, bases(5e5, 8.0)),
    ("qwen2", yarn(type="yarn", factor=4.0, original_max_position_embeddings=32768), YARN_FIELDS),  # Qwen2.5
    ("qwen3", yarn(rope_type="yarn", factor=4.0), YARN_FIELDS),  # transformers takes max_position_embeddings
]


@pytest.mark.parametrize(("family", "keys", "expected"), READ_AS, ids=range(len(READ_AS)))
def test_a_config_is_read_as_transformers_reads_it(
    tmp_path: Path, family: str, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(make_model(model=family))))
    change_config(**keys)(tmp_path)
    found = ModelFolder(tmp_path).architecture
    assert {name: getattr(found, name) for name in expected} == expected


# What is refused: one line, exit code 2


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def write(name: str, content: str) -> Spoil:
    return lambda folder: (folder / name).write_text(content)


def add_a_tokenizer_of_words(folder: Path, **others: int) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    vocabulary = {"byte": 0, "[UNK]": 1, **others}
    Backend(models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>"} if "</s>" in others else {})
    )


Q = "model.layers.1.self_attn.q_proj.weight"
HF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def change_weight(name: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    return change_weights(lambda weights: weights.update({name: change(weights[name])}))


WINDOWS = {"use_sliding_window": True, "max_window_layers": 1}
# Family, keys that are changed in its config: a row for each rule
NOT_READ: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"model_type": "gpt2"}),
    ("llama", {"num_hidden_layers": None}),
    ("llama", {"hidden_size": "20"}),
    ("llama", {"num_hidden_layers": 10**6}),
    ("llama", {"num_key_value_heads": 3}),
    ("llama", {"attention_dropout": 1.5}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": "warm"}}),
    ("llama", {"quantization_config": {"bits": 4, "quant_method": "gptq"}}),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}),
    ("qwen2", {"rope_parameters": LLAMA3}),
    ("qwen2", WINDOWS),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("qwen2", {"rope_parameters": HF_YARN | {"attention_factor": 1.0}}),
    ("qwen3", {"rope_parameters": HF_YARN | {"beta_fast": 16.0}}),
    ("mistral", {"sliding_window": 0}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", WINDOWS),
    ("starcoder2", {"hidden_act": "silu"}),
    ("starcoder2", {"residual_dropout": 0.2, "embedding_dropout": 0.1}),
]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def spoil_index(content: str) -> Spoil:
    return write("model.safetensors.index.json", content)


# What is done to the folder of a Llama
SPOILT: dict[str, Spoil] = {
    "no folder": shutil.rmtree,
    "config.json is no JSON": write("config.json", "{"),
    "an index without files": spoil_index("{}"),
    "an index with a file that is missing": spoil_index('{"weight_map": {"a": "model-1.safetensors"}}'),
    "no safetensors": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "a file that is cut short": cut_short,
    "integers": change_weight(Q, lambda w: w.to(torch.int8)),
    "another shape": change_weight(Q, lambda w: w[:-1]),
    "a tensor too few": change_weights(lambda w: w.pop(Q)),
    "a bias": change_weights(lambda w: w.update({Q.replace("weight", "bias"): torch.ones(24)})),
    "a layer too many": change_config(num_hidden_layers=1),
    "names of another program": change_weights(
        lambda w: [w.update({f"module.{name}": w.pop(name)}) for name in sorted(w)]
    ),
    "no head": change_weights(lambda w: w.pop(HEAD)),
    "a tied head of its own": lambda folder: (
        change_config(tie_word_embeddings=True)(folder),
        change_weight(HEAD, lambda w: w + 1)(folder),
    ),
    "a tokenizer without an end": add_a_tokenizer_of_words,
    "a tokenizer with more tokens": lambda folder: add_a_tokenizer_of_words(folder, **{"</s>": 259}),
    "a tokenizer.json that is none": write("tokenizer.json", "{"),
}


def test_what_cannot_be_imported_is_said(tmp_path: Path) -> None:
    """In one line, in tests/golden/import.txt."""

    def cases() -> Iterator[tuple[str, str]]:
        folders = (tmp_path / str(number) for number in count())
        spoilt = [(f"{family} {keys}", family, change_config(**keys)) for family, keys in NOT_READ]
        spoilt += [(name, "llama", spoil) for name, spoil in SPOILT.items()]
        for name, family, spoil in spoilt:
            folder = write_folder(next(folders), make_model(multiple=1, model=family))
            spoil(folder)
            with pytest.raises(UserError) as caught:
                import_folder(ModelFolder(folder), RunConfig(**SMALLEST))
            yield name, str(caught.value).replace(str(folder), "FOLDER").replace(str(Path.cwd()), "HERE")

    check("import", cases())


def test_a_tied_head_may_be_written_twice(tmp_path: Path) -> None:
    """As in the published Qwen3 0.6B; old folders also have a buffer."""
    folder = write_folder(tmp_path, make_model(tied=True, multiple=1))
    change_weights(lambda w: w.update({HEAD: w[EMBEDDING], "model.rotary_emb.inv_freq": w[EMBEDDING][0]}))(
        folder
    )
    with PretrainedWeights(folder, ModelFolder(folder).architecture) as read:
        assert torch.equal(read("embedding.word_embeddings.weight"), torch.ones(VOCABULARY, HIDDEN))


def test_import_compares_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what no rule names is found, such as another base of the rotary embeddings."""
    model = make_model(multiple=1)
    folder = write_folder(tmp_path / "theirs", model, exported(random_weights(model), model))
    (command, output) = import_of(folder)
    said = run_command(*map(str, command[:-1]))
    assert "model.seq_length: 16 tokens, as the config has it; the model's own context is 32 tokens" in said
    assert "logits: largest difference from those of transformers" in said[1]
    output.unlink()
    assert "logits:" not in output_of(*command)

    def refusal(rank: int, world_size: int) -> str:
        read_otherwise = ModelFolder(folder)
        monkeypatch.setattr(read_otherwise, "architecture", replace(model, rotary_base=2e4))
        with pytest.raises(UserError) as caught:
            whole_model.check_import(read_otherwise)
        return str(caught.value)

    assert f"{folder}: its logits under transformers differ" in run_ranks(1, refusal)[0]


def test_import_names_tensors_that_transformers_would_make_up(tmp_path: Path) -> None:
    """Its biases would be zeros, so the logits agree."""
    model = make_model(multiple=1)
    folder = write_folder(tmp_path / "theirs", model, exported(random_weights(model), model))
    change_config(attention_bias=True)(folder)
    (command, output) = import_of(folder)
    code, _, err = call(*map(str, command[:-1]))
    assert (code, output.exists()) == (2, False)
    assert err.startswith(f"{folder}: no tensor model.layers.0.self_attn.k_proj.bias, ")


def test_import_takes_the_sizes_that_the_config_lacks(tmp_path: Path) -> None:
    model = make_model(multiple=1)
    folder = write_folder(tmp_path / "theirs", model)
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length")
    without = {name: value for name, value in SMALLEST["model"].items() if name not in sizes}
    (command, output) = import_of(folder, {"model": without})
    lines = output_of(*command)
    assert "model.seq_length: 32 tokens, which is the model's own context" in lines
    assert lines.splitlines()[-1] == f"Start it with: launch/mpirun.sh N {output}, for N ranks"
    given = json.loads(output.read_text())["model"]
    assert {name: given[name] for name in sizes} == {name: getattr(model, name) for name in sizes}


def test_import_alone_writes_a_run_of_separate_jobs(
    model_of_bytes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a layout for the GPUs of this machine, here two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(newcomer, "memory_of_gpus", lambda: [8 * 10**9] * 2)
    (tmp_path / "my-texts").mkdir()
    (tmp_path / "my-texts" / "a.jsonl").write_text('{"text": "Hello."}\n')
    options = ["--data", "my-texts", "--rendezvous", "tcp://first:29600", "--output", "my-run.json"]
    lines = output_of("import", model_of_bytes, *options, "--no-check").splitlines()
    assert lines[-2:] == [
        "Start it with: megatron-noloco train my-run.json --replica 0",
        "Then, for each further machine: megatron-noloco invite my-run.json",
    ]
    config = load_config("my-run.json")
    assert config.model.seq_length == 32
    assert config.data.text == "my-texts"
    assert config.parallel.data_parallel_size == 2
    assert (config.replica_batch, config.training.output_dir) == (16, "runs/my-run")
    assert config.federation.rendezvous == "tcp://first:29600"
    assert keys_of_inviter(config, "my-run.json", None, None).can_invite
    output_of("import", model_of_bytes, "--data", "my-texts", "--output", "one-job.json", "--no-check")
    # one job measures how often it can exchange, separate jobs cannot choose that together
    assert [run.noloco.most_waiting for run in (config, load_config("one-job.json"))] == [None, 0.1]


@pytest.mark.parametrize("room", [0, 1000], ids=["nothing", "the key"])
def test_an_import_on_a_full_disk_can_be_given_again(
    room: int, model_of_bytes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Hello.")
    options = [
        "--data",
        "a.txt",
        "--rendezvous",
        "tcp://first:29600",
        "--output",
        "my-run.json",
        "--no-check",
    ]
    output_of("import", model_of_bytes, *options)  # its tokenizer is in the cache now
    for made in ("my-run.json", "my-run.key"):
        Path(made).unlink()
    with full_disk(room):
        assert "cannot be written: File too large" in refusal_of("import", model_of_bytes, *options)
    assert [path.name for path in tmp_path.glob("*my-run*")] == ["my-run.key"] * (room > 0)
    output_of("import", model_of_bytes, *options)
    assert keys_of_inviter(load_config("my-run.json"), "my-run.json", None, None).can_invite


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("", "import: --data is missing: a file or folder of text to train on; or --config, "),
        ("--data no-texts", "data.text: no file or folder at no-texts"),
        ("--data txt=a.txt", "data.txt is not a known key; did you mean data.text?"),
        (
            "--data a.txt --rendezvous first:29600",
            'import: --rendezvous: federation.rendezvous: "first:29600" is',
        ),
    ],
)
def test_an_import_that_cannot_start_writes_nothing(
    model_of_bytes: Path, tmp_path: Path, options: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Hello.")
    before = {*tmp_path.iterdir()}
    rendezvous = [] if "--rendezvous" in options else ["--rendezvous", "tcp://first:29600"]
    said = refusal_of("import", model_of_bytes, *options.split(), *rendezvous, "--output", "my-run.json")
    assert said.startswith(line)
    assert {*tmp_path.iterdir()} == before


def import_of(folder: Path, changes: dict[str, Any] | None = None) -> tuple[list[Any], Path]:
    """Return a command that imports the folder into the smallest config with changes, and what it writes."""
    config, output = folder.parent / "config.json", folder.parent / "imported.json"
    output.unlink(missing_ok=True)  # it is not overwritten
    config.write_text(json.dumps(SMALLEST | (changes or {})))
    return ["import", folder, "--config", config, "--output", output, "--no-check"], output


def imported(folder: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    command, output = import_of(folder, changes)
    output_of(*command)
    return json.loads(output.read_text())


def refused_import(folder: Path, changes: dict[str, Any] | None = None) -> str:
    command, output = import_of(folder, changes)
    line = refusal_of(*command)
    assert not output.exists()
    return line


def test_an_unchecked_export_is_no_model_yet(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "theirs", make_model())
    command, config = import_of(folder)
    output_of(*command)
    unchecked = folder.rename(tmp_path / export.UNCHECKED)
    folder.mkdir()
    unchecked.rename(folder / export.UNCHECKED)
    no_model = f"{folder}: no checkpoint here", f"{folder}/config.json: No such file"
    for command in (
        ["generate", folder, "--prompt", "a"],
        ["evaluate", folder, "--data", "text"],
        ["import", folder, "--config", config, "--output", tmp_path / "again.json"],
        ["config", "--check", config],
    ):
        assert any(line in refusal_of(*command) for line in no_model)


@pytest.fixture
def model_of_bytes(tmp_path: Path) -> Path:
    """Return a folder with random weights and the tokenizer of bytes."""
    model = make_model()
    folder = write_folder(tmp_path / "theirs", model, exported(random_weights(model), model))
    ByteTokenizer().save(folder, 32)
    return folder


def test_generation_config_that_cannot_be_read_is_one_line(model_of_bytes: Path) -> None:
    (model_of_bytes / "generation_config.json").write_text("[1]")
    line = refusal_of("generate", model_of_bytes, "--prompt", "the", "--tokens", "2")
    assert line.startswith(f"{model_of_bytes}: transformers: ")


def test_generation_makes_up_no_weights(model_of_bytes: Path) -> None:
    tensors = load_file(model_of_bytes / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model_of_bytes / "model.safetensors", {"format": "pt"})
    line = refusal_of("generate", model_of_bytes, "--prompt", "the")
    assert line.startswith(f"{model_of_bytes}: no tensor lm_head.weight, which transformers' model")


@pytest.mark.parametrize(("tokens", "expected"), [(2, 2), (100, 29)], ids=["as told", "a full context"])
def test_so_many_tokens_are_generated(model_of_bytes: Path, tokens: int, expected: int) -> None:
    """Of a context of 32 tokens the prompt takes three. An untrained model does not end by itself."""
    config = {"eos_token_id": None, "suppress_tokens": list(range(128, 259))}  # one character for each token
    (model_of_bytes / "generation_config.json").write_text(json.dumps(config))
    code, text, _ = call("generate", str(model_of_bytes), "--prompt", "the", "--tokens", str(tokens))
    assert code == 0
    assert text.startswith("the")
    assert len(text.removesuffix("\n")) == 3 + expected


def test_a_prompt_that_fills_the_context_is_refused(model_of_bytes: Path) -> None:
    line = refusal_of("generate", model_of_bytes, "--prompt", 32 * "a")
    assert line == "--prompt: 32 tokens, and the model's context has 32; give a shorter text"


def test_a_model_answers_a_message(model_of_bytes: Path) -> None:
    command = ["generate", str(model_of_bytes), "--chat", "--prompt", "the", "--tokens", "2"]
    assert "chat_template" in refusal_of(*command)
    (model_of_bytes / "chat_template.jinja").write_text(TEMPLATE)
    code, text, _ = call(*command)
    assert code == 0
    assert text.startswith("<user>the\n<assistant>")


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
    assert said(None) == f"--data {data}: left out: 1 file not in UTF-8 (b.png)\n"


@pytest.mark.parametrize("end", ["</s>", "<|endoftext|>"])
def test_an_exported_byte_tokenizer_is_the_byte_tokenizer(end: str, tmp_path: Path) -> None:
    """So an export is evaluated on the datasets of its run; another end of documents makes another tokenizer."""
    ByteTokenizer().save(tmp_path, 32)
    if end == "</s>":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            path = tmp_path / name
            path.write_text(path.read_text().replace('"<|endoftext|>"', '"</s>"').replace(": 256", ": 257"))
    assert isinstance(
        ModelFolder(tmp_path).tokenizer(None), ByteTokenizer if end == "<|endoftext|>" else Tokenizer
    )


def test_a_tokenizer_of_other_files_is_the_models(tmp_path: Path) -> None:
    """As of GPT-2; taken for none, the run would read bytes."""
    make_tokenizer(made := tmp_path / "made")
    (folder := tmp_path / "theirs").mkdir()
    backend = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    backend.model.save(str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["merges.txt", "vocab.json"]
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = ModelFolder(folder).tokenizer(str(tmp_path / "cache"))
    assert found is not None
    assert found.encode("two three").tolist() == backend.encode("two three").ids
    (folder / "vocab.json").unlink()
    with pytest.raises(UserError, match="transformers cannot read it"):
        ModelFolder(folder).tokenizer(str(tmp_path / "cache"))


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
    tokenizer = tokenizer_at(folder).backend
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    expected = SMALLEST["data"] | {"tokenizer_model": str(folder), "prepend_bos": not given}
    assert imported(folder, {"data": SMALLEST["data"] | given})["data"] == expected
    line = f"data.prepend_bos: {folder} puts BOS before each text, and this run does not; set it to true"
    said = ModelFolder(folder).missing_bos(DataConfig(text="a", tokenizer_model=str(folder), **given))
    assert said.startswith(line) != bool(given)
    for field in ("sft_data_path", "data_path"):
        (command, _) = import_of(folder, {"data": {field: "a"}})
        assert ("a dataset in data_path must have" in output_of(*command)) == (field == "data_path")


def test_an_import_reads_each_part_of_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tokenizer(write_folder(tmp_path / "llama", make_model(model="llama")), pieces=0)
    cache = str(tmp_path / "cache")
    ModelFolder(path).tokenizer(cache)  # AutoTokenizer, which this calls, reads the config for itself
    config = Mock(side_effect=transformers.AutoConfig.from_pretrained)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", config)
    built = Mock(side_effect=folder_of_a_model.build_tokenizer)
    monkeypatch.setattr(folder_of_a_model, "build_tokenizer", built)
    folder, data = ModelFolder(path), {"text": "a", "cache": cache}
    run, _ = import_folder(
        folder, RunConfig(**SMALLEST | {"model": SMALLEST["model"] | folder.sizes, "data": data})
    )
    tokenizer = folder.tokenizer(run.data.cache)
    assert tokenizer is not None
    folder.check_fits(folder.architecture, tokenizer, run.data.cache)
    assert run.data.prepend_bos == tokenizer.adds_bos
    assert folder.missing_bos(run.data) == ""
    assert (config.call_count, built.call_count) == (1, 1)


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
    results = [Result("replica 0", "a", math.nan, 9, 1.0), Result("mean model", "a", 1.0, 9, 1.0)]
    with pytest.raises(StoppedError, match="the loss is not finite: replica 0 on a; training has diverged"):
        _say_losses(results)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_tokenizers_are_told_apart_by_any_token(tmp_path: Path) -> None:
    """One with further tokens is not refused: their rows of the embedding are there, and may be trained."""
    theirs, more, other = (tmp_path / name for name in ("theirs", "more", "other"))
    model = make_model()
    for folder, words in ((theirs, {"a": 3}), (more, {"a": 3, "b": 4}), (other, {"b": 3})):
        write_folder(folder, model)
        add_a_tokenizer_of_words(folder, **{"</s>": 2}, **words)
    cache, folder = str(tmp_path / "cache"), ModelFolder(theirs)  # of the run
    folder.check_fits(model, tokenizer_at(theirs), cache)
    assert isinstance(folder.tokenizer(cache), Tokenizer)
    assert len([*Path(cache).iterdir()]) == 1
    folder.check_fits(model, tokenizer_at(more), None)
    with pytest.raises(ValueError, match=f"theirs: the model's tokenizer .* than the run's in {other}; to"):
        folder.check_fits(model, tokenizer_at(other), None)


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
    folder = ModelFolder(write_folder(tmp_path, make_model()))
    folder.check_fits(make_model(), ByteTokenizer(), None)
    other = replace(make_model(model="mistral with a window"), num_layers=3)
    with pytest.raises(ValueError, match=r"family is 'mistral', but 'llama' in .*\n.*num_layers is 3, but 2"):
        folder.check_fits(other, ByteTokenizer(), None)


# The files


def test_files_hold_at_most_what_is_allowed_or_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (3, 2, 4, 9, 1, 1, 1)
    table = [Parameter(str(n), (size,), hf=(f"{n}: {size}",)) for n, size in enumerate(sizes)]
    monkeypatch.setattr(export, "table_of", lambda _: table)
    weights = {row.name: torch.rand(row.shape) for row in table}
    source = Mock(replicas=[0])
    source.reader.return_value.read = lambda name, replicas: weights[name]
    export._write_weights(source, tmp_path, torch.bfloat16, 10)
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    assert found.keys() == {f"{n}: {size}" for n, size in enumerate(sizes)}
    assert all(len(held) == 1 or 2 * sum(map(len, held.values())) <= 10 for held in files.values())
    assert len(files) == 4
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
    assert index["metadata"]["total_size"] == 2 * sum(sizes)


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
    (folder / "unchecked" / "old").mkdir(parents=True)
    (folder / "unchecked" / "old" / "file").touch()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    before = folder.stat().st_ino
    unchecked = export.export(trained(), Path(output), "float32", 10**9)
    assert not (unchecked / "old").exists()
    monkeypatch.setattr(export, "check_logits", lambda *_: 0.0)
    export.check_export(trained(), unchecked)
    assert (folder / "model.safetensors").exists()
    assert json.loads((folder / "config.json").read_text()).items() >= DROPOUT.items()
    assert not (folder / "unchecked").exists()
    assert folder.stat().st_ino == before
    assert (tmp_path / "link").is_symlink()


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
