"""What `plan` says of a config, against what runs of it did."""

import io
import os
import re
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.cli.main import main
from megatron_noloco.config import RunConfig
from megatron_noloco.preflight import fit
from megatron_noloco.preflight.memory import fullest_stage, parameters_of_stages
from megatron_noloco.preflight.schemes import exchange_bytes
from tests.harness import by_hand, run_ranks, slow
from tests.integration.tiny import (
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


BY_HAND = ("groups of 4", "data and tensor parallel")  # of 8 ranks; tests/unit/test_plan.py has larger groups


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


def warned(rank: int, world_size: int, config: str) -> tuple[str, list[str]]:
    """What a start says on a host with one core and without memory: on stderr, and in the log."""
    already_joined()
    fit.available_bytes = lambda: 1_000_000
    os.sched_getaffinity = lambda _: {0}
    with redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()) as shown:
        build_run(config)
    return said.getvalue(), [line for line in shown.getvalue().splitlines() if "cores" in line]


def test_the_start_warns_where_memory_or_cores_are_short(tmp_path: Path) -> None:
    """Of memory once for each host; and goes on."""
    changes = {"data": {"text": write_text(tmp_path)}, "training": {"output_dir": str(tmp_path)}}
    config = write_config(tmp_path, tiny({"parallel": {"replicas": 2}} | changes))
    (first, notes), (second, _) = run_ranks(2, warned, config)
    assert notes == ["this host has more ranks (2) than cores (1): they compute in turn"]
    assert first.startswith(f"{socket.gethostname()}: memory for 2 ranks on this host: about ")
    assert first.count("\n") == 1
    assert second == ""


@pytest.mark.parametrize(
    ("replicas", "changes"),
    [
        slow(2, {"bf16": {"enabled": True}}),
        slow(1, MUON),
        slow(2, {"noloco": {"payload": "int8"}}),
        slow(1, {"model": {"family": "starcoder2"}}),
    ],
    ids=["bf16", "Muon", "int8", "StarCoder2"],
)
def test_the_memory_of_a_rank(replicas: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """What a larger model needs more than a small one, within 10 % of resident memory.

    The difference, since libraries take some 0.5 GB. glibc is told to give back what is freed at once.
    """
    text = write_text(tmp_path)
    sizes = [{"hidden_size": 32}, {"hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8}]
    found = [
        memory(tmp_path / str(number), text, replicas, changes, model) for number, model in enumerate(sizes)
    ]
    measured, planned = (found[1][which] - found[0][which] for which in range(2))
    assert planned == pytest.approx(measured, rel=0.1)


def memory(
    folder: Path, text: str, replicas: int, changes: dict[str, Any], model: dict[str, Any]
) -> tuple[float, int]:
    """Bytes of a run's rank at its peak, as it says itself, and as planned."""
    where = {
        "parallel": {"replicas": replicas},
        "model": {"seq_length": 64, "num_layers": 6, **model},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "data": {"text": text},
        "training": {"train_iters": 4, "output_dir": str(folder)},
        "checkpoint": {"save_interval": 0},
    }
    raw = tiny(where, tiny(changes))
    config_file = write_config(folder, raw)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={replicas}"]
    command += ["-m", "megatron_noloco", "train", "--config", config_file]
    subprocess.run([sys.executable, *command], env=environment, check=True, capture_output=True, timeout=300)
    config = RunConfig(**raw)
    planned = fullest_stage(config, config.architecture(VOCABULARY), config.topology(replicas))
    peak = max(row["memory/peak_bytes"] for row in metrics(folder)[0])
    return peak, planned.device_bytes + planned.host_bytes


def test_a_dry_run_measures_what_a_rank_needs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a run whose warm-up and whose overlap are longer than the dry run."""
    changes = {
        "noloco": {"local_steps": 8, "overlap_steps": 5, "fragments": 4},
        "data": {"text": str(write_text(tmp_path))},
        "training": {"train_iters": 100},
        "parallel": {"replicas": 4, "data_parallel_size": 2},
        "scheduler": {"params": {"warmup_num_steps": 50, "total_num_steps": "auto"}},
    }
    file = write_config(tmp_path, tiny(changes))
    assert main(["config", "--check", str(file), "--dry-run"]) == 0
    line = capfd.readouterr().out.splitlines()[-1]
    found = re.fullmatch(
        r"dry run: 2 local steps of one replica \(2 ranks\): peak of resident memory (\S+) GB, plan "
        r"says (\S+) GB; exchanges need more",
        line,
    )
    assert found is not None, line
    assert 0.5 < float(found[1]) / float(found[2]) < 2
