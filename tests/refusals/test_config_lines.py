"""What a wrong file is told: each form of a line once, and each rule between fields."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from megatron_noloco.config import RunConfig, explain, load_config
from megatron_noloco.config.explain import _sections
from megatron_noloco.config.optimizer_block import OPTIMIZERS, SCHEDULES
from megatron_noloco.config.programs import PROGRAMS, Carried, Facts, Program
from megatron_noloco.errors import UserError
from megatron_noloco.fields import fields_of
from tests.kit.configs import FEDERATION, MISSING, edited
from tests.kit.golden import check

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


# Each form of a line once, then each rule between fields. tests/golden/config_lines.txt has what is said of them.
WRONG: list[dict[str, Any]] = [
    # keys that are not known: the nearest, the same name elsewhere, the name of another program
    {"noloco.local_stpes": 5},
    {"optimizer.params.beta": 8},
    {"zzz": 1},
    {"train_iters": 5},
    {"model.enabled": 1},
    {"training.micro_batch_size": 8},
    {"noloco.H": 8},
    {"data.reset_position_ids": True},
    {"noloco.overlap": 1, "noloco.grouping": "stage"},
    {"federation.local_steps": "all", "federation.notice_command": "curl"},
    {"model.tie_word_embeddings": 1},
    {"cuda_graph_impl": "local"},
    *(
        {name: 1}
        for name in ("lr", "weight_decay", "lr_decay_style", "vocab_file", "save", "exit_duration_in_mins")
    ),
    # keys of DeepSpeed that do nothing here
    {"steps_per_print": 10},
    {"zero_optimization.stage3_max_reuse_distance": 1},
    # names of optimizers and schedules
    {"optimizer.type": "Adamm"},
    {"optimizer.type": "RMSprop"},
    {"optimizer.type": MISSING},
    # what is missing
    {"training.train_iters": MISSING},
    # types and bounds
    {"training.train_iters": "ten"},
    {"optimizer.params.lr": "auto"},
    {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": "auto"}},
    {"noloco.outer_lr": float("nan")},
    {"noloco.consensus_weight": 1e200},
    {"noloco.method": "nolocko"},
    {"noloco.routing": "step"},
    {"data.data_path": 3},
    {"optimizer.params.betas": [0.9]},
    {"bf16.enabled": 1},
    {"zero_optimization.allgather_bucket_size": 5},
    {"gradient_clipping": "x" * 80},
    # the method
    {"noloco.local_steps": 11},
    {"noloco.outer_momentum": 0.9},
    {"noloco.consensus_weight": 0},
    {"noloco.outer_momentum": 0, "noloco.outer_nesterov": True},
    # a federation
    {"federation.start_with": 2},
    FEDERATION | {"parallel.replicas": 4},
    FEDERATION | {"noloco.enabled": False},
    FEDERATION | {"noloco.transport": "mpi"},
    FEDERATION | {"noloco.local_steps": "auto"},
    {"noloco.local_steps": "auto"},
    FEDERATION | {"noloco.routing": "round"},
    FEDERATION | {"noloco.pairing": "cycle"},
    FEDERATION | {"noloco.method": "diloco"},
    FEDERATION | {"noloco.group_size": 4},
    FEDERATION | {"noloco.sites": 2, "noloco.pairing": "auto"},
    FEDERATION | {"federation.key_file": MISSING},
    FEDERATION | {"federation.encryption": "none"},
    FEDERATION | {"federation.listen": "off", "federation.advertise": "tcp://a:1"},
    FEDERATION | {"federation.site": "to the left"},
    {"parallel.sites": 2},
    {"noloco.sites": 3, "noloco.pairing": "auto"},
    # DeepSpeed's keys
    {"train_batch_size": 9},
    {"train_batch_size": 6, "gradient_accumulation_steps": "auto"},
    {"train_micro_batch_size_per_gpu": MISSING},
    {"zero_optimization.stage": 3},
    {"zero_optimization.stage": 2},
    {"fp16": {"loss_scale": 128}},
    {"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 4}},
    {"evaluation": {"iters": 0, "full": True}},
    {"wandb": {"project": "p"}},
    {"bf16.enabled": True, **FP16},
    FP16,
    {"fp16": {"enabled": True, "loss_scale": 0}, "parallel.replicas": "auto"},
    # the optimizer and its schedules
    optimizer("SGD", nesterov=True),
    optimizer("Adam", fused=True),
    optimizer("AdamW", adam_w_mode=False),
    optimizer("Muon", nesterov=True),
    optimizer("Muon", adam_lr=0.001) | schedule("WarmupLR", warmup_max_lr=0.01),
    schedule("WarmupLR", warmup_min_lr=0.002),
    schedule("WarmupCosineLR", total_num_steps=10, warmup_num_steps=11),
    schedule("WarmupDecayLR", total_num_steps="auto"),
    schedule("WSD", total_num_steps="auto", decay_num_steps=11),
    schedule("WSD", total_num_steps="auto", decay_num_steps=4, warmup_num_steps=9),
    # the data
    {"data.text": MISSING},
    {"data.data_path": "prefix"},
    {"data.split": "1,2,3,4"},
    {"data.split": "1"},
    {"data.valid_data_path": "b"},
    {"data.text": MISSING, "data.train_data_path": "a", "data.split": "1,1,1"},
    {"data": {"train_data_path": "a"}},
    {"data": {"data_path": [0.5, "a", "b"]}},
    {"data": {"data_path": ["2021", "2022"]}},
    {"data.max_lost_characters": 2},
    {"data.tokenizer_type": "HuggingFaceTokenizer"},
    {"data.tokenizer_model": "x", "data.tokenizer_type": "byte"},
    {"data.prepend_bos": True},
    {"data": {"sft_data_path": "a", "eod_mask_loss": True}},
    {"data": {"sft_data_path": "a"}, "model.transformer_impl": "transformer_engine"},
    {"data.sft_packing": False},
    # the model
    {"model.family": "qwen3", "model.rope_scaling_factor": 8.0},
    {"model.hidden_act": "gelu"},
    {"model.sliding_window": 5},
    {"model.family": "mixtral", "parallel.tensor_model_parallel_size": 2},
    {"model.family": "mixtral", "model.moe_router_topk": 9},
    {"model.yarn_rotary_scaling_factor": 4.0},
    YARN | {"model.rope_scaling_factor": 8.0},
    {"model.hidden_size": 66},
    {"model.kv_channels": 15},
    {"model.num_query_groups": 3},
    {"model.recompute_granularity": "full"},
    {"model.recompute_method": "block"},
    {"model.recompute_modules": ["mlp"]},
    {"model.recompute_granularity": "selective", "model.recompute_modules": ["moe"]},
    RECOMPUTED | {"model.recompute_num_layers": 3},
    RECOMPUTED
    | {"model.recompute_method": "uniform", "model.recompute_num_layers": 2, "model.num_layers": 5}
    | {"parallel.num_layers_in_first_pipeline_stage": 2},
    # the parallel layout
    {"model.num_layers": 3},
    VIRTUAL | {"parallel.pipeline_model_parallel_size": 1},
    VIRTUAL | {"gradient_accumulation_steps": 3},
    {"parallel.tensor_model_parallel_size": 3},
    TP4 | {"model.num_query_groups": 2},
    TP4 | {"model.ffn_hidden_size": 130},
    TP4 | {"model.vocab_size": 5, "model.make_vocab_size_divisible_by": 3},
    TP4 | {"parallel.sequence_parallel": True, "model.seq_length": 30},
    {"parallel.expert_model_parallel_size": 2, "parallel.data_parallel_size": 2},
    EP2 | {"model.num_moe_experts": 5},
    EP2 | {"parallel.data_parallel_size": 1},
    EP2 | {"zero_optimization": {"reduce_scatter": False}},
    EP2 | {"zero_optimization": {"contiguous_gradients": False}},
    {"parallel.sequence_parallel": True},
    {"model.vocab_size": 32000},
    {"training.output_dir": "a\0b"},
    {"model.family": "mixtral", "model.num_moe_experts": 10**7},
    {"model.hidden_size": 2 * 10**310},
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


def test_what_is_said_of_a_wrong_config(tmp_path: Path) -> None:
    check("config_lines", ((edits, "\n".join(problems_of(edits, tmp_path))) for edits in WRONG))


WRONG_FILES: list[bytes | None] = [
    None,  # there is none
    b'{"a": 1,\n "b" 2}',
    b'{"a": 1 // one\n}',
    b'{\n # one\n "a": 1}',
    b"[1, 2]",
    b'{"noloco": {"local_steps": 1, "local_steps": 2}}',
    b'{"noloco": {}, "noloco": {}}',
    b'{"model": ' * 2000 + b"1" + b"}" * 2000,
    b"[" * 2000 + b"]" * 2000,
    b'{"\xe9": 1}',
]


def test_what_is_said_of_a_file_that_is_not_one_json_object(tmp_path: Path) -> None:
    def cases() -> Iterator[tuple[str, str]]:
        path = tmp_path / "run.json"
        for content in WRONG_FILES:
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(UserError) as caught:
                load_config(path)
            yield str(content)[:60], str(caught.value).replace(str(tmp_path), "FOLDER")

    check("config_files", cases())


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


def test_explain_of_data_names_what_is_read() -> None:
    for name in ("text", "sft_data_path"):
        assert "JSON lines, Parquet or Arrow" in " ".join(explain(f"data.{name}").split())
    for words in ("tokenized already", "without .bin or .idx", "a weight before each path"):
        assert words in " ".join(explain("data.data_path").split())


def test_explain_of_one_field() -> None:
    title, *lines = explain("noloco.overlap_steps").splitlines()
    assert title.startswith("noloco: ")
    assert [line.split()[0] for line in lines if "  noloco." in line] == ["noloco.overlap_steps"]
    assert explain("optimizer.params.lr").count("  optimizer.params.lr ") == 3, "by type of optimizer"


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


def test_a_default_that_changes_is_reviewed() -> None:
    """In tests/golden/defaults.txt: the same file would become another run."""

    def cases() -> Iterator[tuple[str, str]]:
        for title, block in {"config": RunConfig, **OPTIMIZERS, **SCHEDULES}.items():
            defaults = ((name, field.default) for name, field in fields_of(block) if not field.is_required())
            yield title, "\n".join(f"{name} {json.dumps(default)}" for name, default in defaults)

    check("defaults", cases())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_settings_of_other_programs_lead_to_fields(program: Program) -> None:
    ours = {name for name, _ in fields_of(RunConfig)}
    params = {name for block in (*OPTIMIZERS.values(), *SCHEDULES.values()) for name in block.model_fields}
    known = {
        *("", "facts", "optimizer.type", *ours, *(name.partition(".")[0] for name in ours)),
        *(f"facts.{name}" for name in Facts.model_fields),
        *(f"optimizer.params.{name}" for name in params),
    }
    assert {row.target for row in program.words.values() if isinstance(row, Carried)} <= known
    assert all(program.row(name) for name in program.defaults)


def test_each_fact_comes_from_a_setting() -> None:
    targets = {
        row.target for program in PROGRAMS for row in program.words.values() if isinstance(row, Carried)
    }
    assert {f"facts.{name}" for name in Facts.model_fields} <= targets
