"""The config room: every rule as one edit to a good file and the words the user reads for it."""

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_noloco.cli.main import main
from megatron_noloco.config import (
    ConfigError,
    RunConfig,
    describe,
    explain,
    load_config,
    parameter_count,
)
from megatron_noloco.config.data_block import blend_of
from megatron_noloco.config.run_config import BLOCKS
from megatron_noloco.plans.topology import Topology

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.json"))
MISSING = object()

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
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}


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
            place[name] = value
    return raw


def config(**edits: Any) -> RunConfig:
    """GOOD with edits; `__` stands for the dot."""
    return RunConfig.from_dict(edited({name.replace("__", "."): value for name, value in edits.items()}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    # keys
    ({"noloco.local_stpes": 5}, "noloco.local_stpes is not a known key; did you mean noloco.local_steps?"),
    ({"noloco.routing.intervall": "off"}, "did you mean noloco.routing.interval?"),
    ({"parallel.tensor_model_paralel_size": 1}, "did you mean parallel.tensor_model_parallel_size?"),
    ({"gradient_cliping": 1.0}, "gradient_cliping is not a known key; did you mean gradient_clipping?"),
    ({"trainning": {}}, "did you mean training?"),
    ({"zzz": 1}, "zzz is not a known key"),
    ({"optimizer.parms": {}}, "did you mean optimizer.params?"),
    ({"bf16.enable": True}, "bf16.enable is not a known key; did you mean bf16.enabled?"),
    ({"fp16.los_scale": 1}, "did you mean fp16.loss_scale?"),
    ({"zero_optimization.stge": 1}, "did you mean zero_optimization.stage?"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
        "scheduler.params.warmup_steps is not",
    ),
    ({"elasticity": {}}, "elasticity was removed from DeepSpeed"),
    ({"pipeline": {"pipeline_model_parallel_size": 2}}, "use parallel.stages"),
    ({"activation_checkpointing": {}}, "use model.recompute_granularity"),
    # what is missing
    ({"training": MISSING}, "training is missing (an object with train_iters)"),
    ({"training.train_iters": MISSING}, "training.train_iters is missing (an integer >= 1: Local steps"),
    ({"data.text": MISSING}, "data.text is missing"),
    ({"optimizer": MISSING}, "optimizer is missing"),
    ({"optimizer.type": MISSING}, "optimizer.type is missing"),
    # types and bounds
    ({"training.train_iters": "ten"}, "training.train_iters: must be an integer >= 1, got 'ten'"),
    ({"training.train_iters": True}, "training.train_iters: must be an integer >= 1, got true"),
    ({"training.train_iters": 1e3}, "must be an integer >= 1, got 1000.0"),
    ({"training.train_iters": 0}, "must be an integer >= 1, got 0"),
    ({"training.seed": -1}, "training.seed: must be an integer >= 0, got -1"),
    ({"noloco.outer_momentum": 1}, "noloco.outer_momentum: must be a number >= 0 and < 1, got 1"),
    ({"noloco.outer_lr": 0}, "noloco.outer_lr: must be a number > 0, got 0"),
    ({"noloco.outer_lr": float("nan")}, "noloco.outer_lr: must be a number > 0, got NaN"),
    ({"noloco.consensus_weight": -0.1}, "must be a number >= 0 or null, got -0.1"),
    ({"noloco.group_size": 1}, "noloco.group_size: must be an integer >= 2, got 1"),
    ({"noloco.deadline_seconds": 0}, "noloco.deadline_seconds: must be a number > 0, got 0"),
    (
        {"noloco.method": "nolocko"},
        'noloco.method: must be one of "noloco", "diloco", "none", got \'nolocko\'',
    ),
    ({"noloco.routing.interval": "often"}, '"round", "step", "microbatch", "off", got \'often\''),
    ({"noloco.routing": "off"}, "noloco.routing: must be an object with interval, got 'off'"),
    ({"noloco": True}, "noloco: must be an object with enabled, method"),
    ({"parallel.replicas": "all"}, "parallel.replicas: must be an integer >= 1 or \"auto\", got 'all'"),
    (
        {"parallel.pipeline_model_parallel_size": 0},
        "pipeline_model_parallel_size: must",
    ),
    ({"data.split": "1,2"}, "data.split: must be three weights"),
    ({"data.split": "0,1,1"}, "data.split: must be three weights"),
    ({"data.split": "9,x,1"}, "data.split: must be three weights"),
    ({"data.split": "10,0,0"}, "leaves no text for validation"),
    ({"data.text": ""}, "data.text: must be text that is not empty or null, got ''"),
    ({"data.data_path": "prefix"}, "data.text and data.data_path both say what is read"),
    ({"data.valid_data_path": "b"}, "data.valid_data_path goes together with data.train_data_path"),
    ({"data": {"train_data_path": "a"}}, "data.valid_data_path is missing, and training.eval_iters is 10"),
    ({"data": {"data_path": ["0.5", "a", "b"]}}, "data.data_path: must be one prefix, or weights > 0 and"),
    ({"data": {"data_path": ["a", "b"]}}, "data.data_path: must be one prefix, or weights > 0 and"),
    ({"data": {"data_path": [0, "a"]}}, "data.data_path: must be one prefix, or weights > 0 and"),
    ({"data": {"data_path": []}}, "data.data_path: must be one prefix, or weights > 0 and"),
    (
        {"data": {"data_path": 3}},
        "data.data_path: must be text that is not empty or a list of text or a number",
    ),
    ({"data.tokenizer_type": "HuggingFaceTokenizer"}, "needs data.tokenizer_model, a folder with its files"),
    ({"data.tokenizer_model": "x"}, 'data.tokenizer_model needs data.tokenizer_type "HuggingFaceTokenizer"'),
    # DeepSpeed's part
    ({"train_batch_size": 9}, "gradient_accumulation_steps 2 x parallel.lanes 1 = 8 (per replica)"),
    (
        {"train_batch_size": 6, "gradient_accumulation_steps": "auto"},
        "train_batch_size 6 does not divide by train_micro_batch_size_per_gpu 4 x parallel.lanes 1 = 4",
    ),
    (
        {"train_micro_batch_size_per_gpu": MISSING},
        "train_micro_batch_size_per_gpu or train_batch_size is missing",
    ),
    ({"train_micro_batch_size_per_gpu": "four"}, "train_micro_batch_size_per_gpu: must be an integer >= 1"),
    ({"gradient_clipping": -1}, "gradient_clipping: must be a number >= 0"),
    ({"optimizer.type": "AdamV"}, "optimizer.type: 'AdamV' is not a known optimizer; did you mean Adam"),
    ({"optimizer.type": "sgd"}, "did you mean SGD?"),
    ({"optimizer.params.lr": "auto"}, 'optimizer.params.lr: "auto" has no meaning here'),
    ({"optimizer.params.lr": "fast"}, "optimizer.params.lr: must be a number >= 0, got 'fast'"),
    ({"optimizer.params.weight_dekay": 1}, "did you mean optimizer.params.weight_decay?"),
    ({"optimizer.type": "Lamb"}, "'Lamb' is not a known optimizer; known are AdamW, Adam, Lion, Adadelta"),
    ({"optimizer.params.betas": "x"}, "optimizer.params.betas: must be two numbers from 0 to below 1"),
    ({"optimizer.params.weight_decay": "much"}, "optimizer.params.weight_decay: must be a number >= 0"),
    ({"optimizer.params.foreach": 1}, "optimizer.params.foreach: must be true or false, got 1"),
    (
        {"optimizer": {"type": "Adadelta", "params": {"betas": [0.9, 0.99]}}},
        "optimizer.params.betas is not a known key",
    ),
    (
        {"optimizer": {"type": "RMSprop", "params": {"alpha": "0.9"}}},
        "optimizer.params.alpha: must be a number >= 0, got '0.9'",
    ),
    ({"zero_optimization.compute_grad_norm": False}, "the norm is logged, and clipped by; leave it out"),
    ({"zero_optimization.offload_optimizer": {"device": "cpu"}}, "offload_optimizer is not supported"),
    ({"zero_optimization.reduce_bucket_size": "big"}, "reduce_bucket_size: must be a number >= 0"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "ten"}}},
        "scheduler.params.warmup_num_steps: must be a number, got 'ten'",
    ),
    ({"scheduler": {"type": "StepLR", "params": {}}}, "'StepLR' is not a known scheduler; "),
    ({"optimizer.params.max_grad_norm": 1}, "use the top-level gradient_clipping"),
    ({"optimizer": "AdamW"}, "optimizer: must be an object, got 'AdamW'"),
    ({"scheduler": {"type": "WarmupCosinLR", "params": {}}}, "did you mean WarmupCosineLR?"),
    ({"scheduler.type": ["WarmupLR"]}, 'scheduler.type: must be text, got ["WarmupLR"]'),
    ({"scheduler": {"type": "WarmupCosineLR"}}, "scheduler.params.total_num_steps is missing"),
    (
        {"zero_optimization.round_robin_gradients": True},
        "zero_optimization.round_robin_gradients changes the order",
    ),
    ({"zero_optimization.stage": 2}, "zero_optimization.stage 2 is not supported, use 0 or 1"),
    ({"zero_optimization.stage": "one"}, "zero_optimization.stage: must be 0 or 1, got 'one'"),
    ({"bf16.enabled": True, **FP16}, "bf16 and fp16 are both enabled"),
    ({"bf16.enabled": 1}, "bf16.enabled: must be true, false"),
    (
        {"bf16": {"enabled": True, "immediate_grad_update": False}, "data_types.grad_accum_dtype": "fp32"},
        "needs bf16.immediate_grad_update",
    ),
    (FP16, "fp16 with a dynamic loss scale does not go together with routing"),
    ({"fp16": {"enabled": True, "loss_scale": 0}, "parallel.replicas": "auto"}, "dynamic loss scale"),
    # between fields
    ({"model.num_layers": 3}, "3 layers (model.num_layers) do not divide into 2 stages"),
    (
        {"parallel.virtual_pipeline_model_parallel_size": 4},
        "do not divide into 2 stages x 4 virtual stages = 8",
    ),
    (
        {"parallel.pipeline_model_parallel_size": 1, "parallel.virtual_pipeline_model_parallel_size": 2},
        "size 2 needs parallel.pipeline_model_parallel_size > 1",
    ),
    (
        {"parallel.virtual_pipeline_model_parallel_size": 2, "gradient_accumulation_steps": 3},
        "3 / 2 stages = 1.50",
    ),
    ({"model.hidden_size": 66}, "66 does not divide into 4 attention heads (66 / 4 = 16.50)"),
    ({"model.kv_channels": 15}, "15 channels has no rotary embedding"),
    ({"model.num_query_groups": 3}, "num_attention_heads 4 does not divide into model.num_query_groups 3"),
    (
        {"parallel.tensor_model_parallel_size": 3},
        "model.num_attention_heads 4 does not divide by parallel.tensor_model_parallel_size 3 (4 / 3 = 1.33)",
    ),
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
    (
        {"parallel.sequence_parallel": True},
        "parallel.sequence_parallel needs parallel.tensor_model_parallel_size > 1",
    ),
    ({"model.recompute_granularity": "full"}, 'recompute_granularity "full" needs model.recompute_method'),
    ({"model.recompute_method": "block"}, "model.recompute_method has a meaning only with"),
    (
        {
            "model.recompute_granularity": "full",
            "model.recompute_method": "block",
            "model.recompute_num_layers": 3,
        },
        "model.recompute_num_layers 3 is more than the 2 layers of a model chunk",
    ),
    # the method
    (
        {"noloco.outer_momentum": 0.9},
        "rho = 1.098 >= 1 for outer_momentum (alpha) 0.9, consensus_weight (gamma) 0.7",
    ),
    ({"noloco.consensus_weight": 0}, "no outer_momentum is stable with this gamma; consensus_weight 0.01 is"),
    ({"noloco.group_size": 5}, "noloco.group_size 5 is more than the 4 replicas"),
]


@pytest.mark.parametrize(("edits", "fragment"), REFUSED, ids=[fragment[:60] for _, fragment in REFUSED])
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, edits: dict[str, Any], fragment: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(edited(edits)))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = [line for line in str(caught.value).splitlines() if fragment in line]
    assert len(lines) == 1, f"no line, or several, with {fragment!r}: {caught.value}"
    assert all(line.startswith(f"{path}: ") for line in str(caught.value).splitlines())


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ('{"a": 1,\n "b" 2}', "is not valid JSON: line 2, column 6"),
        ("[1, 2]", "must hold a JSON object, got [1, 2]"),
        ('{"noloco": {"local_steps": 1, "local_steps": 2}}', "noloco.local_steps is given more than once"),
        ('{"noloco": {}, "noloco": {}}', "noloco is given more than once"),
        ("{}", "model is missing"),
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


def test_blends_are_prefixes_and_weights_that_add_up_to_one() -> None:
    blend = ["0.3", "a", 0.9, "b"]
    assert blend_of(config(data={"data_path": blend}).data.data_path) == [("a", 0.25), ("b", 0.75)]
    assert blend_of("a") == blend_of(["a"]) == [("a", 1.0)]


def test_the_stability_rule_is_noloco_s_alone() -> None:
    config(noloco__outer_momentum=0.9, noloco__method="diloco")
    config(noloco__outer_momentum=0.9, noloco__enabled=False)
    config(noloco__outer_momentum=0.9, parallel__replicas=1)


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
        steps_per_print="auto",
        bf16={"enabled": "auto"},
        fp16={"enabled": "auto", "loss_scale": "auto"},
        zero_optimization={"stage": "auto", "reduce_bucket_size": "auto"},
        scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
    )
    assert "auto" not in json.dumps(run.deepspeed)
    assert run.deepspeed["gradient_clipping"] == 1.0
    assert run.deepspeed["zero_optimization"] == {"stage": 1}
    assert run.deepspeed["scheduler"]["params"]["total_num_steps"] == 10
    assert run.precision == "fp32"


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}, {}, True, False])
def test_zero_0_is_run_as_1(zero: Any) -> None:
    assert config(zero_optimization=zero).zero_stage == 1


def test_precision() -> None:
    assert config(bf16__enabled=True).precision == "bf16"
    assert config(bfloat16__enabled=True).precision == "bf16"
    assert config(fp16={"enabled": True, "loss_scale": 128}).precision == "fp16"
    assert config(fp16__enabled=True, noloco__routing={"interval": "off"}).precision == "fp16"
    assert config(fp16__enabled=True, parallel__replicas=1).precision == "fp16"
    assert config().precision == "fp32"


def test_aliases_are_the_same_fields() -> None:
    aliased = {
        "replicas": 4,
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    plain = {
        "replicas": 4,
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    assert config(parallel=aliased).parallel == config(parallel=plain).parallel


def test_method_and_gamma() -> None:
    noloco = config(noloco__outer_lr=0.6).noloco
    assert (noloco.gamma, config(noloco__consensus_weight=0.3).noloco.gamma) == (0.6, 0.3)
    assert [noloco.group_size_among(replicas) for replicas in (1, 8)] == [1, 2]
    assert config(noloco__method="diloco").noloco.group_size_among(8) == 8
    off = config(noloco__enabled=False).noloco
    assert (off.active_method, off.group_size_among(8)) == ("none", 1)


def test_topology() -> None:
    assert config().topology(8) == Topology(replicas=4, pp=2)
    auto = config(parallel__replicas="auto", parallel__lanes=3)
    assert auto.topology(12) == Topology(replicas=2, pp=2, dp=3)
    assert auto.topology(6) == Topology(replicas=1, pp=2, dp=3)


@pytest.mark.parametrize(
    ("edits", "world_size", "line"),
    [
        (
            {"parallel.replicas": 3},
            8,
            "8 ranks are not 3 replicas x 2 stages x 1 lane x 1 shard = 6; start 6 ranks, "
            "or set parallel.replicas to 4",
        ),
        ({"parallel.replicas": 3}, 7, "= 6; start 6 ranks"),
        ({"parallel.replicas": 3}, 1, "1 rank is not 3 replicas"),
        (
            {"parallel.replicas": "auto"},
            7,
            "7 ranks do not divide into replicas of 2 stages x 1 lane x 1 shard = 2 ranks; start 6 or 8",
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
    assert config().padded_vocab_size(257) == 384
    assert config(model__vocab_size=1000).padded_vocab_size() == 1024
    assert config(model__vocab_size=1000, parallel__shards=2).padded_vocab_size(300) == 1024
    with pytest.raises(ValueError, match="100 is less than the tokenizer's 257"):
        config(model__vocab_size=100).padded_vocab_size(257)
    with pytest.raises(ValueError, match="not known"):
        config().padded_vocab_size()


def test_a_config_is_frozen_and_reads_itself_back() -> None:
    run = config(scheduler=COSINE, train_batch_size="auto")
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.deepspeed = {}  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        run.training.seed = 1
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run


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
    assert parameter_count(config(model=llama2).model, 32000) == 6_738_415_616
    llama3 = llama2 | {"ffn_hidden_size": 14336, "num_query_groups": 8, "vocab_size": 128256}
    assert parameter_count(config(model=llama3).model) == 8_030_261_248


def test_the_banner_says_the_numbers() -> None:
    run = config()
    text = "\n".join(describe(run, run.topology(8), vocab=256))
    for part in (
        "4 replicas x 2 stages x 1 lane x 1 shard = 8 ranks",
        "4 per microbatch x 2 microbatches x 1 lane = 8 samples; x 32 = 256 tokens",
        "4 replicas x 8 = 32 samples; x 32 = 1,024 tokens",
        "noloco, k = 5, alpha = 0.5, beta = 0.7, gamma = 0.7, n = 2; rho = 0.700",
        "reshuffled every round",
        "fp32",
        f"{parameter_count(run.model, 256):,}",
    ):
        assert part in text
    one_stage = config(parallel={"replicas": 4})
    assert "without effect (1 stage)" in "\n".join(describe(one_stage, one_stage.topology(4)))
    one_replica = config(parallel={"replicas": 1, "pipeline_model_parallel_size": 2})
    assert "without effect (1 replica)" in "\n".join(describe(one_replica, one_replica.topology(2)))


def test_explain_mentions_every_field() -> None:
    words = " ".join(explain().split())
    for block, model in BLOCKS.items():
        for name, field in model.model_fields.items():
            assert f"{block}.{name}" in words
            if name == "routing":
                continue
            assert field.description
            assert " ".join(field.description.split()) in words
    assert "noloco.routing.interval" in words
    assert "parallel.tensor_model_parallel_size" in words


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_parse(path: Path) -> None:
    run = load_config(path)
    assert isinstance(run.parallel.replicas, int)
    size = (
        run.parallel.replicas
        * run.parallel.pipeline_model_parallel_size
        * run.parallel.data_parallel_size
        * run.parallel.tensor_model_parallel_size
    )
    assert describe(run, run.topology(size), vocab=257 if run.model.vocab_size is None else None)


def test_every_expected_config_is_shipped() -> None:
    names = {"quickstart", "llama_125m", "llama_1.3b", "llama_6.8b", "diloco", "synchronous"}
    assert names <= {path.stem for path in SHIPPED}


def test_the_papers_global_batches() -> None:
    tokens = {"125m": 2**19, "1.3b": 2**20, "6.8b": 2**21}
    for name, expected in tokens.items():
        run = load_config(ROOT / "configs" / f"llama_{name}.json")
        assert isinstance(run.parallel.replicas, int)
        assert run.parallel.replicas * run.replica_batch * run.model.seq_length == expected


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(GOOD))

    assert main(["config", "--explain"]) == 0
    assert "noloco.local_steps" in capsys.readouterr().out
    assert main(["config", "--check", str(path), "--world-size", "8"]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: ok\ntopology: 4 replicas")
    assert main(["config", "--check", str(path), "--world-size", "7"]) == 2
    assert capsys.readouterr().err.startswith(f"{path}: 7 ranks are not 4 replicas")
    path.write_text(json.dumps(edited({"parallel.replicas": "auto"})))
    assert main(["config", "--check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"
    path.write_text("{")
    assert main(["config", "--check", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_loading_imports_no_engine() -> None:
    code = (
        "import sys; from megatron_noloco.config import load_config; load_config(sys.argv[1]);"
        "sys.exit(bool({'torch', 'deepspeed', 'megatron', 'mpi4py'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "configs" / "quickstart.json")]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0
