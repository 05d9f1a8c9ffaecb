"""What `plan` says of a config, against what runs of it did."""

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.config import RunConfig
from megatron_noloco.preflight.memory import parameters_of_stages
from megatron_noloco.preflight.schemes import exchange_bytes
from megatron_noloco.preflight.short_run import DryRun, dry_run
from tests.kit.ranks import by_hand, call_here, run_ranks
from tests.kit.tiny import (
    FAMILY_MODELS,
    MUON,
    VOCABULARY,
    already_joined,
    build_run,
    metrics,
    run_whole,
    sizes,
    tiny,
    write_config,
    write_text,
)

ROUNDS = 3  # of 2 local steps
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pairs": (2, {"parallel": {"replicas": 2}}),
    "groups of 4": (4, {"parallel": {"replicas": 4}, "noloco": {"group_size": 4}}),
    "uneven stages": (4, {"parallel": sizes(replicas=2, pp=2, num_layers_in_first_pipeline_stage=1)}),
    "data and tensor parallel": (8, {"parallel": sizes(replicas=2, dp=2, tp=2)}),
    "expert and data parallel": (
        4,
        {"parallel": sizes(replicas=2, dp=2, ep=2), "model": FAMILY_MODELS["mixtral"]},
    ),
    "tied, virtual stages, Muon, int8": (
        4,
        MUON
        | {
            "parallel": sizes(replicas=2, pp=2, vpp=2),
            "model": {"untie_embeddings_and_output_weights": False},
            "noloco": {"payload": "int8"},
        },
    ),
}


# Of many ranks, or in others: test_plan.py has larger groups, tests/layouts the parameters of each stage.
BY_HAND = ("groups of 4", "data and tensor parallel", "pairs", "uneven stages")


@pytest.mark.parametrize("layout", by_hand(LAYOUTS, BY_HAND))
def test_the_bytes_of_exchanges(layout: str, tmp_path: Path) -> None:
    """Of all ranks of a replica, to the byte, but for what did not fit its code: its next bits, or fp32."""
    ranks, changes = LAYOUTS[layout]
    raw = tiny(
        {"data": {"text": write_text(tmp_path)}, "training": {"output_dir": str(tmp_path)}}, tiny(changes)
    )
    run_ranks(ranks, run_whole, write_config(tmp_path, raw))
    config = RunConfig(**raw)
    topology = config.topology(ranks)
    stages = parameters_of_stages(config, config.architecture(VOCABULARY), topology)
    (members,) = set(config.noloco.among(topology.replicas).sizes)
    planned = ROUNDS * sum(
        topology.dp * topology.tp * exchange_bytes(config.noloco, held, members, topology.dp)
        for held in stages
    )
    for rows in metrics(tmp_path):
        again = 4 * sum(row.get("round/resent_elements", 0) for row in rows)
        if config.noloco.payload == "fp32":
            assert (rows[-1]["total/sent_bytes"], again) == (planned, 0)
        else:  # copies go in fp32 beside their codes
            copies = 4 * ROUNDS * sum(held.copied for held in stages)
            assert 0 < rows[-1]["total/sent_bytes"] - (planned - copies) <= 2 * again
            assert again >= copies > 0


def notes(rank: int, world_size: int, config: str) -> list[str]:
    """What a start says on a host with one core."""
    already_joined()
    os.sched_getaffinity = lambda _: {0}
    with redirect_stdout(io.StringIO()) as shown:
        build_run(config)
    return [line for line in shown.getvalue().splitlines() if "in turn" in line]


def test_the_start_says_that_cores_are_short(tmp_path: Path) -> None:
    changes = {"data": {"text": write_text(tmp_path)}, "training": {"output_dir": str(tmp_path)}}
    config = write_config(tmp_path, tiny({"parallel": {"replicas": 2}} | changes))
    found, _ = run_ranks(2, notes, config)
    assert found == ["this host has more ranks (2) than cores (1): they compute in turn"]


SMALL, LARGE = (
    {"seq_length": 64, "num_layers": 6, "hidden_size": 32},
    {
        "seq_length": 64,
        "num_layers": 6,
        "hidden_size": 512,
        "ffn_hidden_size": 1536,
        "num_attention_heads": 8,
    },
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bf16": {"enabled": True}},
        MUON,
        {"noloco": {"payload": "int8", "outer_momentum": 0.5, "outer_lr": 0.7}},
        {"model": {"family": "starcoder2"}},
        {"model": {"family": "mixtral", "num_moe_experts": 2, "moe_router_topk": 2}},
    ],
    ids=["fp32", "bf16", "Muon", "outer momentum", "StarCoder2", "Mixtral"],
)
def test_a_dry_run_measures_what_plan_computes(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a larger model needs more than a small one, within 10 % of resident memory, on an idle machine.

    The difference, since libraries take some 0.5 GB. glibc is told to give back what is freed at once.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = min((dry(tmp_path, changes, SMALL) for _ in range(3)), key=lambda run: run.measured)  # of imports
    large = dry(tmp_path, changes, LARGE)
    more = (large.computed.device_bytes + large.computed.host) - (
        small.computed.device_bytes + small.computed.host
    )
    assert more == pytest.approx(large.measured - small.measured, rel=0.1)


def dry(folder: Path, changes: dict[str, Any], model: dict[str, Any]) -> DryRun:
    """A dry run of a model of this size."""
    where = {
        "model": model,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "data": {"text": write_text(folder)},
    }
    config = RunConfig(**tiny(where, tiny(changes)))
    return dry_run(config, config.architecture(VOCABULARY))


def test_config_check_shows_a_dry_run_below_the_memory_of_plan(tmp_path: Path) -> None:
    """Of a run whose warm-up and whose overlap are longer than the dry run; the parts have the names of `plan`."""
    changes = {
        "noloco": {"local_steps": 8, "overlap_steps": 5, "fragments": 4},
        "data": {"text": str(write_text(tmp_path))},
        "training": {"train_iters": 100},
        "parallel": {"replicas": 4, "data_parallel_size": 2},
        "scheduler": {"params": {"warmup_num_steps": 50, "total_num_steps": "auto"}},
    }
    file = write_config(tmp_path, tiny(changes))
    shown, planned = (
        {line[:27].strip(): line[27:].strip() for line in call_here(*command, file)[1].splitlines()}
        for command in (("config", "--dry-run", "--check"), ("plan",))
    )
    assert "dry run: 2 local steps of o" in shown
    rows = ["weights", "gradients", "optimizer", "activations", "logits", "total on its device"]
    assert [shown[row] for row in rows] == [planned[row] for row in rows]
    assert float(shown["measured peak"]) > float(shown["libraries, about"]) / 2
