"""What a wrong file is told: each form of a line once, and each rule between fields."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from megatron_noloco.config import RunConfig, explain, load_config
from megatron_noloco.config.explain import _sections
from megatron_noloco.config.names import ALIASES, HINTS, names_of_others
from megatron_noloco.config.optimizer_block import OPTIMIZERS, SCHEDULES
from megatron_noloco.errors import UserError
from megatron_noloco.fields import fields_of
from tests.unit.configs import FEDERATION, MISSING, edited

FP16 = {"fp16": {"enabled": True}}
EP2 = {"model.family": "mixtral", "parallel.data_parallel_size": 2, "parallel.expert_model_parallel_size": 2}
RECOMPUTED = {"model.recompute_granularity": "full", "model.recompute_method": "block"}
YARN = {"model.yarn_rotary_scaling_factor": 4.0, "model.yarn_original_max_position_embeddings": 64}
TP4 = {"parallel.tensor_model_parallel_size": 4}
VIRTUAL = {"parallel.virtual_pipeline_model_parallel_size": 2}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


# How each form of a line reads, once: the key, its value, and what the line says of the key.
TEXT_OR_BLEND = (
    ": must be text that is not empty or a list of text that is not empty or a number or null, got 3"
)
LINES: list[tuple[str, Any, str]] = [
    # keys that are not known: the nearest, the same name elsewhere, the name of another program
    ("noloco.local_stpes", 5, " is not a known key; did you mean noloco.local_steps?"),
    ("optimizer.params.beta", 8, " is not a known key; did you mean optimizer.params.betas?"),
    ("zzz", 1, " is not a known key; leave it out"),
    ("train_iters", 5, " is not a known key; did you mean training.train_iters?"),
    ("model.enabled", 1, " is not a known key; did you mean bf16.enabled or fp16.enabled?"),
    ("training.micro_batch_size", 8, " is not a known key; did you mean train_micro_batch_size_per_gpu?"),
    ("noloco.H", 8, " is not a known key; did you mean noloco.local_steps?"),
    ("data.reset_position_ids", True, f" is not a known key; {HINTS['reset_position_ids']}"),
    ("model.tie_word_embeddings", 1, f" is not a known key; {HINTS['tie_word_embeddings']}"),
    ("cuda_graph_impl", "local", " is not a known key; not supported: a graph would freeze the routes"),
    # keys of DeepSpeed that do nothing here
    ("steps_per_print", 10, " is not a known key; did you mean training.log_interval?"),
    ("zero_optimization.stage3_max_reuse_distance", 1, " is not a known key; leave it out"),
    # names of optimizers and schedules
    ("optimizer.type", "Adamm", ": 'Adamm' is not a known optimizer; did you mean Adam?"),
    ("optimizer.type", "RMSprop", ": 'RMSprop' is not a known optimizer; not supported: use AdamW"),
    # what is missing
    ("training.train_iters", MISSING, " is missing (an integer >= 1: Local steps of the whole run.)"),
    # types and bounds
    ("training.train_iters", "ten", ": must be an integer >= 1, got 'ten'"),
    ("optimizer.params.lr", "auto", ': "auto" has no meaning here; give a number >= 0'),
    ("noloco.outer_lr", float("nan"), ": must be a number > 0 and <= 1000, got NaN"),
    ("noloco.consensus_weight", 1e200, ": must be a number >= 0 and <= 1000 or null, got 1e+200"),
    ("noloco.method", "nolocko", ': must be one of "noloco", "diloco", got \'nolocko\''),
    ("noloco.routing", "step", ': must be one of "off", "round", "microbatch", got \'step\''),
    ("data.data_path", 3, TEXT_OR_BLEND),
    ("optimizer.params.betas", [0.9], ": must be a list of 2, each a number >= 0 and < 1, got [0.9]"),
    ("bf16.enabled", 1, ": must be true or false, got 1"),
    ("zero_optimization.allgather_bucket_size", 5, ": must be an integer >= 0 and divisible by 2, got 5"),
    ("gradient_clipping", "x" * 80, f': must be a number >= 0 or "auto", got \'{"x" * 56}...'),
]


# Each rule, with a part of its line that names the field.
RULES: list[tuple[dict[str, Any], str]] = [
    # the method
    ({"noloco.local_steps": 11}, "noloco.local_steps 11 is more than training.train_iters 10: the run"),
    ({"noloco.outer_momentum": 0.9}, "noloco.outer_momentum (alpha) 0.9, consensus_weight (gamma) 0.7,"),
    ({"noloco.consensus_weight": 0}, "no outer_momentum is stable with this gamma; consensus_weight 0.01 is"),
    ({"noloco.outer_momentum": 0, "noloco.outer_nesterov": True}, "noloco.outer_nesterov has no effect with"),
    # a federation
    ({"federation.start_with": 2}, "federation.rendezvous is missing"),
    (FEDERATION | {"parallel.replicas": 4}, "parallel.replicas 4: a job of a federation is one replica"),
    (FEDERATION | {"noloco.enabled": False}, "noloco.enabled false: a federation is there for rounds"),
    (FEDERATION | {"noloco.transport": "mpi"}, 'noloco.transport "mpi": a federation has a transport of'),
    (
        FEDERATION | {"noloco.local_steps": "auto"},
        'noloco.local_steps "auto": jobs of a federation cannot agree',
    ),
    ({"noloco.local_steps": "auto"}, 'noloco.routing "round" needs a fixed number of noloco.local_steps'),
    (FEDERATION | {"noloco.routing": "round"}, 'noloco.routing "round": a local step would wait for'),
    (FEDERATION | {"noloco.pairing": "cycle"}, 'noloco.pairing "cycle": the number of replicas'),
    (
        FEDERATION | {"federation.site": "to the left"},
        "federation.site: 'to the left' is no short name: at most",
    ),
    ({"parallel.sites": 2}, "parallel.sites is not a known key; did you mean noloco.sites?"),
    (
        {"noloco.sites": 3, "noloco.pairing": "auto"},
        "noloco.sites 3: 4 replicas do not divide into so many sites",
    ),
    # DeepSpeed's keys
    ({"train_batch_size": 9}, "train_batch_size 9 is not train_micro_batch_size_per_gpu 4 x"),
    ({"train_batch_size": 6, "gradient_accumulation_steps": "auto"}, "train_batch_size 6 does not divide"),
    ({"train_micro_batch_size_per_gpu": MISSING}, "train_micro_batch_size_per_gpu or train_batch_size is"),
    ({"zero_optimization.stage": 3}, "zero_optimization.stage: 3 is not supported, use 0, 1 or 2"),
    ({"zero_optimization.stage": 2}, "zero_optimization.stage 2 needs"),
    ({"fp16": {"loss_scale": 128}}, "fp16.enabled is missing: without it the run is not fp16"),
    ({"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 4}}, "fp16.hysteresis has no effect"),
    ({"evaluation": {"iters": 0, "full": True}}, "evaluation.full true has no effect with iters 0"),
    ({"wandb": {"project": "p"}}, "wandb.project has no effect without enabled, which is missing"),
    ({"bf16.enabled": True, **FP16}, "bf16 and fp16 are both enabled"),
    (FP16, "fp16 with a dynamic loss scale does not go together with routing"),
    ({"fp16": {"enabled": True, "loss_scale": 0}, "parallel.replicas": "auto"}, "dynamic loss scale"),
    # the optimizer and its schedules
    (optimizer("SGD", nesterov=True), "optimizer.params.nesterov needs a momentum > 0"),
    (optimizer("Adam", fused=True), "optimizer.params.fused is of torch's"),
    (optimizer("AdamW", adam_w_mode=False), "adam_w_mode false has no effect on AdamW"),
    (optimizer("Muon", nesterov=True), "optimizer.params.nesterov is not a"),
    (
        optimizer("Muon", adam_lr=0.001) | schedule("WarmupLR", warmup_max_lr=0.01),
        "would be the peak of all weights, but optimizer.params.muon_lr 0.02 is not adam_lr 0.001; leave it out",
    ),
    (schedule("WarmupLR", warmup_min_lr=0.002), "warmup_min_lr 0.002 is more than the peak"),
    (
        schedule("WarmupCosineLR", total_num_steps=10, warmup_num_steps=11),
        "scheduler.params.warmup_num_steps 11 is more than scheduler.params.total_num_steps 10",
    ),
    (
        schedule("WarmupDecayLR", total_num_steps="auto"),
        'warmup_num_steps 1000 (DeepSpeed\'s default) is more than scheduler.params.total_num_steps 10 ("auto": ',
    ),
    (
        schedule("WSD", total_num_steps="auto", decay_num_steps=11),
        'more than total_num_steps 10 ("auto": tra',
    ),
    ({"data.text": None, "data.data_path": "0.3 a 0.7 b"}, "data.data_path: a blend must be a list of"),
    (
        schedule("WSD", total_num_steps="auto", decay_num_steps=4, warmup_num_steps=9),
        "scheduler.params: warmup_num_steps 9 + decay_num_steps 4 is more than total_num_steps 10",
    ),
    # the data
    ({"data.text": MISSING}, "data.text is missing"),
    ({"data.data_path": "prefix"}, "data.text and data.data_path both say what is read"),
    ({"data.split": "1,2,3,4"}, "data.split: must be up to three weights"),
    ({"data.split": "1"}, "leaves no text for validation"),
    ({"data.valid_data_path": "b"}, "data.valid_data_path goes together with data.train_data_path"),
    ({"data": {"train_data_path": "a"}}, "data.valid_data_path is missing, and evaluation.iters is 10"),
    ({"data": {"data_path": ["0.5", "a", "b"]}}, "data.data_path: must be one prefix, or weights > 0 and"),
    ({"data.tokenizer_type": "HuggingFaceTokenizer"}, "needs tokenizer_model, its folder"),
    (
        {"data.tokenizer_model": "x", "data.tokenizer_type": "byte"},
        'data.tokenizer_model does not go together with tokenizer_type "byte"; leave one out',
    ),
    ({"data.prepend_bos": True}, "data.prepend_bos: the byte tokenizer has no BOS; leave prepend_bos out"),
    ({"data": {"sft_data_path": "a", "eod_mask_loss": True}}, "data.eod_mask_loss does not go together"),
    (
        {"data": {"sft_data_path": "a"}, "model.transformer_impl": "transformer_engine"},
        'data.sft_packing needs model.transformer_impl "local" (or "auto")',
    ),
    ({"data.sft_packing": False}, "data.sft_packing has a meaning only with data.sft_data_path"),
    # the model
    ({"model.family": "qwen3", "model.rope_scaling_factor": 8.0}, "model.rope_scaling_factor is not a"),
    (
        {"model.hidden_act": "gelu"},
        "model.hidden_act is not a known key; model.family decides it; leave it out",
    ),
    (
        {"model.sliding_window": 5},
        'model.sliding_window is not a field of the family "llama", only of "mistral", "mixtral" and "starcoder2"',
    ),
    ({"model.family": "mixtral", "parallel.tensor_model_parallel_size": 2}, 'family "mixtral" needs'),
    ({"model.family": "mixtral", "model.moe_router_topk": 9}, "model.moe_router_topk 9 is more than"),
    ({"model.yarn_rotary_scaling_factor": 4.0}, "model.yarn_rotary_scaling_factor and"),
    (YARN | {"model.rope_scaling_factor": 8.0}, "model.rope_scaling_factor and YaRN scale the same rotary"),
    ({"model.hidden_size": 66}, "66 does not divide into 4 attention heads (66 / 4 = 16.50)"),
    ({"model.kv_channels": 15}, "model.kv_channels: a head of 15 channels has no rotary embedding"),
    ({"model.num_query_groups": 3}, "num_attention_heads 4 does not divide into model.num_query_groups 3"),
    ({"model.recompute_granularity": "full"}, 'recompute_granularity "full" needs model.recompute_method'),
    ({"model.recompute_method": "block"}, "recompute_method has a meaning only with model.recompute"),
    ({"model.recompute_modules": ["mlp"]}, 'a meaning only with model.recompute_granularity "selective"'),
    (
        {"model.recompute_granularity": "selective", "model.recompute_modules": ["moe"]},
        'no layer of the family "llama" has "moe"',
    ),
    (
        RECOMPUTED | {"model.recompute_num_layers": 3},
        "model.recompute_num_layers 3 is more than the 2 layers",
    ),
    (
        RECOMPUTED
        | {"model.recompute_method": "uniform", "model.recompute_num_layers": 2, "model.num_layers": 5}
        | {"parallel.num_layers_in_first_pipeline_stage": 2},
        'model.recompute_method "uniform": the 3 layers of a model chunk do not divide into units of model.recom',
    ),
    # the parallel layout
    ({"model.num_layers": 3}, "3 layers (model.num_layers) do not divide into 2 stages"),
    (VIRTUAL | {"parallel.pipeline_model_parallel_size": 1}, "size 2 needs parallel.pipeline_model_parallel"),
    (VIRTUAL | {"gradient_accumulation_steps": 3}, "3 / 2 stages = 1.50"),
    ({"parallel.tensor_model_parallel_size": 3}, "model.num_attention_heads 4 does not divide by"),
    (TP4 | {"model.num_query_groups": 2}, "model.num_query_groups 2 does not divide by"),
    (TP4 | {"model.ffn_hidden_size": 130}, "model.ffn_hidden_size 130 does not divide by"),
    (
        TP4 | {"model.vocab_size": 5, "model.make_vocab_size_divisible_by": 3},
        "the padded vocabulary 6 does not divide by parallel.tensor_model_parallel_size 4",
    ),
    (
        TP4 | {"parallel.sequence_parallel": True, "model.seq_length": 30},
        "model.seq_length 30 does not divide by parallel.tensor_model_parallel_size 4",
    ),
    ({"parallel.expert_model_parallel_size": 2, "parallel.data_parallel_size": 2}, "has no experts"),
    (EP2 | {"model.num_moe_experts": 5}, "model.num_moe_experts 5 does not divide by"),
    (EP2 | {"parallel.data_parallel_size": 1}, "parallel.data_parallel_size 1 does not divide by"),
    (EP2 | {"zero_optimization": {"reduce_scatter": False}}, "zero_optimization.reduce_scatter false: with"),
    (EP2 | {"zero_optimization": {"contiguous_gradients": False}}, "zero_optimization.contiguous_gradients"),
    ({"parallel.sequence_parallel": True}, "sequence_parallel needs parallel.tensor_model_parallel_size > 1"),
    ({"model.vocab_size": 32000}, 'data.tokenizer_type "byte" has 257 tokens, model.vocab_size is 32,000;'),
    ({"training.output_dir": "a\0b"}, r"training.output_dir: has a NUL character (\u0000), which no file's"),
    ({"model.family": "mixtral", "model.num_moe_experts": 10**7}, "model.num_moe_experts: "),
    ({"model.hidden_size": 2 * 10**310}, "200000000... has 311 digits; no setting takes more than 20"),
]


def problems_of(edits: dict[str, Any], folder: Path) -> list[str]:
    """Return the problems of GOOD with edits, read from a file, whose name begins every line."""
    path = folder / "run.json"
    path.write_text(json.dumps(edited(edits)))
    with pytest.raises(UserError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


# The rules have nothing to refuse in these.
ACCEPTED: list[dict[str, Any]] = [
    {"noloco.local_steps": 10},
    {"noloco.local_steps": 11, "noloco.enabled": False},
    {"noloco.local_steps": 11, "parallel.replicas": 1},
    FP16 | {"noloco.routing": "off"},
    FP16 | {"parallel.replicas": 1},
    {"fp16": {"enabled": True, "loss_scale": 128}},
    RECOMPUTED | {"model.recompute_num_layers": 1},
]


@pytest.mark.parametrize("edits", ACCEPTED, ids=str)
def test_rules_accept_what_only_looks_wrong(edits: dict[str, Any]) -> None:
    RunConfig(**edited(edits))


@pytest.mark.parametrize(("key", "value", "text"), LINES, ids=[f"{key}{text[:40]}" for key, _, text in LINES])
def test_the_line_for_a_wrong_key_or_value(tmp_path: Path, key: str, value: Any, text: str) -> None:
    assert problems_of({key: value}, tmp_path) == [key + text]


@pytest.mark.parametrize(("edits", "part"), RULES, ids=[part[:60] for _, part in RULES])
def test_each_rule_between_fields(tmp_path: Path, edits: dict[str, Any], part: str) -> None:
    assert [part in line for line in problems_of(edits, tmp_path)].count(True) == 1


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ('{"a": 1,\n "b" 2}', "not valid JSON: line 2, column 6"),
        ('{"a": 1 // one\n}', "line 1, column 9: JSON has no comments; delete it"),
        ('{\n # one\n "a": 1}', "line 2, column 2: JSON has no comments; delete it"),
        ("[1, 2]", "must hold a JSON object, got [1, 2]"),
        ('{"noloco": {"local_steps": 1, "local_steps": 2}}', 'the key "local_steps" is there twice'),
        ('{"noloco": {}, "noloco": {}}', 'the key "noloco" is there twice'),
        ("{}", "model is missing"),
        ('{"model": ' * 2000 + "1" + "}" * 2000, "objects or lists are nested too deeply"),
        ("[" * 2000 + "]" * 2000, "objects or lists are nested too deeply"),
    ],
)
def test_a_file_that_is_not_one_json_object(tmp_path: Path, text: str, fragment: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"run\.json: ") as caught:
        load_config(path)
    assert fragment in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_config(tmp_path / "absent.json")
    (tmp_path / "latin.json").write_bytes(b'{"\xe9": 1}')
    with pytest.raises(UserError, match="byte 2 is 0xe9"):
        load_config(tmp_path / "latin.json")


def test_all_problems_are_reported_in_the_order_of_the_file() -> None:
    raw = {"zzz": 1, **edited({"training.train_iters": 0, "noloco.group_size": 0, "noloco.local_steps": 0})}
    raw["optimizer"] = {"type": "AdamW", "parms": {}}
    with pytest.raises(UserError) as caught:
        RunConfig(**raw)
    starts = [line.split(":")[0].split()[0] for line in str(caught.value).splitlines()]
    assert starts == [
        "zzz",
        "optimizer.parms",
        "noloco.local_steps",
        "noloco.group_size",
        "training.train_iters",
    ]


def test_explain_of_one_block() -> None:
    text = explain("noloco")
    assert "noloco.routing" in text
    assert not any(
        line.startswith("  ") and not line.startswith(("  noloco.", "   ")) for line in text.splitlines()
    )
    assert '"Muon"' in explain("optimizer")


def test_a_field_with_a_meaning_of_auto_takes_it() -> None:
    rows = [row for section in _sections() for row in section.fields]
    named = [(name, takes) for name, takes, meaning in rows if '"auto":' in meaning or '"auto" (' in meaning]
    assert {"local_steps", "overlap_steps"} <= {name for name, _ in named}
    assert [name for name, takes in named if '"auto"' not in takes] == []


def test_explain_of_one_field() -> None:
    title, *lines = explain("noloco.overlap_steps").splitlines()
    assert title.startswith("noloco: ")
    assert [line.split()[0] for line in lines if "  noloco." in line] == ["noloco.overlap_steps"]
    assert explain("optimizer.params.lr").count("  optimizer.params.lr ") == 3, "by type of optimizer"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nolco", "did you mean noloco?"),
        ("noloco.local_stpes", "did you mean noloco.local_steps?"),
        ("zzz", "the blocks are noloco, "),
    ],
)
def test_explain_of_an_unknown_name_says_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"config --explain {name}: there is no such block or field; {hint}"):
        explain(name)


def test_explain_mentions_every_field() -> None:
    words = " ".join(explain().split())
    paths: dict[tuple[str, ...], list[type[BaseModel]]] = {
        (): [RunConfig],
        ("optimizer", "params"): list(OPTIMIZERS.values()),
        ("scheduler", "params"): list(SCHEDULES.values()),
    }
    for path, models in paths.items():
        for name, field in (found for model in models for found in fields_of(model, path)):
            assert name in words
            assert field.description
            assert " ".join(field.description.split()) in words


def test_names_in_other_programs_lead_to_fields_and_are_none() -> None:
    ours = {name for name, _ in fields_of(RunConfig)}
    assert set(ALIASES.values()) <= ours
    assert not names_of_others().keys() & ours
