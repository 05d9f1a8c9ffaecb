"""The config room: every rule as one edit to a good file and the words the user reads for it."""

import copy
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from megatron_noloco.cli.main import main
from megatron_noloco.config import (
    ConfigError,
    RunConfig,
    describe,
    explain,
    load_config,
)
from megatron_noloco.config.optimizer_block import OPTIMIZERS, SCHEDULES
from megatron_noloco.config.run_config import File
from megatron_noloco.config.wording import ALIASES, HINTS, NOT_SUPPORTED, fields_of
from megatron_noloco.data.sources import Blend, IndexedSource, Split, TextSource, TokenizerChoice
from megatron_noloco.model.architecture import Architecture, Compute
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Place, Topology
from megatron_noloco.training import prepare

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.json"))
MISSING = object()

FEDERATION = {
    "parallel.replicas": MISSING,
    "noloco.routing": {"interval": "off"},
    "federation": {"slots": 4, "rendezvous": "file://there", "encryption": "none"},
}
GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "noloco": {"local_steps": 5},
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 32,
    },
    "parallel": {"replicas": 4, "pipeline_model_parallel_size": 2},
    "data": {"text": "python-stdlib"},
    "training": {"train_iters": 10},
}
FP16 = {"fp16": {"enabled": True}}
INCREASING = {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
STEPS = {"total_num_steps": "auto", "decay_num_steps": 4}


def edited(edits: dict[str, Any]) -> dict[str, Any]:
    """GOOD with dotted keys set, or removed where the value is MISSING."""
    raw = copy.deepcopy(GOOD)
    for dotted, value in edits.items():
        *blocks, name = dotted.split(".")
        place = raw
        for block in blocks:
            place = place.setdefault(block, {})
        if value is MISSING:
            del place[name]
        else:
            place[name] = copy.deepcopy(value)
    return raw


def config(**edits: Any) -> RunConfig:
    """GOOD with edits; `__` stands for the dot."""
    return RunConfig.from_dict(edited({name.replace("__", "."): value for name, value in edits.items()}))


# How each form of a line reads, once: the key, its value, and what the line says of the key.
LINES: list[tuple[str, Any, str]] = [
    # keys that are not known: the nearest, the same name elsewhere, the name of another program
    ("noloco.local_stpes", 5, " is not a known key; did you mean noloco.local_steps?"),
    ("trainning", {}, " is not a known key; did you mean training?"),
    ("zero_optimization.stge", 1, " is not a known key; did you mean zero_optimization.stage?"),
    ("optimizer.parms", {}, " is not a known key; did you mean optimizer.params?"),
    ("optimizer.params.beta", 8, " is not a known key; did you mean optimizer.params.betas?"),
    ("zzz", 1, " is not a known key"),
    ("train_iters", 5, " is not a known key; did you mean training.train_iters?"),
    ("training.eval_mean_model", True, " is not a known key; did you mean evaluation.mean_model?"),
    ("training.tensorboard", True, " is not a known key; did you mean tensorboard?"),
    (
        "model.interval",
        5,
        " is not a known key; did you mean noloco.routing.interval or evaluation.interval?",
    ),
    ("training.micro_batch_size", 8, " is not a known key; did you mean train_micro_batch_size_per_gpu?"),
    ("noloco.H", 8, " is not a known key; did you mean noloco.local_steps?"),
    (
        "model.tie_word_embeddings",
        True,
        " is not a known key; model.untie_embeddings_and_output_weights says the opposite",
    ),
    ("cuda_graph_impl", "local", " is not a known key; not supported: a graph would freeze the routes"),
    # keys of DeepSpeed that are refused
    (
        "pipeline",
        {"stages": 2},
        " cannot be used here: Megatron-core's, use parallel.pipeline_model_parallel_size",
    ),
    ("steps_per_print", 10, " has no effect here; leave it out"),
    ("zero_optimization.stage3_max_live_parameters", 5, " has no effect here; leave it out"),
    (
        "zero_optimization.overlap_comm",
        True,
        " cannot be used here: gradients are reduced once, after all microbatches",
    ),
    ("checkpoint.tag_validation", "FAIL", " has no effect here; leave it out"),
    (
        "tensorboard.job_name",
        "x",
        " cannot be used here: events are written to training.output_dir/replica_XX",
    ),
    # names of optimizers and schedules
    ("optimizer.type", "sgd", ": 'sgd' is not a known optimizer; did you mean SGD?"),
    ("optimizer.type", "Lamb", ": 'Lamb' is not a known optimizer; known are AdamW, Adam, Muon, Lion, SGD"),
    ("optimizer.type", "RMSprop", ": 'RMSprop' is not a known optimizer; not supported: use AdamW"),
    ("scheduler.type", "OneCycle", ": 'OneCycle' is not a known scheduler; not supported: use WSD"),
    ("scheduler.type", "wsd", ": 'wsd' is not a known scheduler; did you mean WSD?"),
    # what is missing
    ("training", MISSING, " is missing (an object with train_iters)"),
    ("training.train_iters", MISSING, " is missing (an integer >= 1: Local steps of the whole run.)"),
    (
        "optimizer",
        MISSING,
        ' is missing (an object with type: such as {"type": "AdamW", "params": {"lr": 3e-4}})',
    ),
    # types and bounds
    ("training.train_iters", "ten", ": must be an integer >= 1, got 'ten'"),
    ("training.train_iters", True, ": must be an integer >= 1, got true"),
    ("training.train_iters", 1000.0, ": must be an integer >= 1, got 1000.0"),
    ("training.train_iters", 0, ": must be an integer >= 1, got 0"),
    ("noloco.outer_momentum", 1, ": must be a number >= 0 and < 1, got 1"),
    ("noloco.outer_lr", float("nan"), ": must be a number > 0, got NaN"),
    ("noloco.consensus_weight", -0.1, ": must be a number >= 0 or null, got -0.1"),
    ("noloco.method", "nolocko", ': must be one of "noloco", "diloco", got \'nolocko\''),
    ("noloco.overlap.delay_steps", -1, ': must be an integer >= 0 or "auto", got -1'),
    ("noloco.routing", "off", ": must be an object with interval, got 'off'"),
    (
        "model.family",
        "bloom",
        ': must be one of "llama", "qwen2", "qwen3", "mistral", "mixtral", got \'bloom\'',
    ),
    ("data.text", "", ": must be text that is not empty or null, got ''"),
    ("data.data_path", 3, ": must be text that is not empty or a list of text or a number or null, got 3"),
    ("optimizer", "AdamW", ": must be an object with type, got 'AdamW'"),
    ("optimizer.type", ["AdamW"], ': must be text, got ["AdamW"]'),
    ("optimizer.params.lr", "auto", ": must be a number >= 0, got 'auto'"),
    ("optimizer.params.betas", [0.9], ": must be a list of 2, each a number >= 0 and < 1, got [0.9]"),
    ("bf16.enabled", 1, ": must be true or false, got 1"),
    ("zero_optimization.reduce_bucket_size", "1000", ": must be an integer >= 1, got '1000'"),
    ("gradient_clipping", "x" * 80, f": must be a number >= 0, got '{'x' * 56}..."),
]

# Each rule, with a part of its line that names the field.
RULES: list[tuple[dict[str, Any], str]] = [
    # the method
    ({"noloco.fragments": 6}, "noloco: fragments 6 is more than local_steps 5"),
    (
        {"noloco.grouping": "stage", "model.untie_embeddings_and_output_weights": False},
        "would average their copies of it with different replicas, and these would drift apart; use",
    ),
    ({"noloco.local_steps": 11}, "noloco.local_steps 11 is more than training.train_iters 10: the run"),
    ({"noloco.outer_momentum": 0.9}, "rho = 1.098 >= 1 for outer_momentum (alpha) 0.9, consensus_weight"),
    ({"noloco.consensus_weight": 0}, "no outer_momentum is stable with this gamma; consensus_weight 0.01 is"),
    ({"noloco.group_size": 5}, "noloco: group_size 5 is more than the 4 replicas"),
    # a federation
    ({"federation.rendezvous": "file://there"}, "federation.slots is missing"),
    (FEDERATION | {"parallel.replicas": 4}, "parallel.replicas 4: a job of a federation is one replica"),
    (FEDERATION | {"noloco.enabled": False}, "noloco.enabled false: a federation is there for rounds"),
    (FEDERATION | {"noloco.final_average": True}, "noloco.final_average needs all replicas at the same time"),
    (FEDERATION | {"noloco.transport": "mpi"}, 'noloco.transport "mpi": a federation has a transport of'),
    (FEDERATION | {"noloco.routing": {}}, 'noloco.routing.interval "round": a local step would wait for'),
    (FEDERATION | {"federation.slots": 6, "noloco.pairing": "cycle"}, "takes groups of 2 and 3 for 6"),
    # DeepSpeed's keys
    ({"train_batch_size": 9}, "train_batch_size 9 is not train_micro_batch_size_per_gpu 4 x"),
    ({"train_batch_size": 6, "gradient_accumulation_steps": "auto"}, "train_batch_size 6 does not divide"),
    ({"train_micro_batch_size_per_gpu": MISSING}, "train_micro_batch_size_per_gpu or train_batch_size is"),
    ({"zero_optimization.stage": 2}, "zero_optimization.stage: 2 is not supported, use 0 or 1"),
    ({"bf16.enabled": True, **FP16}, "bf16 and fp16 are both enabled"),
    (FP16, "fp16 with a dynamic loss scale does not go together with routing"),
    ({"fp16": {"enabled": True, "loss_scale": 0}, "parallel.replicas": "auto"}, "dynamic loss scale"),
    # the optimizer and its schedules
    (
        {"optimizer.params": {"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}},
        'optimizer.params.start_weight_decay is missing (weight_decay_incr_style "linear" goes from',
    ),
    ({"optimizer.params": {"start_weight_decay": 0.1}}, "optimizer.params.start_weight_decay needs"),
    ({"optimizer.params": {**INCREASING, "weight_decay": 0.1}}, "optimizer.params.weight_decay and"),
    ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "optimizer.params.nesterov needs a"),
    ({"optimizer": {"type": "Muon", "params": {"nesterov": True}}}, "optimizer.params.nesterov is not a"),
    (
        {"optimizer": {"type": "Muon", "params": {"adam_lr": 0.001}}, "scheduler": {"type": "WarmupLR"}},
        "scheduler.type WarmupLR sets one learning rate for all weights, but optimizer.params.muon_lr 0.02 is not "
        "adam_lr 0.001; use WarmupCosineLR or WSD",
    ),
    (
        {
            "optimizer.params": {"lr": 0.02, "decoupled_lr": 0.001},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 1}},
        },
        "scheduler.type WarmupDecayLR sets one learning rate for all weights, but optimizer.params.lr 0.02 is not "
        "decoupled_lr 0.001; use WarmupCosineLR or WSD",
    ),
    (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 11}}},
        "scheduler.params.warmup_num_steps 11 is more than scheduler.params.total_num_steps 10",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
        "warmup_num_steps 1000 (DeepSpeed's default) is more than scheduler.params.total_num_steps 10",
    ),
    (
        {"scheduler": {"type": "WSD", "params": {**STEPS, "warmup_num_steps": 9}}},
        "scheduler.params: warmup_num_steps 9 + decay_num_steps 4 is more than total_num_steps 10",
    ),
    # the data
    ({"data.text": MISSING}, "data.text is missing"),
    ({"data.data_path": "prefix"}, "data.text and data.data_path both say what is read"),
    ({"data.split": "1,2,3,4"}, "data.split: must be up to three weights"),
    ({"data.split": "0,1,1"}, "data.split: must be up to three weights"),
    ({"data.split": "9,x,1"}, "data.split: must be up to three weights"),
    ({"data.split": "1"}, "leaves no text for validation"),
    ({"data.valid_data_path": "b"}, "data.valid_data_path goes together with data.train_data_path"),
    ({"data": {"train_data_path": "a"}}, "data.valid_data_path is missing, and evaluation.iters is 10"),
    ({"data": {"data_path": ["0.5", "a", "b"]}}, "data.data_path: must be one prefix, or weights > 0 and"),
    ({"data": {"data_path": [0, "a"]}}, "data.data_path: must be one prefix, or weights > 0 and"),
    ({"data": {"data_path": []}}, "data.data_path: must be one prefix, or weights > 0 and"),
    ({"data.tokenizer_type": "HuggingFaceTokenizer"}, "needs data.tokenizer_model, a folder with its files"),
    ({"data.tokenizer_model": "x"}, 'data.tokenizer_model needs data.tokenizer_type "HuggingFaceTokenizer"'),
    ({"data": {"sft_data_path": "a", "eod_mask_loss": True}}, "data.eod_mask_loss does not go together"),
    (
        {"data": {"sft_data_path": "a"}, "model.transformer_impl": "transformer_engine"},
        'data.sft_packing needs model.transformer_impl "local" (or "auto")',
    ),
    (
        {"data.reset_attention_mask": True, "model.transformer_impl": "transformer_engine"},
        'data.reset_attention_mask needs model.transformer_impl "local" (or "auto")',
    ),
    ({"data.sft_packing": False}, "data.sft_packing has a meaning only with data.sft_data_path"),
    ({"data.reset_position_ids": True}, "data.reset_position_ids needs data.reset_attention_mask: a rotary"),
    # the model
    ({"model.family": "qwen3", "model.rope_scaling_factor": 8.0}, "model.rope_scaling_factor is not a"),
    ({"model.sliding_window": 5}, 'model.sliding_window is not a field of the family "llama", only of'),
    (
        {"model.family": "mixtral", "parallel.tensor_model_parallel_size": 2},
        'family "mixtral" needs parallel.sequence_parallel true with parallel.tensor_model_parallel_size 2',
    ),
    ({"model.family": "mixtral", "model.moe_router_topk": 9}, "model.moe_router_topk 9 is more than"),
    ({"model.yarn_rotary_scaling_factor": 4.0}, "model.yarn_rotary_scaling_factor and"),
    (
        {
            "model.yarn_rotary_scaling_factor": 4.0,
            "model.yarn_original_max_position_embeddings": 64,
            "model.rope_scaling_factor": 8.0,
        },
        "model.rope_scaling_factor and YaRN scale the same rotary frequencies; leave one of them out",
    ),
    ({"model.hidden_size": 66}, "66 does not divide into 4 attention heads (66 / 4 = 16.50)"),
    ({"model.kv_channels": 15}, "model.kv_channels: a head of 15 channels has no rotary embedding"),
    ({"model.num_query_groups": 3}, "num_attention_heads 4 does not divide into model.num_query_groups 3"),
    ({"model.recompute_granularity": "full"}, 'recompute_granularity "full" needs model.recompute_method'),
    ({"model.recompute_method": "block"}, "model.recompute_method has a meaning only with"),
    ({"model.recompute_modules": ["mlp"]}, 'a meaning only with model.recompute_granularity "selective"'),
    (
        {"model.recompute_granularity": "selective", "model.recompute_modules": ["moe"]},
        'no layer of the family "llama" has "moe"',
    ),
    (
        {
            "model.recompute_granularity": "full",
            "model.recompute_method": "block",
            "model.recompute_num_layers": 3,
        },
        "model.recompute_num_layers 3 is more than the 2 layers of a model chunk",
    ),
    # the parallel layout
    ({"model.num_layers": 3}, "3 layers (model.num_layers) do not divide into 2 stages"),
    ({"parallel.virtual_pipeline_model_parallel_size": 4}, "do not divide into 2 stages x 4 virtual"),
    (
        {"parallel.pipeline_model_parallel_size": 1, "parallel.virtual_pipeline_model_parallel_size": 2},
        "size 2 needs parallel.pipeline_model_parallel_size > 1",
    ),
    (
        {"parallel.virtual_pipeline_model_parallel_size": 2, "gradient_accumulation_steps": 3},
        "3 / 2 stages = 1.50",
    ),
    (
        {
            "parallel.num_layers_in_first_pipeline_stage": 1,
            "parallel.account_for_loss_in_pipeline_split": True,
        },
        "both say how many layers",
    ),
    ({"parallel.tensor_model_parallel_size": 3}, "model.num_attention_heads 4 does not divide by"),
    (
        {"parallel.tensor_model_parallel_size": 4, "model.num_query_groups": 2},
        "model.num_query_groups 2 does not divide by parallel",
    ),
    (
        {"parallel.tensor_model_parallel_size": 4, "model.ffn_hidden_size": 130},
        "model.ffn_hidden_size 130 does not divide by parallel",
    ),
    (
        {
            "parallel.tensor_model_parallel_size": 4,
            "model.vocab_size": 5,
            "model.make_vocab_size_divisible_by": 3,
        },
        "the padded vocabulary 6 does not divide by parallel.tensor_model_parallel_size 4",
    ),
    (
        {
            "parallel.tensor_model_parallel_size": 4,
            "parallel.sequence_parallel": True,
            "model.seq_length": 30,
        },
        "model.seq_length 30 does not divide by parallel.tensor_model_parallel_size 4",
    ),
    ({"parallel.sequence_parallel": True}, "sequence_parallel needs parallel.tensor_model_parallel_size > 1"),
]


def problems_of(edits: dict[str, Any], folder: Path) -> list[str]:
    """Return the problems of GOOD with edits, read from a file, whose name begins every line."""
    path = folder / "run.json"
    path.write_text(json.dumps(edited(edits)))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


@pytest.mark.parametrize(("key", "value", "text"), LINES, ids=[f"{key}{text[:40]}" for key, _, text in LINES])
def test_the_line_for_a_wrong_key_or_value(tmp_path: Path, key: str, value: Any, text: str) -> None:
    assert problems_of({key: value}, tmp_path) == [key + text]


@pytest.mark.parametrize(("edits", "part"), RULES, ids=[part[:60] for _, part in RULES])
def test_each_rule_between_fields(tmp_path: Path, edits: dict[str, Any], part: str) -> None:
    assert [part in line for line in problems_of(edits, tmp_path)].count(True) == 1


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ('{"a": 1,\n "b" 2}', "is not valid JSON: line 2, column 6"),
        ('{"a": 1 // one\n}', "line 1, column 9: JSON has no comments; delete it"),
        ('{\n # one\n "a": 1}', "line 2, column 2: JSON has no comments; delete it"),
        ("[1, 2]", "must hold a JSON object, got [1, 2]"),
        ('{"noloco": {"local_steps": 1, "local_steps": 2}}', "noloco.local_steps is given more than once"),
        ('{"noloco": {}, "noloco": {}}', "noloco is given more than once"),
        ("{}", "model is missing"),
        ('{"model": ' * 2000 + "1" + "}" * 2000, "objects or lists are nested too deeply"),
        ("[" * 2000 + "]" * 2000, "objects or lists are nested too deeply"),
    ],
)
def test_a_file_that_is_not_one_json_object(tmp_path: Path, text: str, fragment: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json: ") as caught:
        load_config(path)
    assert fragment in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.json")
    (tmp_path / "latin.json").write_bytes(b'{"\xe9": 1}')
    with pytest.raises(ConfigError, match="byte 2 is 0xe9"):
        load_config(tmp_path / "latin.json")


def test_all_problems_are_reported_in_the_order_of_the_file() -> None:
    raw = {"zzz": 1, **edited({"training.train_iters": 0, "noloco.group_size": 0, "noloco.local_steps": 0})}
    raw["optimizer"] = {"type": "AdamW", "parms": {}}
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(raw)
    starts = [line.split(":")[0].split()[0] for line in caught.value.problems]
    assert starts == [
        "zzz",
        "optimizer.parms",
        "noloco.local_steps",
        "noloco.group_size",
        "training.train_iters",
    ]


def test_the_suggested_momentum_is_the_largest_stable_one() -> None:
    with pytest.raises(ConfigError) as caught:
        config(noloco__outer_momentum=0.9)
    suggested = float(str(caught.value).partition("; outer_momentum ")[2].split()[0])
    config(noloco__outer_momentum=suggested)
    with pytest.raises(ConfigError, match="drift apart"):
        config(noloco__outer_momentum=suggested + 0.01)


@pytest.mark.parametrize(("payload", "share"), [("fp16", "6 %"), ("bf16", "50 %")])
def test_rounded_weights_are_no_payload(payload: str, share: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(noloco__payload=payload)
    (line,) = caught.value.problems
    assert line.startswith(f'noloco.payload: "{payload}" rounds the weights themselves')
    assert f'at 300 it is {share} of the pull; "int16" takes the same bytes' in line
    with pytest.raises(
        ConfigError, match=r'noloco\.payload: must be one of "fp32", "int16", "int8", "int4", got'
    ):
        config(noloco__payload=["fp16"])


def test_the_error_of_a_payload_counts_for_the_drift() -> None:
    for payload in ("fp32", "int16", "int8"):
        config(noloco__consensus_weight=1.4, noloco__payload=payload)
    config(noloco__method="diloco", noloco__outer_momentum=0.95)
    for changes, where in (
        ({"consensus_weight": 1.4}, r"rho = 1\.123 >= 1 .* \(n\) 2, payload \"int4\"; outer_momentum 0\."),
        (
            {"method": "diloco", "outer_momentum": 0.95},
            r"\(n\) of all, payload \"int4\"; outer_momentum 0\.9",
        ),
    ):
        with pytest.raises(ConfigError, match=where):
            config(noloco__payload="int4", **{f"noloco__{name}": value for name, value in changes.items()})


def test_what_is_read() -> None:
    assert config().source == TextSource("python-stdlib", Split(0.949, 0.05, 0.001))
    assert config(data__split="3,1").source == TextSource("python-stdlib", Split(0.75, 0.25, 0.0))
    blend = Blend((("a", 0.25), ("b", 0.75)))
    indexed = config(data={"data_path": ["0.3", "a", 0.9, "b"], "split": "1,1"})
    assert indexed.source == IndexedSource(blend, None, Split(0.5, 0.5, 0.0))
    whole = {"train_data_path": "a", "valid_data_path": ["a"]}
    single = Blend((("a", 1.0),))
    assert config(data=whole).source == IndexedSource(single, single, None)


def test_the_tokenizer() -> None:
    assert config().tokenizer == TokenizerChoice("byte", None)
    choice = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "folder"}
    assert config(data={"text": "t", **choice}).tokenizer == TokenizerChoice(*choice.values())


def test_the_stability_rule_is_noloco_s_alone() -> None:
    config(noloco__outer_momentum=0.9, noloco__method="diloco")
    config(noloco__outer_momentum=0.9, noloco__enabled=False)
    config(noloco__outer_momentum=0.9, parallel__replicas=1)


def test_a_run_without_rounds_may_be_short() -> None:
    config(noloco__local_steps=11, noloco__enabled=False)
    config(noloco__local_steps=11, parallel__replicas=1)
    config(noloco__local_steps=10)


@pytest.mark.parametrize(
    ("given", "dp_size", "micro", "steps", "batch"),
    [
        ({"micro": 4, "steps": 2}, 3, 4, 2, 24),
        ({"micro": 4, "batch": 24}, 3, 4, 2, 24),
        ({"steps": 2, "batch": 24}, 3, 4, 2, 24),
        ({"micro": 4}, 3, 4, 1, 12),
        ({"batch": 24}, 3, 8, 1, 24),
        ({"micro": 4, "steps": "auto", "batch": 24}, 3, 4, 2, 24),
        ({"micro": 4, "steps": 2, "batch": 24}, 3, 4, 2, 24),
    ],
)
def test_batch_arithmetic(given: dict[str, Any], dp_size: int, micro: int, steps: int, batch: int) -> None:
    names = {
        "micro": "train_micro_batch_size_per_gpu",
        "steps": "gradient_accumulation_steps",
        "batch": "train_batch_size",
    }
    raw = edited({"parallel.data_parallel_size": dp_size, names["micro"]: MISSING, names["steps"]: MISSING})
    run = RunConfig.from_dict(raw | {names[key]: value for key, value in given.items()})
    assert (run.micro_batch_size, run.microbatches, run.replica_batch) == (micro, steps, batch)
    assert [run.deepspeed[names[key]] for key in ("micro", "steps", "batch")] == [micro, steps, batch]


def test_every_auto_is_resolved() -> None:
    run = config(
        gradient_clipping="auto",
        bf16={"enabled": "auto"},
        fp16={"enabled": "auto", "loss_scale": "auto"},
        zero_optimization={"stage": "auto", "reduce_bucket_size": "auto"},
        scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 10}},
    )
    assert "auto" not in json.dumps(run.deepspeed)
    assert run.deepspeed["gradient_clipping"] == 1.0
    assert run.deepspeed["zero_optimization"] == {"stage": 1}
    assert run.deepspeed["scheduler"]["params"]["total_num_steps"] == 10
    assert run.precision == "fp32"


def test_deepspeed_s_own_spellings_pass() -> None:
    """Whole numbers as its users write them; names of its optimizers in any case; null."""
    run = config(
        zero_optimization={"reduce_bucket_size": 5e8},
        fp16={"enabled": True, "loss_scale": 128},
        optimizer={"type": "adamw", "params": {"lr": 1}},
        scheduler=None,
    )
    assert run.deepspeed["zero_optimization"] == {"reduce_bucket_size": 5e8, "stage": 1}
    assert run.deepspeed["fp16"]["loss_scale"] == 128
    assert "scheduler" not in run.deepspeed


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}, {}, True, False])
def test_zero_0_is_run_as_1(zero: Any) -> None:
    assert config(zero_optimization=zero).deepspeed["zero_optimization"]["stage"] == 1


def test_precision() -> None:
    assert config(bf16__enabled=True).precision == "bf16"
    assert config(bfloat16__enabled=True).precision == "bf16"
    assert config(fp16={"enabled": True, "loss_scale": 128}).precision == "fp16"
    assert config(fp16__enabled=True, noloco__routing={"interval": "off"}).precision == "fp16"
    assert config(fp16__enabled=True, parallel__replicas=1).precision == "fp16"
    assert config().precision == "fp32"


def test_tensorboard_wandb_and_checkpoint_are_ours_alone() -> None:
    run = config(tensorboard={"enabled": False}, wandb={"enabled": True}, checkpoint={"save_interval": 5})
    assert not run.tensorboard.enabled
    assert config().tensorboard.enabled
    assert not {"tensorboard", "wandb", "checkpoint"} & run.deepspeed.keys()


def test_wandb_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^wandb.enabled: the package wandb is not installed; pip install wandb"
    ):
        prepare.check_start(config(wandb={"enabled": True}))
    prepare.check_start(config(wandb={"enabled": False}))


def test_method_and_gamma() -> None:
    noloco = config(noloco__outer_lr=0.6).noloco
    assert (noloco.gamma, config(noloco__consensus_weight=0.3).noloco.gamma) == (0.6, 0.3)
    assert [noloco.group_size_among(replicas) for replicas in (1, 8)] == [1, 2]
    assert config(noloco__method="diloco").noloco.group_size_among(8) == 8
    off = config(noloco__enabled=False).noloco
    assert (off.active_method, off.group_size_among(8)) == ("none", 1)


def test_topology() -> None:
    assert config().topology(8) == Topology(replicas=4, pp=2)
    auto = config(parallel__replicas="auto", parallel__data_parallel_size=3)
    assert auto.topology(12) == Topology(replicas=2, pp=2, dp=3)
    assert auto.topology(6) == Topology(replicas=1, pp=2, dp=3)
    sizes = {
        "virtual_pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
    }
    whole = config(parallel={"pipeline_model_parallel_size": 2, **sizes})
    assert whole.topology(8) == Topology(replicas=2, pp=2, tp=2, vpp=2, sequence_parallel=True)
    assert (whole.parallel.world_size, config().parallel.world_size) == (None, 8)


def test_routing() -> None:
    assert config().routing(Topology(4, 2)).active
    assert not config().routing(Topology(1, 2)).active
    assert not config(parallel__pipeline_model_parallel_size=1).routing(Topology(4, 1)).active
    assert not config(noloco__routing={"interval": "off"}).routing(Topology(4, 2)).active


@pytest.mark.parametrize(
    ("edits", "world_size", "line"),
    [
        (
            {"parallel.replicas": 3},
            8,
            "8 ranks are not 3 replicas x pipeline 2 x data 1 x tensor 1 = 6; start 6 ranks, "
            "or set parallel.replicas to 4",
        ),
        ({"parallel.replicas": 3}, 7, "= 6; start 6 ranks"),
        ({"parallel.replicas": 3}, 1, "1 rank is not 3 replicas"),
        (
            {"parallel.replicas": "auto"},
            7,
            "7 ranks do not divide into replicas of pipeline 2 x data 1 x tensor 1 = 2 ranks; start 6 or 8",
        ),
        ({"parallel.replicas": "auto"}, 0, "at least 1 rank"),
        (
            {"parallel.replicas": "auto", "noloco.group_size": 4},
            6,
            "group_size 4 is more than the 3 replicas",
        ),
    ],
)
def test_ranks_that_do_not_fit(edits: dict[str, Any], world_size: int, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(edited(edits)).topology(world_size)
    assert line in str(caught.value)


def test_padded_vocabulary() -> None:
    def sizes(run: RunConfig, tokenizer_vocab: int = 0) -> tuple[int, int]:
        architecture = run.architecture(tokenizer_vocab)
        return architecture.vocab_size, architecture.padded_vocab_size

    assert sizes(config(), 257) == (257, 384)
    assert sizes(config(model__vocab_size=1000)) == (1000, 1024)
    assert sizes(config(model__vocab_size=1000, parallel__tensor_model_parallel_size=2), 300) == (1000, 1024)
    with pytest.raises(ConfigError, match="100 is smaller than the tokenizer's 257; set it to 257 or leave"):
        config(model__vocab_size=100).architecture(257)
    with pytest.raises(ConfigError, match="no tokenizer to take it from"):
        config().architecture()
    odd = config(parallel__tensor_model_parallel_size=4, model__make_vocab_size_divisible_by=3)
    with pytest.raises(ConfigError, match="padded vocabulary 258 does not divide by parallel"):
        odd.architecture(257)


def test_the_architecture_and_how_it_is_computed() -> None:
    run = config(
        model__untie_embeddings_and_output_weights=False,
        model__num_query_groups=2,
        model__hidden_dropout=0.1,
        bf16__enabled=True,
    )
    assert run.architecture(257) == Architecture(
        family="llama",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        seq_length=32,
        vocab_size=257,
        padded_vocab_size=384,
        rotary_base=10000.0,
        norm_epsilon=1e-5,
        tied_embeddings=True,
        init_method_std=0.02,
    )
    assert config().architecture(257).num_query_groups == 4
    assert run.compute == Compute(precision="bf16", hidden_dropout=0.1)
    assert config(data={"text": "a", "reset_attention_mask": True}).compute == Compute(
        separate_documents=True
    )


def test_a_config_is_frozen_and_reads_itself_back() -> None:
    run = config(scheduler=COSINE, train_batch_size="auto")
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.deepspeed = {}  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        run.training.seed = 1
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_a_checkpoint_of_an_earlier_version_is_read() -> None:
    now = config(bf16__enabled=True)
    saved = copy.deepcopy(now.to_dict()) | {
        "steps_per_print": 10,
        "optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}},
    }
    saved["zero_optimization"]["stage3_max_live_parameters"] = 5
    found = RunConfig.of_checkpoint(saved)
    assert (found.model, found.precision) == (now.model, "bf16")
    assert RunConfig.of_checkpoint(now.to_dict()) == now


def test_the_user_s_dict_is_left_alone() -> None:
    raw = edited({"gradient_clipping": "auto", "zero_optimization.stage": 0, "bfloat16.enabled": False})
    before = copy.deepcopy(raw)
    RunConfig.from_dict(raw)
    assert raw == before


def test_parameter_count_is_that_of_llama() -> None:
    """Llama 2 7B has 6,738,415,616 weights, Llama 3 8B (grouped queries, 128256 tokens) 8,030,261,248."""
    llama2 = {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "seq_length": 4096,
    }
    assert table_of(config(model=llama2).architecture(32000)).parameter_count == 6_738_415_616
    llama3 = llama2 | {"ffn_hidden_size": 14336, "num_query_groups": 8, "vocab_size": 128256}
    assert table_of(config(model=llama3).architecture(257)).parameter_count == 8_030_261_248


def test_what_only_a_family_has_comes_from_the_file_or_the_family() -> None:
    found = config(model__family="mixtral", model__moe_router_topk=3, model__sliding_window=16)
    architecture = found.architecture(257)
    assert (architecture.num_moe_experts, architecture.moe_router_topk, architecture.sliding_window) == (
        8,
        3,
        16,
    )
    assert architecture.rope_scaling_factor is None
    compute = found.compute
    assert (compute.moe_router_load_balancing_type, compute.moe_aux_loss_coeff) == ("aux_loss", 0.01)
    assert RunConfig.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert config().compute.moe_router_load_balancing_type is None


def test_the_banner_says_the_numbers() -> None:
    run = config()
    text = "\n".join(describe(run, run.topology(8), run.architecture(256)))
    for part in (
        "parallel: 4 replicas x pipeline 2 x data 1 x tensor 1 = 8 ranks",
        "4 per microbatch x 2 microbatches x 1 data-parallel = 8 samples; x 32 = 256 tokens",
        "4 replicas x 8 = 32 samples; x 32 = 1,024 tokens",
        "noloco, k = 5, alpha = 0.5, beta = 0.7, gamma = 0.7, n = 2; rho = 0.700",
        "reshuffled every round",
        "optimizer: AdamW, lr 0.001, weight_decay 0\n",
        "fp32",
        f"parameters: {table_of(run.architecture(256)).parameter_count:,} (padded vocabulary 256)",
    ):
        assert part in text
    one_stage = config(parallel={"replicas": 4})
    assert "without effect (1 stage)" in "\n".join(describe(one_stage, one_stage.topology(4)))
    one_replica = config(parallel={"replicas": 1, "pipeline_model_parallel_size": 2})
    assert "without effect (1 replica)" in "\n".join(describe(one_replica, one_replica.topology(2)))


SCHEDULE_LINES: list[tuple[dict[str, Any] | None, str]] = [
    (None, "none, the learning rate stays"),
    (COSINE, "WarmupCosineLR, total_num_steps 10, warmup_num_steps 2"),
    (
        {"type": "WSD", "params": {**STEPS, "warmup_num_steps": 1, "decay_type": "1-sqrt"}},
        "WSD, 1 local steps of warm-up, 5 stable, 4 of decay (1-sqrt) to 0 of the peak",
    ),
]


@pytest.mark.parametrize(("scheduler", "line"), SCHEDULE_LINES)
def test_the_banner_says_the_schedule(scheduler: dict[str, Any] | None, line: str) -> None:
    run = config(**({"scheduler": scheduler} if scheduler else {}))
    assert f"schedule: {line}" in describe(run, run.topology(8))


@pytest.mark.parametrize(
    ("overlap", "text", "state"),
    [
        ({}, "none, training waits for every exchange", 16),
        ({"mode": "delayed", "delay_steps": 0}, "none, training waits for every exchange", 16),
        ({"mode": "delayed", "delay_steps": 1}, "is merged 1 local step after it began", 20),
        ({"mode": "delayed"}, "the exchanges of the first rounds (auto, at most 5)", 20),
    ],
)
def test_the_banner_says_what_overlap_costs(overlap: dict[str, Any], text: str, state: int) -> None:
    run = config(noloco__overlap=overlap)
    lines = describe(run, run.topology(8))
    assert text in "\n".join(line for line in lines if line.startswith("overlap: "))
    (line,) = [line for line in lines if line.startswith("outer state: ")]
    assert line.startswith(f"outer state: {state} bytes per parameter (slow weights 4, outer momentum 4, ")
    assert ("snapshot 4" in line) == (state == 20)
    plain = config(noloco__outer_momentum=0, noloco__outer_lr=1, noloco__overlap=overlap)
    assert f"outer state: {state - 4} bytes per parameter (slow weights 4, combined" in "\n".join(
        describe(plain, plain.topology(8))
    )
    off = config(noloco__enabled=False, noloco__overlap=overlap)
    assert not any("overlap" in line or "outer state" in line for line in describe(off, off.topology(8)))


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_weight_decay_increases_over_the_run(name: str) -> None:
    run = config(optimizer={"type": name, "params": {"lr": 0.01, **INCREASING}})
    params = run.deepspeed["optimizer"]["params"]
    assert params["weight_decay_incr_steps"] == run.training.train_iters
    assert "weight_decay" not in params
    constant = {"lr": 0.01, "weight_decay": 0.1, "weight_decay_incr_style": "constant"}
    params = config(optimizer={"type": name, "params": constant}).deepspeed["optimizer"]["params"]
    assert params["weight_decay"] == 0.1
    assert "weight_decay_incr_style" not in params


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_decays_by_default(name: str) -> None:
    run = config(optimizer={"type": name, "params": {"lr": 0.01}})
    assert run.deepspeed["optimizer"]["params"]["weight_decay"] == 0.0


def test_muon_is_completed_by_deepspeeds_defaults() -> None:
    rest = {"momentum": 0.95, "ns_method": "gram", "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0}
    for given, rates in (
        ({}, {"muon_lr": 0.02, "adam_lr": 3e-4}),
        ({"lr": 0.01}, {"muon_lr": 0.01, "adam_lr": 0.01}),
        ({"lr": 0.01, "adam_lr": 0.001}, {"muon_lr": 0.01, "adam_lr": 0.001}),
    ):
        assert (
            config(optimizer={"type": "Muon", "params": given}).deepspeed["optimizer"]["params"]
            == rates | rest
        )
    one_rate = {"type": "Muon", "params": {"lr": 0.01}}
    warm_up = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}
    assert config(optimizer=one_rate, scheduler=warm_up).deepspeed["zero_allow_untested_optimizer"]


def test_the_banner_says_how_many_weights_muon_has() -> None:
    """Of each layer 64 x 64 for q, k, v and the projection, 128 x 64 for gate, up and down."""
    run = config(optimizer={"type": "Muon", "params": {"lr": 0.01}})
    linear, others = 4 * (4 * 64 * 64 + 3 * 128 * 64), 2 * 256 * 64 + 9 * 64
    line = (
        f"optimizer: Muon for {linear:,} weights of linear maps in layers, AdamW for {others:,}, muon_lr 0.01"
    )
    assert line in "\n".join(describe(run, run.topology(8), run.architecture(256)))
    assert linear + others == table_of(run.architecture(256)).parameter_count


def test_the_banner_says_how_long_the_second_moment_remembers() -> None:
    """0.5^(1 / 100) forgets half in 100 local steps, of 256 tokens each."""
    run = config(optimizer__params__betas=[0.9, 0.5**0.01])
    line = "half-life of the second moment 100.0 local steps, 25,600 tokens per replica"
    assert line in "\n".join(describe(run, run.topology(8)))


def test_the_banner_says_what_fragments_do() -> None:
    whole, parts = config(), config(noloco__fragments=2)
    assert "fragments" not in "\n".join(describe(whole, whole.topology(8)))
    lines = describe(parts, parts.topology(8))
    assert (
        "fragments: 2, each 1/2 of a rank's weights and exchanged once in 5 local steps; one every 2.5"
        in lines
    )
    (line,) = [line for line in lines if line.startswith("outer state: ")]
    assert line.startswith("outer state: 12 bytes per parameter (")


@pytest.mark.parametrize(("fragments", "rho"), [(1, "0.595"), (2, "0.595"), (3, "0.602")])
def test_the_banner_says_rho_of_the_slowest_fragment(fragments: int, rho: str) -> None:
    """Of 30 replicas in cycles: groups of 2, 3, 5; then of 3, 5, 2; then of 5, 2, 3."""
    cycles = {"noloco__pairing": "cycle", "noloco__group_size": 5, "parallel__replicas": 30}
    run = config(noloco__fragments=fragments, **cycles)
    assert f"cycles of 2 x 3 x 5; rho = {rho}: " in "\n".join(describe(run, run.topology(60)))


def test_groups_per_stage_go_together_with_a_tied_embedding_that_meets_the_same_replicas() -> None:
    tied = {"noloco__grouping": "stage", "model__untie_embeddings_and_output_weights": False}
    config(**tied, parallel__replicas=2)
    config(**tied, noloco__method="diloco")
    config(**tied, noloco__enabled=False)
    config(**tied, parallel__pipeline_model_parallel_size=1)
    unknown = config(**tied, parallel__replicas="auto")
    assert unknown.topology(4).replicas == 2
    with pytest.raises(ConfigError, match="would average their copies of it with different replicas"):
        unknown.topology(8)


def test_a_job_of_a_federation_is_one_replica() -> None:
    run = RunConfig.from_dict(edited(FEDERATION))
    topology = run.topology(2, slot=3)
    assert topology == Topology(pp=2, slot=3, slots=4)
    assert [topology.position(rank).replica for rank in range(2)] == [3, 3]
    assert topology.place(1) == Place(replica=3, replicas=4, stage=1, rank=7, ranks_per_replica=2)
    assert run.grouping(topology.ensemble) == config().grouping(4)
    banner = describe(run, topology)
    assert (
        "federation: this job is replica 3 of at most 4; exchanges in the open; no mean model is" in banner[1]
    )
    assert any(line.startswith("batch in total: 4 replicas x 8 = 32 samples") for line in banner)
    with pytest.raises(ConfigError, match="4 ranks are not 1 replica x pipeline 2"):
        run.topology(4)


def test_explain_mentions_every_field() -> None:
    words = " ".join(explain().split())
    paths: dict[tuple[str, ...], list[type[BaseModel]]] = {
        (): [File],
        ("optimizer", "params"): list(OPTIMIZERS.values()),
        ("scheduler", "params"): list(SCHEDULES.values()),
    }
    for path, models in paths.items():
        for name, field in (found for model in models for found in fields_of(model, path)):
            assert name in words
            assert field.description
            assert " ".join(field.description.split()) in words


def test_the_table_of_names_has_every_alias() -> None:
    """docs/running.md: each name beside the field that is meant."""
    rows = [
        [set(re.findall(r"`(\w+)`", cell)) for cell in line.split("|")[1:3]]
        for line in (ROOT / "docs" / "running.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    ours = {name for name, _ in fields_of(File)}
    assert set(ALIASES.values()) <= ours
    assert not (ALIASES.keys() | HINTS.keys() | NOT_SUPPORTED.keys()) & ours
    for alias, field in ALIASES.items():
        name, meant = alias.rpartition(".")[2], field.rpartition(".")[2]
        assert any(name in {known.lower() for known in left} and meant in right for left, right in rows), (
            alias
        )
    told = {known.lower() for left, _ in rows for known in left}
    assert HINTS.keys() | NOT_SUPPORTED.keys() <= told


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_parse(path: Path) -> None:
    run = load_config(path)
    assert run.world_size is not None
    assert describe(run, run.topology(run.world_size), run.architecture(257))


PAPERS = {
    "125m": 2**19,
    "1.3b": 2**20,
    "6.8b": 2**21,
}  # its models, and tokens of a local step of all replicas
WAYS = ("", "_diloco", "_synchronous", "_recipe")


def test_every_expected_config_is_shipped() -> None:
    names = {f"llama_{size}{way}" for size in PAPERS for way in WAYS}
    names |= {"quickstart", "diloco", "synchronous", "federation", "llama_3.2_1b", "qwen3_0.6b"}
    assert names == {path.stem for path in SHIPPED}


@pytest.mark.parametrize("size", PAPERS)
def test_the_papers_models_differ_in_their_method_alone(size: str) -> None:
    """Table 1 of arXiv 2506.10911, and the same batch of all replicas for every way to train."""
    raw = {way: json.loads((ROOT / "configs" / f"llama_{size}{way}.json").read_text()) for way in WAYS}
    for way, content in raw.items():
        run = RunConfig.from_dict(content)
        assert run.world_size == (8 if size == "125m" else 64)
        replicas = run.topology(run.world_size).replicas
        assert replicas * run.replica_batch * run.model.seq_length == PAPERS[size]
        assert content["training"].pop("output_dir") == f"runs/llama_{size}{way}"
        of_method = {"noloco", "parallel"} | ({"optimizer"} if way == "_recipe" else set())
        assert {key for key in raw[""] | content if content.get(key) != raw[""].get(key)} <= of_method
    noloco, diloco = (RunConfig.from_dict(raw[way]).noloco for way in ("", "_diloco"))
    assert (noloco.outer_momentum, noloco.outer_lr, noloco.group_size, noloco.local_steps) == (
        0.5,
        0.7,
        2,
        50,
    )
    assert (diloco.outer_momentum, diloco.outer_lr, diloco.local_steps) == (0.3, 0.7, 100)


def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(GOOD))

    def run(*arguments: str, problem: str = "") -> tuple[int, str, str]:
        def check_start(config: RunConfig) -> tuple[None, Architecture]:
            if problem:
                raise ValueError(problem)
            return None, config.architecture(257)

        monkeypatch.setattr(prepare, "check_start", check_start)
        code = main(["config", *arguments])
        return code, *capsys.readouterr()

    code, out, _ = run("--explain")
    assert code == 0
    assert "noloco.local_steps" in out
    code, out, _ = run("--check", str(path), "--world-size", "8")
    assert code == 0
    assert out.startswith(f"{path}: ok\nparallel: 4 replicas x pipeline 2 x data 1 x tensor 1 = 8 ranks\n")
    assert "padded vocabulary 384" in out
    code, _, err = run("--check", str(path), "--world-size", "7")
    assert code == 2
    assert err.startswith(f"{path}: 7 ranks are not 4 replicas")
    code, out, err = run("--check", str(path), problem="no data\nno folder")
    assert (code, err) == (2, f"{path}: no data\n{path}: no folder\n")
    assert out.startswith("parallel: 4 replicas"), "what the file says is still worth knowing"
    path.write_text(json.dumps(edited({"parallel.replicas": "auto"})))
    assert run("--check", str(path)) == (0, f"{path}: ok\n", "")
    path.write_text("{")
    code, out, err = run("--check", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        ({"save_interval": 10}, ""),
        ({}, "checkpoint.save_interval 0: nothing is saved before a failure"),
        ({"save_interval": 10, "load": "none"}, 'checkpoint.load "none": every new start begins with step 0'),
        (
            {"save_interval": 10, "load": "runs/a/step_00000010"},
            'checkpoint.load "runs/a/step_00000010": every',
        ),
    ],
)
def test_what_a_new_start_would_lose_is_told(
    checkpoint: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(edited({"checkpoint": checkpoint, "training.output_dir": "runs/some where"})))
    assert main(["config", "--restarts", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == "runs/some where\n"
    assert err.startswith(f"{path}: {reason}") if reason else err == ""
    assert err.count("\n") == bool(reason)


def test_a_file_is_checked_without_torch_or_an_engine() -> None:
    code = (
        "import sys; from megatron_noloco.config import load_config, explain; explain(); load_config(sys.argv[1]);"
        "assert not {'torch', 'deepspeed', 'megatron', 'mpi4py'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, str(ROOT / "configs" / "quickstart.json")]
    finished = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
