"""Asked to stop, all ranks stop at the same step and lose nothing; who waits for whom must not matter."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_noloco.checkpoint import catalog
from megatron_noloco.job import agreement, leaving, stopping
from megatron_noloco.job.run_folder import ask_to_stop, stop_request
from megatron_noloco.job.stopping import Stopping
from megatron_noloco.job.watchdog import Watchdog
from megatron_noloco.training import start
from tests.kit.disturbed import Fault, Run, assert_same_state
from tests.kit.ranks import RankFailedError, run_ranks

STEPS = 40
TWO_BY_TWO: dict[str, Any] = {
    "parallel": {"replicas": 2, "pipeline_model_parallel_size": 2},
    "noloco": {"local_steps": 8, "routing": "microbatch"},
    "model": {"hidden_dropout": 0.1},
}
DELAYED: dict[str, Any] = {"parallel": {"replicas": 4}, "noloco": {"local_steps": 8, "overlap_steps": 7}}
NOWHERE = Path("/nowhere")  # nobody asks there
FOUR: dict[str, Any] = {"parallel": {"replicas": 4}, "noloco": {"local_steps": 8}}


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny steps take milliseconds: a rank that polls once a second would see the end first."""
    monkeypatch.setattr(stopping, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(agreement, "_POLL_SECONDS", 0.01)


# The agreement alone


def partner_ahead(rank: int, world_size: int) -> int:
    """Rank 0 is in its 10th step, which needs rank 1; rank 1 has done 5 and is asked to stop."""
    stop, store = Stopping(None, NOWHERE, ""), dist.distributed_c10d._get_default_store()
    for step in range(100):
        if rank == 1 and step == 5:
            store.wait(["rank 0 waits"])
            os.kill(os.getpid(), signal.SIGTERM)
            while stop.reason is None:
                time.sleep(0.01)
        if stop.before_step(step):
            break
        if step % 10 == 9:
            if rank == 0:
                store.set("rank 0 waits", "")
            token = torch.zeros(1)
            dist.send(token, 1 - rank) if rank else dist.recv(token, 1 - rank)
            dist.recv(token, 1 - rank) if rank else dist.send(token, 1 - rank)
    stop.close(step)
    return step


def test_waiting_rank_does_not_block_agreement() -> None:
    assert run_ranks(2, partner_ahead) == [10, 10]


def at_the_end(rank: int, world_size: int) -> tuple[int, str | None]:
    """Rank 0 has done all 7 steps when rank 1 is asked to stop at 3."""
    stop, store = Stopping(None, NOWHERE, ""), dist.distributed_c10d._get_default_store()
    steps = 7
    for step in range(7):
        if rank == 1 and step == 3:
            store.wait(["rank 0 is done"])
            os.kill(os.getpid(), signal.SIGUSR1)
        if stop.before_step(step):
            steps = step
            break
    if rank == 0:
        store.set("rank 0 is done", "")
    stop.close(steps)
    return steps, stop.reason


def test_when_one_rank_has_reached_the_end_all_go_there() -> None:
    assert [steps for steps, _ in run_ranks(2, at_the_end)] == [7, 7]


def asked_before_the_first_step(rank: int, world_size: int, number: signal.Signals) -> int:
    """The answer of all ranks is there before any of them, resumed at step 10, begins."""
    signal.signal(number, signal.SIG_DFL)
    with Watchdog(0):  # the system may give the signal to another thread, so that no handler ends the wait
        stop = Stopping(None, NOWHERE, "")
        if rank == 0:
            os.kill(os.getpid(), number)
            assert stop.request == number.name, "at once, also before the ranks have agreed"
        stop._stop.agreed.wait()
    done = next(step for step in range(10, 20) if stop.before_step(step))
    stop.close(done)
    return done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_request_before_the_first_step_stops_all_ranks_there(number: signal.Signals) -> None:
    assert run_ranks(2, asked_before_the_first_step, number) == [10, 10]


def hung_up_below_nohup(rank: int, world_size: int) -> bool:
    """Whether it is asked to stop."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = Stopping(None, NOWHERE, "")
    os.kill(os.getpid(), signal.SIGHUP)
    requested = stop.is_requested()
    stop.close(0)
    return requested


def test_a_run_below_nohup_outlives_its_terminal() -> None:
    assert run_ranks(1, hung_up_below_nohup) == [False]


def stopped_in_an_evaluation(rank: int, world_size: int) -> tuple[int, int]:
    """Rank 1 is asked to stop before the 51st part of an evaluation; rank 0 has not begun the first."""
    stop = Stopping(None, NOWHERE, "")
    assert not stop.before_step(9)
    for part in range(100):
        if (rank, part) == (1, 50):
            os.kill(os.getpid(), signal.SIGTERM)
        if (rank, part) in ((0, 0), (1, 50)):
            stop._stop.agreed.wait()
        if stop.before_part(10, part):
            break
    assert stop.before_step(10)
    stop.close(10)
    return part


def test_all_ranks_leave_an_evaluation_before_the_same_part() -> None:
    first, second = run_ranks(2, stopped_in_an_evaluation)
    assert first == second
    assert 50 <= first <= 51


def asked_beside_a_rank_that_stands_still(rank: int, world_size: int, said: Path) -> None:
    """Rank 0 waits inside gloo, where Python calls no handler."""
    if rank == 1:
        time.sleep(60)
    sys.stderr = said.open("w", buffering=1)
    stopping._PATIENCE_SECONDS = 0.5
    with Watchdog(0):
        Stopping(None, NOWHERE, "")
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        dist.recv(torch.zeros(1), 1)


def test_job_with_hung_rank_fails(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 0 of 2 died with exit code 1"):
        run_ranks(2, asked_beside_a_rank_that_stands_still, tmp_path / "said")
    said = (tmp_path / "said").read_text()
    assert said.startswith("asked to stop (SIGTERM), but for 0 s a rank has not said how many local steps")
    assert "nothing can be saved without it" in said


def asked_where_the_watcher_fails(rank: int, world_size: int) -> None:
    def fails(folder: Path) -> str:
        raise BlockingIOError("Resource temporarily unavailable")

    stopping.stop_request = fails
    stop = Stopping(None, NOWHERE, "")
    stop._watcher.join()
    os.kill(os.getpid(), signal.SIGTERM)
    for step in range(200):
        assert not stop.before_step(step)
        time.sleep(0.1)


def test_a_request_that_the_ranks_cannot_agree_on_is_not_ignored() -> None:
    with pytest.raises(RankFailedError, match="rank 0 of 1 died with exit code 1"):
        run_ranks(1, asked_where_the_watcher_fails)


def asked_by_a_file(rank: int, world_size: int, folder: Path) -> tuple[int, str | None]:
    """A file that was there before asks nobody; it is written again in the fourth step."""
    stop = Stopping(None, folder, stop_request(folder))
    for step in range(1000):
        if stop.before_step(step):
            break
        dist.barrier()
        if (rank, step) == (1, 3):
            assert stop.reason is None
            ask_to_stop(folder)
        if step >= 3:
            time.sleep(0.05)
    stop.close(step)
    return step, stop.reason


def test_a_file_asks_all_ranks_to_stop(tmp_path: Path) -> None:
    ask_to_stop(tmp_path)
    (steps, reason), other = run_ranks(2, asked_by_a_file, tmp_path)
    assert other == (steps, reason)
    assert reason == "the command stop"
    assert 4 <= steps < 1000


def asked_before_it_watches(rank: int, world_size: int, folder: Path) -> tuple[int, str | None]:
    """As a job that waits for others at its start."""
    old = stop_request(folder)
    ask_to_stop(folder)
    stop = Stopping(None, folder, old)
    for step in range(1000):
        if stop.before_step(step):
            break
        time.sleep(0.05)
    stop.close(step)
    return step, stop.reason


def test_a_file_written_before_a_job_watches_it_asks_as_well(tmp_path: Path) -> None:
    ((steps, reason),) = run_ranks(1, asked_before_it_watches, tmp_path)
    assert reason == "the command stop"
    assert steps < 1000


def beside_a_rank_that_fails(rank: int, world_size: int) -> bool:
    stop = Stopping(None, NOWHERE, "")
    if rank == 1:
        leaving.announce_failure(2)
    else:
        leaving.wait_for_failure(60)
    stop._watcher.join(10)
    return stop._watcher.is_alive()


def test_after_a_failure_no_rank_asks_the_store_whether_to_stop() -> None:
    """Rank 0 takes the store with it, and torch would write a stack trace for each rank that asks."""
    assert run_ranks(2, beside_a_rank_that_fails) == [False, False]


def interrupted_twice(rank: int, world_size: int) -> bool:
    before = signal.getsignal(signal.SIGINT)
    stop = Stopping(None, NOWHERE, "")
    os.kill(os.getpid(), signal.SIGINT)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        stop.close(0)
        return signal.getsignal(signal.SIGINT) is before
    return False


def test_second_ctrl_c_ends_and_restores_handlers() -> None:
    assert run_ranks(1, interrupted_twice) == [True]


def saves_of(rank: int, world_size: int) -> list[int]:
    """After how many steps a rank saves that needs the other one at times; asked a hundred times a second."""
    stop = Stopping(None, NOWHERE, "", save_seconds=0.01)
    saves = []
    for step in range(100):
        assert not stop.before_step(step)
        if stop.saves_before_step(step):
            saves.append(step)
        time.sleep(0.01 * (rank == step // 50))  # one is ahead, then the other
        if step % 20 == 19:
            dist.barrier()
    stop.close(100)
    return saves


def test_all_ranks_save_after_the_same_steps() -> None:
    saves, others = run_ranks(2, saves_of)
    assert saves == others
    assert len(saves) > 2


# In a run


def saved_step(run: Run) -> int:
    (folder,) = catalog.steps(run.checkpoints)
    assert catalog.is_complete(folder)
    step = catalog.step_of(folder)
    assert step is not None
    return step


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return a function that gives a run that was never stopped."""
    folder = tmp_path_factory.mktemp("straight")

    @cache
    def launched(name: str) -> Run:
        run = Run(folder / name, TOPOLOGIES[name])
        run.change({"training": {"train_iters": STEPS}})
        run.launch(4, changes={"checkpoint": {"save_interval": STEPS}})
        return run

    return launched


TOPOLOGIES = {"2x2": TWO_BY_TWO, "4x1": FOUR, "4x1, delayed": DELAYED}
REQUESTS = {
    "last stage": ("2x2", [Fault(3, 5, signal.SIGUSR1)], "SIGUSR1"),
    "one of four, most likely while an exchange is under way": (
        "4x1, delayed",
        [Fault(1, 9, signal.SIGTERM)],
        "SIGTERM",
    ),
}
BY_HAND = {
    "first stage": ("2x2", [Fault(0, 5, signal.SIGTERM)], "SIGTERM"),
    "everybody": ("2x2", [Fault(rank, 5, signal.SIGTERM) for rank in range(4)], "SIGTERM"),
    "one of four, in the middle of a round": ("4x1", [Fault(2, 5, signal.SIGINT)], "SIGINT"),
}


@pytest.mark.parametrize(
    ("topology", "faults", "reason"),
    [
        *(pytest.param(*request, id=name) for name, request in REQUESTS.items()),
        *(pytest.param(*request, id=name, marks=pytest.mark.slow) for name, request in BY_HAND.items()),
    ],
)
def test_a_stopped_run_continues_bit_for_bit(
    topology: str, faults: list[Fault], reason: str, straight: Callable[[str], Run], tmp_path: Path
) -> None:
    whole = straight(topology)
    run = whole.clean(tmp_path)
    outcomes = run.launch(4, faults)
    assert [(outcome.code, outcome.err) for outcome in outcomes] == [(0, "")] * 4
    step = saved_step(run)
    assert 5 < step < STEPS
    assert outcomes[0].out.splitlines()[-1] == (
        f"stopped after iteration {step} ({reason}); the same command continues from there"
    )
    assert {len(rows) for rows in run.exact_metrics()} == {step}
    outcomes = run.launch(4, changes={"checkpoint": {"save_interval": STEPS}})
    assert f"continuing from {run.step_folder(step)}" in outcomes[0].out
    assert_same_state(run.step_folder(STEPS), whole.step_folder(STEPS))
    assert run.exact_metrics() == whole.exact_metrics()


def test_run_out_of_time_stops_as_requested(tmp_path: Path) -> None:
    run = Run(tmp_path, {"parallel": {"replicas": 2}})
    changes = {"training": {"exit_duration_minutes": 0.001, "train_iters": 1000}}
    outcomes = run.launch(2, changes=changes)
    assert [outcome.code for outcome in outcomes] == [0] * 2
    last = outcomes[0].out.splitlines()[-1]
    assert last.startswith("stopped after iteration ")
    assert last.endswith(" (exit_duration_minutes); the same command continues from there")


def test_saves_after_some_time_change_nothing(
    straight: Callable[[str], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "AUTO_SAVE_SECONDS", 0.01)
    whole = straight("2x2")
    run = whole.clean(tmp_path)
    outcomes = run.launch(4, changes={"checkpoint": {"save_interval": "auto", "keep_last": STEPS}})
    assert [(outcome.code, outcome.err) for outcome in outcomes] == [(0, "")] * 4
    assert "checkpoints: every 30 minutes and at the end; the last 40 are kept" in outcomes[0].out
    *_, first = catalog.steps(run.checkpoints)
    assert all(map(catalog.is_complete, catalog.steps(run.checkpoints)))
    assert catalog.step_of(first) in range(1, STEPS)
    assert_same_state(run.step_folder(STEPS), whole.step_folder(STEPS))
