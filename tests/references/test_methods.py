"""Whole runs that must agree with each other, and those that must not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kit.ranks import REPOSITORY, run_ranks
from tests.kit.tiny import already_joined, metrics, run_whole, tiny, trained, write_config, write_text

MEASURED = ("speed/", "time/", "memory/")
TIMING = ("exchange_seconds", "wait_seconds", "pause_seconds")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def run(folder: Path, text: str, ranks: int, changes: dict[str, Any]) -> list[dict[str, Any]]:
    where = {"data": {"text": text}, "training": {"output_dir": str(folder)}}
    return run_ranks(ranks, run_whole, write_config(folder, tiny(where, tiny(changes))))


def without_timing(replicas: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [
        [
            {name: row[name] for name in row if not (name.startswith(MEASURED) or name.endswith(TIMING))}
            for row in rows
        ]
        for rows in replicas
    ]


def assert_same_weights(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in ("master", "slow", "momentum"):
            assert torch.equal(one[name], other[name]), f"{name} weights of rank {rank}"


def test_two_replicas_of_noloco_are_diloco(tmp_path: Path, text: str) -> None:
    """6 local steps are 3 rounds; the consensus pull has nothing to pull."""
    shape = {"parallel": {"replicas": 2, "pipeline_model_parallel_size": 2}}
    noloco = run(tmp_path / "noloco", text, 4, shape)
    diloco = run(tmp_path / "diloco", text, 4, {**shape, "noloco": {"method": "diloco"}})
    assert_same_weights(noloco, diloco)
    assert without_timing(metrics(tmp_path / "noloco")) == without_timing(metrics(tmp_path / "diloco"))
    for stage in range(2):
        assert torch.equal(noloco[stage]["master"], noloco[2 + stage]["master"]), "the replicas are one"
    assert noloco[0]["momentum"].abs().max() > 0


def run_for_copies(rank: int, world_size: int, config: str) -> Tensor:
    """The slow weights of which another rank of the replica has copies."""
    already_joined()
    run = trained(config)
    dist.barrier()
    slow = run.peers.outer.state()["slow_weights"]
    return torch.cat([slow[:0], *(slow[start:stop] for start, stop in run.engine.weights.copied())])


@pytest.mark.parametrize(
    ("shape", "tied"),
    [
        ({"tensor_model_parallel_size": 2}, False),
        ({"pipeline_model_parallel_size": 2, "data_parallel_size": 2}, True),
    ],
    ids=["norms of tp ranks", "tied embeddings cut by ZeRO"],
)
def test_copies_stay_equal_with_coded_fragments(
    tmp_path: Path, text: str, shape: dict[str, int], tied: bool
) -> None:
    """test_fragments.py has each of the two alone, without engines."""
    changes = {
        "parallel": {"replicas": 2, **shape},
        "noloco": {"payload": "int4", "fragments": 2},
        "gradient_accumulation_steps": 2,
        "model": {"untie_embeddings_and_output_weights": not tied},
        "data": {"text": text},
        "training": {"output_dir": str(tmp_path)},
    }
    dp = shape.get("data_parallel_size", 1)
    copies = run_ranks(4 * dp, run_for_copies, write_config(tmp_path, tiny(changes)))
    one, other, *of_second_replica = (torch.cat(copies[first : first + dp]) for first in range(0, 4 * dp, dp))
    assert one.numel() > 0
    assert torch.equal(one, other)
    assert torch.equal(*of_second_replica)


def test_routed_losses_are_booked_to_their_origin(tmp_path: Path, text: str) -> None:
    """In the first step all replicas have the same weights: routes change who computes a loss, not the loss."""
    shape = {"parallel": {"replicas": 3, "pipeline_model_parallel_size": 2}, "training": {"train_iters": 2}}
    rows = {}
    for interval in ("off", "microbatch"):
        routing = {"noloco": {"routing": interval}}
        run(tmp_path / interval, text, 6, shape | routing)
        rows[interval] = [replica[0] for replica in metrics(tmp_path / interval)]
    booked: dict[int, list[tuple[float, int]]] = {}
    for row in rows["microbatch"]:
        for origin in range(3):
            if f"origin/loss of {origin}" in row:
                parts = row[f"origin/loss of {origin}"], row[f"origin/microbatches of {origin}"]
                booked.setdefault(origin, []).append(parts)
    assert any(len(parts) > 1 for parts in booked.values()), "nothing was routed"
    for replica, straight in enumerate(rows["off"]):
        by_origin = {name: value for name, value in straight.items() if name.startswith("origin/")}
        loss = straight["train/loss"]
        assert by_origin == {f"origin/loss of {replica}": loss, f"origin/microbatches of {replica}": 4}
        assert sum(count for _, count in booked[replica]) == 4
        assert sum(part * count for part, count in booked[replica]) / 4 == pytest.approx(loss, abs=1e-6)


def test_the_quickstart_trains(tmp_path: Path, text: str) -> None:
    raw = json.loads((REPOSITORY / "configs" / "quickstart.json").read_text())
    changes = {
        "parallel": {"replicas": 2},
        "data": {"text": text},
        "training": {"train_iters": 2, "log_interval": 1, "output_dir": str(tmp_path)},
        "scheduler": {"params": {"total_num_steps": 3, "warmup_num_steps": 2}},
        "evaluation": {"iters": 0},
    }
    run_ranks(4, run_whole, write_config(tmp_path, tiny(changes, raw)))
    rows = [row for replica in metrics(tmp_path) for row in replica]
    assert [row["round/index"] for row in rows] == [0, 1] * 2
