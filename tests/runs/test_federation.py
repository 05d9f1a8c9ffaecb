"""Replicas as separate jobs: the same training as one job; and what becomes of it when jobs come and go."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_noloco.engine.replica import ReplicaEngine
from megatron_noloco.federation import membership
from megatron_noloco.federation.states import State
from megatron_noloco.job.run_folder import ask_to_stop
from megatron_noloco.monitor.run_log import RunLog
from megatron_noloco.training.replica_state import ReplicaState
from tests.kit.disturbed import command
from tests.kit.faulty_run import plant
from tests.kit.federation import Federation, assert_same, begin_alone, state_of
from tests.kit.ranks import REPOSITORY, free_port, run_ranks, until
from tests.kit.tiny import at_steps, sizes, tiny, write_text
from tools.faults.replica import pause, send_times

STEPS = 8
ENDLESS = {"training": {"train_iters": 100_000}, "checkpoint": {"save_interval": 4}}  # until it is stopped
WITH_PAUSES = partial(pause, 0.03)  # of a replica that trains while another one starts, which needs the cores


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def changes(text: str, **more: Any) -> dict[str, Any]:
    base = {
        "data": {"text": text},
        "training": {"train_iters": STEPS},
        "checkpoint": {"save_interval": STEPS},
    }
    return tiny(more, base)


def come_back_for_an_hour() -> None:
    """Have a job, as its `disturb`, wait for an hour at its end for others that want the final model."""
    membership._BACK_SECONDS = range(3600, 3601)


def test_tools_take_the_folders_of_several_replicas(tmp_path: Path, text: str) -> None:
    """Without a mean at the end, so that no job stays at its end to give it."""
    with Federation(tmp_path, changes(text, federation={"start_with": 2})) as federation:
        federation.start(0, disturb=come_back_for_an_hour)
        federation.start(2, disturb=come_back_for_an_hour)
        federation.wait()
    folders = [tmp_path / "replica_00", tmp_path / "replica_02"]
    outcomes = {
        name: run_ranks(1, command, [name, *arguments])[0]
        for name, arguments in {
            "export": [str(tmp_path), "--output", str(tmp_path / "mean")],
            "evaluate": [*map(str, folders), "--samples", "4"],
            "generate": [*map(str, folders), "--prompt", "a", "--tokens", "2"],
        }.items()
    }
    assert [outcome.code for outcome in outcomes.values()] == [0, 0, 0], outcomes
    assert f"exported replicas 0, 2 at step {STEPS} to {tmp_path / 'mean'}" in outcomes["export"].out
    measured = [line.split(" on ")[0] for line in outcomes["evaluate"].out.splitlines()]
    assert measured == ["each of 2 replicas (equal weights)"], "after the mean at the end"
    assert "the mean of 2 replicas' slow weights" in (tmp_path / "mean" / "README.md").read_text()


def test_a_killed_replica_comes_back_and_a_new_one_joins(tmp_path: Path, text: str) -> None:
    """The others go on. It continues from its own checkpoint or a newer one of theirs; the new one from theirs.

    None sees the files of another, and any one is enough to find all: three jobs know only the first, which is
    killed, and comes back elsewhere; a new one knows only the third.
    """
    ports = [free_port() for _ in range(5)]

    def found_by(seed: int, listen: int) -> dict[str, Any]:
        addresses = [f"tcp://127.0.0.1:{ports[place]}" for place in (seed, listen)]
        return {"federation": dict(zip(("rendezvous", "listen"), addresses, strict=True))}

    more = ENDLESS | {
        "federation": {"start_with": 3, "rounds_behind": 2},
        "evaluation": {"interval": 10, "iters": 2},
    }
    with Federation(tmp_path, changes(text, **more), apart=True) as federation:
        for replica in range(3):
            federation.start(replica, changes=found_by(0, replica), disturb=WITH_PAUSES)
        federation.until(0, 10)
        federation.kill(0)
        killed_at = federation.rows(0)[-1]["step"]
        federation.until(1, killed_at + 20)
        federation.start(3, changes=found_by(2, 3))
        federation.until_it_has_a_partner(3, after=killed_at)
        federation.start(0, changes=found_by(1, 4))
        federation.until_it_has_a_partner(0, after=killed_at)
        for replica in range(3):
            federation.until_evaluated(replica)
        federation.stop()
        assert "continuing from" in federation.log(0)
        assert "recovered from replica" in federation.log(0)
        assert "recovered from replica" in federation.log(3)
        assert max(last_losses(federation, 3)) < 5.0, "of 5.6 at the start"


def test_job_without_a_rank_ends_and_partner_continues(tmp_path: Path, text: str) -> None:
    """Of four ranks, tp 2 x pp 2, while a round of a fragment overlaps with local steps."""
    more = {
        "parallel": sizes(tp=2, pp=2),
        "noloco": {"local_steps": 4, "fragments": 2, "overlap_steps": 3},
        "federation": {"start_with": 2, "rounds_behind": 1000, "skip_local_steps": False},
        "training": {"train_iters": 12},
        "checkpoint": {"save_interval": 0},
    }
    lost = 1  # the second tensor-parallel rank of the first stage, in local step 7
    with Federation(tmp_path, changes(text, **more)) as federation:
        federation.start(0, ranks=4)
        federation.start(1, ranks=4, disturb=partial(plant, "SIGKILL", lost, 7))
        codes = federation.exit_codes(1)
        assert [code == -signal.SIGKILL for code in codes] == [False, True, False, False]
        assert codes[0] == codes[2] == codes[3] == 1
        federation.wait()
        partners = {row["step"]: row["round/partners"] for row in federation.rows(0) if "round/index" in row}
        assert partners.keys() == {5, 7, 9, 11}, "three local steps after each round began"
        assert (partners[5], partners[11]) == ([1], [])
        assert federation.rows(0)[-1]["step"] == 12


def test_a_replica_that_joins_late_finds_how_long_to_overlap(tmp_path: Path, text: str) -> None:
    """So does the one that was alone before. The rounds that each leaves out measure nothing."""
    overlap = {"local_steps": 4, "overlap_steps": "auto"}
    with Federation(tmp_path, changes(text, **ENDLESS, noloco=overlap), apart=True) as federation:
        federation.start(0, disturb=begin_alone)
        federation.until(0, 10)
        assert "overlap from" not in federation.log(0)
        federation.start(1)
        for replica in range(2):
            federation.until_log(replica, "overlap from iteration")
        federation.stop()


def test_two_stage_replica_without_disk_takes_over_and_ends(tmp_path: Path, text: str) -> None:
    """What it takes over is the state of the other at a step, to the last bit; its data is its own."""
    more = {
        "federation": {"start_with": 2, "rounds_behind": 2},
        "parallel": sizes(pp=2),
        "training": {"train_iters": 40},
        "checkpoint": {"save_interval": 1, "keep_last": 100},
    }
    with Federation(tmp_path, changes(text, **more), apart=True) as federation:
        federation.start(0, ranks=2, disturb=partial(pause, 0.1))
        federation.start(1, ranks=2)
        federation.until(1, 8)
        federation.kill(1)
        shutil.rmtree(federation.output_dir(1))
        federation.until(0, 15)
        federation.start(1, ranks=2, disturb=partial(writes_what_it_takes, tmp_path))
        federation.wait()
        found_step = re.search(
            r"recovered from replica 0: its state after local step (\d+)", federation.log(1)
        )
        assert found_step is not None, federation.log(1)
        step = int(found_step[1])
        assert step >= 14
        theirs = state_of(federation.output_dir(0) / "replica_00" / "checkpoints", 0, step)
        for stage in range(2):
            name = f"stage_{stage:02d}_dp_00_tp_00.safetensors"
            for tensor, taken in torch.load(tmp_path / f"taken_by_{stage}").items():
                saved = [theirs.get(f"{of_file}{name} {tensor}") for of_file in ("", "resume_")]
                assert any(one is not None and torch.equal(one, taken) for one in saved), tensor
        assert federation.rows(1)[0]["step"] > step
        assert federation.rows(1)[-1]["step"] == 40
        losses = [federation.rows(replica)[-1]["train/loss"] for replica in range(2)]
        assert losses[0] != losses[1]


def writes_what_it_takes(folder: Path) -> None:
    """Write the engine's tensors as soon as a state was taken over."""
    original = ReplicaState.load

    def load(self: ReplicaState, state: State) -> None:
        original(self, state)
        torch.save(self._engine.tensors(), folder / f"taken_by_{dist.get_rank()}")

    ReplicaState.load = load  # type: ignore[method-assign]


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"parallel": sizes(pp=2)}),
    (4, {"parallel": sizes(tp=2, dp=2), "gradient_accumulation_steps": 1}),
]


def test_jobs_of_different_layouts_train_one_model(tmp_path: Path, text: str) -> None:
    """A process, two stages, and 2 x 2 ranks. One is killed, and comes back with another layout."""
    goes_on = tmp_path / "goes_on"
    more = {
        "federation": {
            "start_with": 3,
            "rounds_behind": 2,
            "skip_local_steps": False,
            "shortest_deadline_seconds": 2.0,
        },
        "noloco": {"final_average": True, "local_steps": 2},
        "training": {"train_iters": 100},
        "checkpoint": {"save_interval": 1000},
        "evaluation": {"interval": 0, "iters": 4},
    }
    with Federation(tmp_path, changes(text, **more), apart=True) as federation:
        for replica, (ranks, layout) in enumerate(LAYOUTS):
            federation.start(replica, ranks, layout, partial(slow_until, goes_on))
        federation.until_it_has_a_partner(2, after=0)
        federation.until(2, 4)
        federation.kill(2)
        federation.until(0, 14)
        federation.start(2, *LAYOUTS[1], disturb=partial(slow_until, goes_on))
        federation.until_it_has_a_partner(2, after=12)
        goes_on.touch()
        federation.wait()
        assert "recovered from replica " in federation.log(2)
        for replica in range(3):
            assert " final average of replicas 0, 1, 2 |\n" in federation.log(replica)
        ends = [federation.rows(replica, "evaluation")[-1]["validation/loss"] for replica in range(3)]
        assert max(ends) - min(ends) < 1e-5, "one model, but sums in another order"
        assert max(ends) < 5.0, "of 5.6 at the start"


def test_untrained_replica_does_not_join_trained_ones(tmp_path: Path, text: str) -> None:
    """Where it is told not to take theirs over. Else it does, though none has saved anything."""
    more = ENDLESS | {"federation": {"rounds_behind": 2}, "checkpoint": {"save_interval": 0}}
    with Federation(tmp_path, changes(text, **more)) as federation:
        federation.start(0, disturb=partial(begin_alone, 0.03))
        federation.until(0, 40)
        federation.start(1, changes={"checkpoint": {"load": "none"}})
        assert federation.exit_codes(1) == [1]
        assert "begins with fresh weights, which would spoil theirs" in federation.log(1)
        assert "Traceback" not in federation.log(1)
        federation.start(1)
        federation.until_it_has_a_partner(1, after=40)
        assert "recovered from replica 0: its state after local step" in federation.log(1)
        assert re.search(r"state after iteration \d+ given to another replica \| pause", federation.log(0))
        federation.stop()


def test_frozen_replica_costs_one_deadline_then_takes_over(tmp_path: Path, text: str) -> None:
    more = ENDLESS | {
        "federation": {"start_with": 2, "shortest_deadline_seconds": 0.5},
        "noloco": {"deadline_seconds": 2.0},
        "checkpoint": {"save_interval": 0, "load": "none"},
    }
    with Federation(tmp_path, changes(text, **more)) as federation:
        federation.start(0, disturb=WITH_PAUSES)
        federation.start(1)
        federation.until(1, 8)
        federation.signal(1, signal.SIGSTOP)
        federation.until(0, 40)
        log = federation.log(0)
        assert log.count("| replica 1 sends nothing |") <= 2
        assert "| replica 1 missed its last deadline |" in log or "| replica 1 is not there |" in log
        federation.signal(1, signal.SIGCONT)
        federation.until_it_has_a_partner(1, after=40)
        assert "recovered from replica 0: its state after local step" in federation.log(1)
        federation.stop()


def slow_until(path: Path) -> None:
    """Pause before each local step until the file is there."""
    at_steps(lambda done: path.exists() or time.sleep(0.2))


def waits_for(path: Path) -> None:
    """Take the 20th local step when the file is there."""

    def wait(done: int) -> None:
        while done >= 19 and not path.exists():
            time.sleep(0.05)

    at_steps(wait)


def test_job_stopped_while_waiting_saves_nothing(tmp_path: Path, text: str) -> None:
    with Federation(tmp_path, changes(text, federation={"start_with": 2})) as federation:
        federation.start(0)
        while not list((tmp_path / "rendezvous").rglob("*")):
            time.sleep(0.05)
        federation.signal(0, signal.SIGTERM)
        assert federation.exit_codes(0) == [0]
        assert "stopped before the first local step (SIGTERM)" in federation.log(0)


@pytest.mark.parametrize(
    "way", ["signal", *(pytest.param(way, marks=pytest.mark.slow) for way in ("stop --leave", "notice"))]
)
def test_a_replica_that_leaves_exchanges_once_more(tmp_path: Path, text: str, way: str) -> None:
    """In the middle of a local phase. The round counts, for both, and it goes on behind it when it comes back."""
    k = 40
    more: dict[str, Any] = ENDLESS | {
        "noloco": {"local_steps": k},
        "federation": {"start_with": 2, "skip_local_steps": False, "leave_seconds": 60.0},
        "training": {"train_iters": 10**5, "log_interval": 1},
    }
    with Federation(tmp_path, changes(text, **more), apart=True) as federation:
        federation.start(0, disturb=WITH_PAUSES)
        federation.start(1, disturb=partial(pause, 0.06))  # so it waits for nobody at its rounds
        federation.until(1, k + k // 4)
        if way == "signal":
            federation.signal(1, signal.SIGTERM)
        elif way == "notice":
            script = REPOSITORY / "launch" / "notice.sh"
            beside = [script, federation.output_dir(1), "true"]
            subprocess.run(beside, env={**os.environ, "PYTHON": sys.executable}, check=True)
        else:
            ask_to_stop(federation.output_dir(1), leave=True)
        assert federation.exit_codes(1) == [0], federation.log(1)
        (line,) = re.findall(
            r"replicas 0 and 1 exchanged once more \| left out: (\d+) to (\d+) \|", federation.log(1)
        )
        assert k < int(line[0]) - 1 < int(line[1]), "in the middle of a phase"
        assert federation.rows(1, "checkpoint")[-1]["step"] == int(line[1])
        federation.until(0, int(line[1]) + 1)
        due = [row for row in federation.rows(0) if row["step"] == int(line[1])]
        assert due[0]["round/partners"] == [1]
        federation.start(1, disturb=WITH_PAUSES)
        federation.until(1, int(line[1]) + 1)
        assert not (federation.output_dir(0) / "replica_01" / "metrics.jsonl").exists()
        until(lambda: any(row.get("round/partners") == [0] for row in rows_told(federation, 0, of=1)))
        theirs = [row["step"] for row in rows_told(federation, 0, of=1) if row["kind"] == "step"]
        assert theirs == sorted(theirs)
        federation.stop()


def rows_told(federation: Federation, replica: int, of: int) -> list[Any]:
    """Return the rows of another replica that the folder of a job has."""
    logs = {log.replica: log.rows for log in RunLog(federation.output_dir(replica)).replicas}
    return list(logs.get(f"{of:02d}", ()))


def test_replicas_ending_apart_have_one_model(tmp_path: Path, text: str) -> None:
    """Three of four slots. One waits for another one, is stopped, and comes back.

    The evaluation at the end is that of the one model.
    """
    goes_on = tmp_path / "goes_on"
    more = {
        "federation": {"start_with": 3, "skip_local_steps": False, "rounds_behind": 1000},
        "noloco": {"final_average": True, "local_steps": 8},
        "training": {"train_iters": 20},
        "evaluation": {"interval": 0, "iters": 4},
    }
    with Federation(tmp_path, changes(text, **more)) as federation:
        for replica in range(3):
            federation.start(replica, disturb=partial(waits_for, goes_on) if replica == 2 else lambda: None)
        federation.until_saved(0, 20)
        federation.signal(0, signal.SIGTERM)
        assert federation.exit_codes(0) == [0]
        assert "stopped after iteration 20 (SIGTERM); the same command continues" in federation.log(0)
        federation.start(0)
        federation.until_log(0, "continuing from")
        goes_on.touch()
        federation.wait()
        rows = [federation.rows(replica) for replica in range(3)]
        assert len({of_replica[-1]["train/loss"] for of_replica in rows}) == 3, "each trained on its own data"
        for replica in range(3):
            assert " final average of replicas 0, 1, 2 |\n" in federation.log(replica)
        ends = [federation.rows(replica, "evaluation")[-1] for replica in range(3)]
        assert len({end["validation/loss"] for end in ends}) == 1
        assert [end["validation/mean_model_loss"] for end in ends] == [None] * 3


def test_a_killed_job_takes_the_final_model_of_the_others(tmp_path: Path, text: str) -> None:
    """It comes back when they have their mean, and shares no files with them."""
    more = {
        "federation": {"start_with": 3, "skip_local_steps": False, "shortest_deadline_seconds": 0.5},
        "noloco": {"final_average": True, "deadline_seconds": 2.0},
        "training": {"train_iters": 40},
        "checkpoint": {"save_interval": 10},
        "evaluation": {"interval": 0, "iters": 4},
    }
    with Federation(tmp_path, changes(text, **more), apart=True) as federation:
        for replica in range(3):
            federation.start(replica, disturb=WITH_PAUSES)
        federation.until(2, 30)
        federation.kill(2)
        for replica in range(2):
            federation.until_log(replica, " final average of replicas 0, 1 |")
        federation.start(2)
        federation.wait()
        assert re.search(r"recovered from replica [01]: its state after local step 40", federation.log(2))
        ends = [
            state_of(federation.output_dir(replica) / f"replica_{replica:02d}" / "checkpoints", replica, 40)
            for replica in range(3)
        ]
        weights = [{name: one for name, one in end.items() if "slow_weights" in name} for end in ends]
        assert weights[0]
        for end in weights[1:]:
            assert_same(end, weights[0])
        assert len({federation.rows(one, "evaluation")[-1]["validation/loss"] for one in range(3)}) == 1


def last_losses(federation: Federation, replicas: int) -> list[float]:
    """Of validation."""
    return [federation.rows(replica, "evaluation")[-1]["validation/loss"] for replica in range(replicas)]


def test_poisoned_vectors_are_refused(tmp_path: Path, text: str) -> None:
    """One replica sends NaN, one a million times its weights: the other three train as if they were not there."""
    more = {
        "training": {"train_iters": 24},
        "checkpoint": {"save_interval": 0},
        "evaluation": {"interval": 24, "iters": 4},
    }
    losses = []
    for poisonous in ((), (math.nan, 1e6)):
        start_with = {"federation": {"start_with": 3 + len(poisonous)}}
        changed = changes(text, **tiny(more, start_with))
        with Federation(tmp_path / f"{len(poisonous)}", changed) as federation:
            for replica in range(3):
                federation.start(replica)
            for replica, factor in enumerate(poisonous, start=3):
                federation.start(replica, disturb=partial(send_times, factor))
            federation.wait()
            losses.append(last_losses(federation, 3))
    log = "".join(federation.log(replica) for replica in range(3))
    assert "| replica 3 sent numbers that are not finite |" in log
    assert "| replica 4 sent absurd numbers, " in log
    assert losses[1] == pytest.approx(losses[0], rel=0.03)  # a busy machine leaves out other steps


def poisons_itself(step: int) -> None:
    """Make a weight of this process NaN after this many local steps."""

    def poison(engine: ReplicaEngine) -> None:
        if engine._deepspeed.global_steps == step:
            engine.weights.parts()[0][0] = math.nan

    at_steps(after=poison)


def test_replica_with_nonfinite_weights_ends_and_resumes(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next round. No other replica comes."""
    monkeypatch.setattr(membership, "FIRST_SECONDS", 0.0)
    more = {"noloco": {"local_steps": 4}, "training": {"train_iters": 12}, "checkpoint": {"save_interval": 3}}
    with Federation(tmp_path, changes(text, **more)) as federation:
        federation.start(0, disturb=partial(poisons_itself, 7))
        assert federation.exit_codes(0) == [1]
        log = federation.log(0)
        assert "weights of this replica are no longer finite" in log
        assert "Traceback" not in log
        federation.start(0)
        federation.wait()
        assert "step 6, " in federation.log(0).removeprefix(log)
        assert math.isfinite(federation.rows(0)[-1]["train/loss"])
