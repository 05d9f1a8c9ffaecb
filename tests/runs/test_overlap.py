"""What a run chooses by its first rounds, and training that goes on during an exchange: when messages move, what a
resume does."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_noloco.checkpoint.catalog import read_manifests
from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.outer import ExchangeReport, RoundReport
from megatron_noloco.plans.fragments import fragment_after
from megatron_noloco.plans.routing import Routing
from megatron_noloco.settings import NolocoSettings
from megatron_noloco.training.choices import LocalStepsChoice, OverlapChoice
from tests.kit.disturbed import Run
from tests.kit.ranks import run_ranks
from tests.kit.tiny import build, metrics, microbatch, sizes, tiny

K = 4


def report_of(round_index: int, seconds: float, fragment: int = 0) -> RoundReport:
    return RoundReport(round_index, ExchangeReport((0,), seconds=seconds), 0.0, 0.0, fragment)


def chooses(rank: int, world_size: int, exchange_seconds: list[float], rounds_before: int) -> list[Any]:
    """Local steps of one second; the delay in force in each round, and when it was said."""
    outer: Any = SimpleNamespace(settings=NolocoSettings(local_steps=K), overlap_steps=0, local_steps=K)
    choice, found = OverlapChoice(outer), []
    for done in range(rounds_before * K + 1, (rounds_before + 6) * K + 1):
        said = choice.before_round(done, 1.0 if done > 1 else 50.0)  # the first step is slow
        if done % K == 0:
            found.append((outer.overlap_steps, said))
            choice.after_round(report_of(done // K - 1, exchange_seconds[rank]))
    return found


@pytest.mark.parametrize(
    ("exchange_seconds", "expected"),
    [([0.1, 0.2, 0.01], 1), ([0.5, 2.1, 0.3], 3), ([0.1, 99.0, 0.1], K)],
    ids=["short", "of two steps and a bit", "longer than a local phase"],
)
def test_all_ranks_take_the_largest_delay_from_the_same_round_on(
    exchange_seconds: list[float], expected: int
) -> None:
    ranks = run_ranks(3, chooses, exchange_seconds, 5)
    assert ranks == [[(0, None)] * 3 + [(expected, expected)] + [(expected, None)] * 2] * 3


def chooses_local_steps(rank: int, world_size: int, exchange_seconds: list[float]) -> list[tuple[int, int]]:
    """Local steps of one second; after each, what is said and in force. The first exchange opens a connection."""
    outer: Any = SimpleNamespace(settings=NolocoSettings(local_steps=1), overlap_steps=0, local_steps=1)
    choice, found = LocalStepsChoice(outer, most_waiting=0.2, most=30), []
    for done in range(1, 9):
        said = choice.before_round(done, 1.0 if done > 1 else 50.0)
        found.append((said, outer.local_steps))
        if done % outer.local_steps == 0:
            choice.after_round(report_of(done - 1, 100.0 if done == 1 else exchange_seconds[rank]))
    return found


@pytest.mark.parametrize(
    ("exchange_seconds", "expected"),
    [([0.1, 0.2, 0.01], 1), ([0.5, 2.4, 0.3], 10), ([0.1, 99.0, 0.1], 30)],
    ids=["short", "ten times 1 s beside 2.4 s", "longer than the run"],
)
def test_auto_local_steps_follow_the_slowest_rank(exchange_seconds: list[float], expected: int) -> None:
    found = run_ranks(3, chooses_local_steps, exchange_seconds)
    assert found == [[(None, 1)] * 6 + [(expected, expected), (None, expected)]] * 3


def chooses_in_fragments(rank: int, world_size: int, start: int) -> list[Any]:
    """Two fragments, of which the first takes 2.5 steps and the last nearly none; when the delay is said."""
    outer: Any = SimpleNamespace(
        settings=NolocoSettings(local_steps=K, fragments=2), overlap_steps=0, local_steps=K
    )
    choice, said = OverlapChoice(outer), {}
    for done in range(start + 1, 5 * K + 1):
        if chosen := choice.before_round(done, 1.0):
            said[done] = chosen
        if due := fragment_after(done, K, 2):
            choice.after_round(report_of(due[0], 2.5 if due[1] == 0 else 0.01, due[1]))
    return list(said.items())


@pytest.mark.parametrize(("start", "decided"), [(0, 4 * K), (3, 4 * K), (K + 1, 5 * K)])
def test_all_fragments_count_after_resume_in_round(start: int, decided: int) -> None:
    assert run_ranks(2, chooses_in_fragments, start) == [[(decided, 3)]] * 2


def chooses_in_federation(rank: int, world_size: int, steps: list[int], skipped: set[int]) -> list[Any]:
    """When the delay is said. A round without a partner is skipped, with or without a wait for one."""
    outer: Any = SimpleNamespace(settings=NolocoSettings(local_steps=K), overlap_steps=0, local_steps=K)
    choice, said = OverlapChoice(outer), {}
    for done in steps:
        if chosen := choice.before_round(done, 1.0):
            said[done] = chosen
        if done % K == 0:
            has_partner = done // K - 1 not in skipped
            exchange = ExchangeReport(
                (0, 1) if has_partner else (0,), seconds=2.5 if has_partner else 60.0 * rank
            )
            exchange.missed = "" if has_partner or rank == 0 else "replica 1 missed the deadline"
            choice.after_round(RoundReport(done // K - 1, exchange, 0.0, 0.0))
    return list(said.items())


@pytest.mark.parametrize(
    ("steps", "skipped", "said"),
    [
        ([*range(1, K + 1), *range(3 * K, 9 * K + 1)], {}, [(5 * K, 3)]),
        ([*range(20 * K, 30 * K)], {}, [(23 * K, 3)]),
        ([*range(1, 9 * K)], {0, 2}, [(6 * K, 3)]),
        ([*range(1, 9 * K)], {0, 1, 4, 5}, [(8 * K, 3)]),
        ([*range(1, 9 * K)], range(9), []),
    ],
    ids=["leaves out one round", "leaves out all before", "skips two", "skips after the choice", "alone"],
)
def test_federation_counts_rounds_with_partner(steps: list[int], skipped: Any, said: list[Any]) -> None:
    assert run_ranks(2, chooses_in_federation, steps, set(skipped)) == [said] * 2


def test_the_slow_first_step_does_not_shorten_the_delay() -> None:
    assert run_ranks(1, chooses, [2.5], 0)[0][-1] == (3, None)


def counted(rank: int, world_size: int, raw: dict[str, Any]) -> int:
    config, groups, stage = build(raw, world_size)
    engine = ReplicaEngine(stage, groups, config.as_deepspeed())
    calls: list[None] = []
    engine.pipeline.between_microbatches = lambda: calls.append(None)
    engine.train_batch(
        lambda replica, index: microbatch(config, groups, 0, replica, index),
        Routing(1, config.microbatches, 0, "off").straight(),
    )
    return len(calls)


@pytest.mark.parametrize(("stages", "virtual"), [(1, 1), (2, 1), (2, 2)])
def test_messages_may_move_at_every_microbatch(stages: int, virtual: int) -> None:
    raw = tiny({"gradient_accumulation_steps": 4, "parallel": sizes(pp=stages, vpp=virtual)})
    assert run_ranks(stages, counted, raw) == [4 * virtual] * stages


def said(lines: str) -> list[str]:
    return [line for line in lines.splitlines() if line.startswith(" overlap from iteration")]


def test_a_resume_keeps_the_delay_that_the_run_chose(tmp_path: Path) -> None:
    changes = {
        "parallel": {"replicas": 2},
        "noloco": {"local_steps": 2, "overlap_steps": "auto", "final_average": True},
        "training": {"train_iters": 20},
        "checkpoint": {"save_interval": 9},
    }
    run = Run(tmp_path, changes)
    (line,) = said(run.launch(2, changes={"training": {"train_iters": 9}})[0].out)
    assert line.startswith(" overlap from iteration 8 on | a round is merged ")

    def delays() -> set[float]:
        """According to the newest checkpoint."""
        folder = max(run.checkpoints.glob("step_*"))
        return {manifest.counters["delay_steps"] for manifest in read_manifests(folder)}

    (chosen,) = delays()
    resumed = run.launch(2)
    assert [outcome.code for outcome in resumed] == [0, 0]
    assert said(resumed[0].out) == []
    assert delays() == {chosen}
    for replica in metrics(run.folder):
        merged = {row["step"]: row["round/index"] for row in replica if "round/index" in row}
        waited = {2: 0, 4: 1, 6: 2}
        before_the_averages = {9: 3, 20: 9}  # the rounds under way at the end of both runs
        between = {10 + 2 * r + chosen: 4 + r for r in range(5)}
        assert merged == waited | between | before_the_averages


def test_resume_keeps_chosen_local_steps_and_groups(tmp_path: Path) -> None:
    changes = {
        "parallel": {"replicas": 2},
        "noloco": {"recipe": None, "local_steps": "auto", "most_waiting": 0.05, "routing": "off"},
        "training": {"train_iters": 30, "log_interval": 1},
        "checkpoint": {"save_interval": 8},
    }
    run = Run(tmp_path, changes)
    first = run.launch(2, changes={"training": {"train_iters": 8}, "noloco": {"payload": "fp32"}})[0].out
    (line,) = [line for line in first.splitlines() if line.startswith(" local steps from iteration")]
    assert line.startswith(" local steps from iteration 7 on | a round follows ")
    (chosen,) = {
        int(manifest.counters["local_steps"])
        for manifest in read_manifests(max(run.checkpoints.glob("step_*")))
    }
    second = run.launch(2)[0].out
    assert "local steps from iteration" not in second
    assert "payload fp32 (for 2 replicas, or as" in second
    assert "noloco.payload" not in second, "nothing has changed"
    for replica in metrics(run.folder):
        rounds = {row["step"]: row["round/index"] for row in replica if "round/index" in row}
        every_step = {step: step - 1 for step in range(1, 7)}
        assert rounds == every_step | {
            step: step // chosen - 1 for step in range(7, 31) if step % chosen == 0
        }


def test_a_correction_is_merged_with_another_number_of_replicas(tmp_path: Path) -> None:
    """Saved while an exchange is under way: every replica, also one that is a clone, merges what it continues."""
    replicas = 6
    run = Run(
        tmp_path,
        {
            "parallel": {"replicas": 4},
            "noloco": {"local_steps": K, "overlap_steps": 3},
            "checkpoint": {"save_interval": K + 1},
            "training": {"train_iters": K + 1},
        },
    )
    run.launch(4)
    run.change({"parallel": {"replicas": replicas}, "training": {"train_iters": 2 * K}})
    outcomes = run.launch(replicas)
    assert [(outcome.code, outcome.err) for outcome in outcomes] == [(0, "")] * replicas
    for rows in metrics(run.folder)[:replicas]:
        assert {row["step"]: row["round/index"] for row in rows if "round/index" in row} == {K + 3: 0}
    manifest = json.loads(next(run.step_folder(2 * K).glob("replica_00/*.json")).read_text())
    assert manifest["step"] == 2 * K
