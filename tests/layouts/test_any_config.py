"""Configs drawn at random, of all that is accepted: each runs, continues bit for bit, and with other ranks."""

import json
import math
import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron_noloco.cli.main import main
from megatron_noloco.config import RunConfig
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.model.architecture import PipelineSplit
from tests.kit.datasets import write_dataset
from tests.kit.disturbed import Run, assert_same_state
from tests.kit.federation import Federation, assert_same, state_of
from tests.kit.ranks import run_ranks, slow
from tests.kit.tiny import (
    FAMILY_MODELS,
    MIXTURES,
    metrics,
    run_as_slots,
    tiny,
    write_config,
    write_text,
)

STEPS = 6
MOST_RANKS = 8
# All with rounds. 25 of three in one group, saved while an exchange is under way; 36 with experts, Muon, documents
# told apart, int8; 40 along routes, with virtual stages, bf16 and int4; 47 with tensor parallelism, Muon, records
# packed, overlap and fragments; 59 with dp 2. Candidates like them have up to 8 ranks.
QUICK = (25, 36, 40, 47, 59)
SEEDS = [seed if seed in QUICK else slow(seed) for seed in range(60)]

YARN = {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 64}
OPTIMIZERS = [
    {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    *({"type": name, "params": {"lr": 0.003}} for name in ("Adam", "SGD")),
    {"type": "Muon", "params": {"lr": 0.003, "weight_decay": 0.1}},
]
SCHEDULERS = [
    None,
    {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}},
    {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 3}},
    {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_max_lr": 0.003, "warmup_num_steps": 2},
    },
    {"type": "WSD", "params": {"total_num_steps": 6, "warmup_num_steps": 1, "decay_num_steps": 3}},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Ways to say what is read; the last is for fine-tuning."""
    folder = tmp_path_factory.mktemp("data")
    random = Random(0)
    for name in "ab":
        letters = ("".join(random.choices("abcdefgh \n", k=random.randint(1, 150))) for _ in range(100))
        end = ByteTokenizer.end_of_document
        write_dataset(folder / name, ([*ByteTokenizer().encode(text), end] for text in letters))
    words = ["".join(random.choices("abcdefgh", k=random.randint(1, 20))) for _ in range(400)]
    records = folder / "records.jsonl"
    with records.open("w") as file:
        for prompt, completion in zip(words[::2], words[1::2], strict=True):
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    first, second = str(folder / "a"), str(folder / "b")
    return [
        {"text": write_text(folder)},
        {"text": None, "data_path": first},
        {"text": None, "data_path": [0.3, first, 0.7, second]},
        {
            "text": None,
            "split": None,
            "train_data_path": first,
            "valid_data_path": ["0.5", first, "0.5", second],
        },
        {"sft_data_path": str(records)},
    ]


def draw(random: Random) -> tuple[dict[str, Any], int]:
    """What differs from the tiny config, without its data, and the number of ranks."""
    one_of = random.choice
    sizes = (MOST_RANKS + 1,)
    while math.prod(sizes) > MOST_RANKS:
        sizes = (one_of([1, 2, 2, 3, 4]), one_of([1, 2, 2, 3, 4]), one_of([1, 1, 2]), one_of([1, 1, 2]))
    replicas, stages, dp_size, tp_size = sizes
    virtual = one_of([1, 2]) if stages > 1 else 1
    recompute = one_of([{}, {"recompute_granularity": "selective"}, *_full_recompute()])
    bf16, local_steps, outer_momentum = one_of([True, False]), one_of([1, 2, 3]), one_of([0.5, 0.3, 0.0])
    changes = {
        "train_micro_batch_size_per_gpu": one_of([1, 2]),
        "gradient_accumulation_steps": one_of([1, 2]) * (stages if virtual > 1 else one_of([1, 2])),
        "gradient_clipping": one_of([0.5, "auto", 0.0, None]),
        "bf16": {"enabled": bf16},
        "data_types": one_of([None, {"grad_accum_dtype": "bf16"}]) if bf16 else None,
        "zero_optimization": one_of(
            [None, {"stage": 0}, {"stage": 2 if stages == tp_size == 1 else 1, "reduce_bucket_size": 5000}]
        ),
        "noloco": {
            "enabled": one_of([True, True, True, False]),
            "method": one_of(["noloco", "diloco"]),
            "local_steps": local_steps,
            "outer_momentum": outer_momentum,
            "outer_nesterov": outer_momentum > 0 and one_of([True, False]),
            "consensus_weight": one_of([None, 0.3, 1.0]),
            "group_size": random.randint(2, max(2, replicas)),
            "pairing": "cycle" if replicas in (2, 4) and one_of([True, False]) else "random",
            "payload": one_of(["fp32", "int8", "int4"]),
            "slow_weights": one_of(["host", "device"]),
            # not "auto", which is no function of the config: two runs may differ
            "overlap_steps": one_of([0, *[random.randint(0, local_steps)] * 2]),
            "routing": one_of(["round", "microbatch", "microbatch", "off"]),
            "transport": "torch",
        },
        "parallel": {
            "replicas": replicas,
            "pipeline_model_parallel_size": stages,
            "data_parallel_size": dp_size,
            "tensor_model_parallel_size": tp_size,
            "virtual_pipeline_model_parallel_size": virtual,
            "sequence_parallel": tp_size > 1 and one_of([True, False]),
        },
        "model": {
            "num_layers": stages * virtual * one_of([1, 2]),
            "num_query_groups": one_of([2, 4]),
            "kv_channels": one_of([None, 6, 16]),
            "make_vocab_size_divisible_by": tp_size * one_of([1, 7, 128]),
            "untie_embeddings_and_output_weights": one_of([True, False]),
            "hidden_dropout": one_of([0.0, 0.1]),
            "attention_dropout": one_of([0.0, 0.1]),
            **recompute,
        },
        "training": {
            "train_iters": STEPS,
            "log_interval": one_of([1, 4]),
            "seed": random.randrange(100),
            "watchdog_seconds": 0.0,  # no line where other work shares the cores
        },
        "checkpoint": {"async_save": one_of([True, False])},
        "evaluation": {
            "interval": one_of([0, 2, 3]),
            "iters": one_of([0, 2, 3]),
            "mean_model": one_of([True, False]),
        },
        "tensorboard": {"enabled": one_of([True, False])},
    }
    if random.random() < 0.3:
        changes["model"] |= YARN
    if changes["noloco"]["pairing"] == "cycle" and replicas == 4:
        changes["noloco"]["sites"] = one_of([2, [*"abba"]])
    return changes, math.prod(sizes)


def other_ranks(random: Random, raw: dict[str, Any]) -> dict[str, Any]:
    """Changes to another number of replicas, in three cases of four with other sizes inside a replica as well."""
    saved, layers = sizes_of(raw), raw["model"]["num_layers"]
    fitting = [
        sizes
        for sizes in product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2), (1, 2))
        if sizes[0] != saved[0] and math.prod(sizes) <= MOST_RANKS and layers % sizes[1] == 0
    ]
    kept = [sizes for sizes in fitting if sizes[1:] == saved[1:]]
    replicas, pp, dp_size, tp_size = random.choice(kept if kept and random.random() < 0.25 else fitting)
    changes: dict[str, Any] = {"parallel": {"replicas": replicas}}
    changes["noloco"] = {"group_size": 2, "sites": None}
    if replicas == 3:  # pairs make no cycle of 3
        changes["noloco"]["pairing"] = "random"
    if (pp, dp_size, tp_size) != saved[1:]:
        changes["parallel"] |= {
            "pipeline_model_parallel_size": pp,
            "data_parallel_size": dp_size,
            "tensor_model_parallel_size": tp_size,
            "virtual_pipeline_model_parallel_size": 1,
            "sequence_parallel": tp_size > 1
            and (raw["model"]["family"] in MIXTURES or random.choice([True, False])),
            **asdict(PipelineSplit()),
        }
        mixture = raw["model"]["family"] in MIXTURES
        changes["parallel"]["expert_model_parallel_size"] = dp_size if mixture else 1
        changes["model"] = {"make_vocab_size_divisible_by": tp_size * random.choice([1, 7])}
        changes["zero_optimization"] = None
    return changes


def sizes_of(raw: dict[str, Any]) -> tuple[int, int, int, int]:
    """Replicas, stages, dp, tp."""
    parallel = raw["parallel"]
    names = ("replicas", "pipeline_model_parallel_size", "data_parallel_size", "tensor_model_parallel_size")
    replicas, stages, dp_size, tp_size = (parallel[name] for name in names)
    return replicas, stages, dp_size, tp_size


def uneven(random: Random, parallel: dict[str, Any]) -> dict[str, Any]:
    """Fewer layers in the first stage, or in both ends, than in the others."""
    stages, virtual = (
        parallel["pipeline_model_parallel_size"],
        parallel["virtual_pipeline_model_parallel_size"],
    )
    layers = 2 * stages * virtual
    return random.choice(
        [
            {
                "parallel": {"num_layers_in_first_pipeline_stage": virtual},
                "model": {"num_layers": layers - virtual},
            },
            {
                "parallel": {
                    "account_for_embedding_in_pipeline_split": True,
                    "account_for_loss_in_pipeline_split": True,
                },
                "model": {"num_layers": layers - 2},
            },
        ]
    )


def _full_recompute() -> list[dict[str, Any]]:
    common = {"recompute_granularity": "full", "recompute_num_layers": 1}
    return [{**common, "recompute_method": method} for method in ("uniform", "block")]


def drawn_run(seed: int, folder: Path, data: list[dict[str, Any]]) -> tuple[Run, int]:
    random = Random(seed)
    changes, ranks = draw(random)
    run = Run(folder, changes, text=str(data[0]["text"]))
    run.change({"data": random.choice(data[:-1])})
    # Not added to those of the tiny config, but in their place.
    run.raw |= {"optimizer": random.choice(OPTIMIZERS), "scheduler": random.choice(SCHEDULERS)}
    run.change({"noloco": {"fragments": random.randint(1, run.raw["noloco"]["local_steps"])}})
    run.change({"model": random.choice(list(FAMILY_MODELS.values()))})
    if "rope_scaling_factor" in run.raw["model"]:  # refused with YaRN: they scale the same frequencies
        run.change({"model": dict.fromkeys(YARN)})
    if run.raw["model"]["family"] in MIXTURES and run.raw["parallel"]["tensor_model_parallel_size"] > 1:
        run.change({"parallel": {"sequence_parallel": True}})  # refused without
    if run.raw["model"]["family"] in MIXTURES:
        dp_size = run.raw["parallel"]["data_parallel_size"]
        run.change({"parallel": {"expert_model_parallel_size": random.choice([1, dp_size])}})
    apart: dict[str, Any] = {"reset_attention_mask": True, "eod_mask_loss": True}
    records = {**dict.fromkeys(("text", "data_path", "train_data_path", "valid_data_path")), **data[-1]}
    run.change({"data": random.choice([{}, apart, {**records, "sft_packing": random.choice([True, False])}])})
    run.change({"model": {"z_loss_coeff": random.choice([0.0, 1e-3])}})
    if run.raw["parallel"]["pipeline_model_parallel_size"] > 1:
        run.change(random.choice([{}, uneven(random, run.raw["parallel"])]))
    run.change({"data": {"split_special_tokens": random.choice([True, False])}})
    RunConfig(**run.raw).topology(ranks)
    return run, ranks


def succeed(run: Run, ranks: int, train_iters: int = STEPS, **checkpoint: Any) -> str:
    """What rank 0 printed."""
    changes = {"training": {"train_iters": train_iters}, "checkpoint": checkpoint}
    outcomes = run.launch(ranks, changes=changes)
    assert [(outcome.code, outcome.err) for outcome in outcomes] == [(0, "")] * ranks
    return outcomes[0].out


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_config_resumes_bitwise_and_with_other_ranks(
    seed: int, data: list[dict[str, Any]], tmp_path: Path
) -> None:
    whole, ranks = drawn_run(seed, tmp_path / "whole", data)
    saved = 1 + seed % (STEPS - 1)
    succeed(whole, ranks, save_interval=saved, keep_last=STEPS)
    losses = [row["train/loss"] for replica in metrics(whole.folder) for row in replica]
    assert losses
    assert all(0 < loss < 20 for loss in losses)

    parts = whole.copy(tmp_path / "parts")
    for folder in parts.checkpoints.glob("step_*"):
        if folder != parts.step_folder(saved):
            shutil.rmtree(folder)
    assert f"step {saved}, " in succeed(parts, ranks, save_interval=STEPS)
    assert_same_state(parts.step_folder(STEPS), whole.step_folder(STEPS))

    whole.change(other_ranks(Random(seed), whole.raw))
    told = succeed(whole, math.prod(sizes_of(whole.raw)), train_iters=STEPS + 2)
    assert f"step {STEPS}, " in told


# Each refused at least where what it changes is used.
SPOILED: list[dict[str, Any]] = [
    {"model": {"num_query_groups": 3}},
    {"model": {"num_layers": 7}},
    {"noloco": {"fragments": 9}},
    {"noloco": {"overlap_steps": 9}},
    {"noloco": {"group_size": 9}},
    {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    {"parallel": {"expert_model_parallel_size": 3}},
    {"zero_optimization": {"stage": 3}},
    {"scheduler": {"type": "WSD", "params": {"total_num_steps": 2, "decay_num_steps": 3}}},
]
AGREED = [0, *range(101, 101 + len(SPOILED))]  # of all that is accepted, and spoiled
QUICK_AGREED = (11, 106, 109)  # 11 has 2 ranks


@pytest.mark.parametrize(
    "seed", [seed if seed in QUICK_AGREED else slow(seed) for seed in [*AGREED, *range(1, 20)]]
)
def test_all_commands_agree_whether_a_drawn_config_is_sound(
    seed: int, data: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`config --check`, its dry run, `plan`, and the training itself."""
    run, ranks = drawn_run(seed, tmp_path, data)
    if seed > 100:
        run.raw = tiny(SPOILED[seed - 101], run.raw)
    path = write_config(tmp_path, run.raw)
    codes = {
        name: main([*name.split(), path]) for name in ("config --check", "config --dry-run --check", "plan")
    }
    trained = run.launch(ranks)
    codes["train"] = max(outcome.code for outcome in trained)
    said = capfd.readouterr().err + trained[0].err
    assert set(codes.values()) in ({0}, {2}), (codes, said)
    assert seed > 100 or not codes["train"], said


def of_few_ranks(seed: int) -> bool:
    sizes = sizes_of(draw(Random(seed))[0])
    return sizes[0] > 1 and math.prod(sizes) <= 4


FEDERATED = list(filter(of_few_ranks, range(100)))[:12]
QUICK_FEDERATED = (10, 12)  # four jobs with overlap; two of two stages with two chunks and dropout


@pytest.mark.parametrize(
    "seed",
    [seed if seed in QUICK_FEDERATED else slow(seed) for seed in FEDERATED],
)
def test_a_drawn_config_trains_as_separate_jobs(
    seed: int, data: list[dict[str, Any]], tmp_path: Path
) -> None:
    """To the last bit as one job does, but for what a federation does not have, or cuts elsewhere.

    The one job reads the samples that the jobs read.
    """
    one_job, ranks = drawn_run(seed, tmp_path / "one", data)
    slots = sizes_of(one_job.raw)[0]
    pairs = {"enabled": True, "method": "noloco", "group_size": 2, "sites": None, "pairing": "random"}
    one_job.change({"noloco": {**pairs, "routing": "off", "payload": "fp32", "fragments": 1}})
    one_job.change({"checkpoint": {"save_interval": STEPS}})
    run_ranks(ranks, run_as_slots, write_config(one_job.folder, one_job.raw))
    ours = {
        "federation": {"start_with": slots, "rounds_behind": STEPS, "skip_local_steps": False},
        "noloco": {"transport": None},
        "parallel": {"replicas": None},
        "training": {"output_dir": str(tmp_path / "jobs")},
        "checkpoint": {"save_interval": STEPS},
    }
    raw = tiny(ours, one_job.raw)
    with Federation(tmp_path / "jobs", raw, base=raw) as federation:
        for replica in range(slots):
            federation.start(replica, ranks // slots)
        federation.wait()
        for replica in range(slots):
            assert_same(federation.state(replica, STEPS), state_of(one_job.checkpoints, replica, STEPS))
