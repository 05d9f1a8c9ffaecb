"""Saves and resumes: asynchronous, damaged, on a full disk, other settings. test_any_config.py compares bits."""

import json
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.checkpointer import Checkpointer, SaveReport
from megatron_noloco.checkpoint.resume import describe_replicas
from megatron_noloco.plans.topology import Position, Topology
from megatron_noloco.training import run as run_module
from tests.kit.checkpoints import DAMAGES, TENSORS
from tests.kit.disturbed import Outcome, Run, assert_same_state, command
from tests.kit.ranks import run_ranks, slow
from tests.kit.saved_runs import starts
from tests.kit.tiny import BF16, already_joined, at_steps, build_run, metrics, write_text

SAVED = 6
K = 4  # does not divide SAVED: the checkpoint lies in the middle of a round


def noloco(routing: str = "round", **settings: Any) -> dict[str, Any]:
    return {"local_steps": K, "routing": routing, **settings}


WSD: dict[str, Any] = {
    "type": "WSD",
    "params": {"decay_num_steps": 10, "warmup_min_ratio": None, "warmup_type": None, "cos_min_ratio": None},
}


def config(replicas: int, *changes: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Changes of the tiny config; `settings` are for the block noloco, stages and the like are in `changes`."""
    parallel = {"replicas": replicas}
    merged: dict[str, Any] = {"noloco": noloco(**settings)}
    for change in changes:
        merged |= change
    return merged | {"parallel": parallel | merged.get("parallel", {})}


STAGES = {"parallel": {"pipeline_model_parallel_size": 2}}


def saving(**checkpoint: Any) -> dict[str, Any]:
    """Changes to the block `checkpoint`, and to train_iters where it is given."""
    training = {name: checkpoint.pop(name) for name in ("train_iters",) if name in checkpoint}
    return {"training": training, "checkpoint": {"save_interval": SAVED, **checkpoint}}


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait no ten seconds at their end for a checkpoint that will not be whole."""
    monkeypatch.setattr(run_module, "_COMMIT_SECONDS", 0.2)


def codes(outcomes: list[Outcome]) -> list[int]:
    return [outcome.code for outcome in outcomes]


def test_asynchronous_saves_hold_what_synchronous_ones_do(tmp_path: Path) -> None:
    """The run trains on while the files are written, which takes long here: a snapshot must not follow it."""
    text = write_text(tmp_path, 200_000)
    changes = config(2, BF16)
    waiting, going_on = (Run(tmp_path / folder, changes, text) for folder in ("sync", "async"))
    for run in (waiting, going_on):
        run.change(saving(keep_last=2, save_interval=5, train_iters=15))
    waiting.launch(2)
    going_on.change(saving(async_save=True, save_interval=5))
    outcomes = run_ranks(2, slow_disk, going_on.arguments())
    assert codes(outcomes) == [0, 0]
    for step in (10, 15):
        assert_same_state(going_on.step_folder(step), waiting.step_folder(step))
    for run in (waiting, going_on):
        assert [catalog.step_of(folder) for folder in catalog.steps(run.checkpoints)] == [15, 10]
        assert (run.checkpoints / "latest").read_text() == "step_00000015\n"


def slow_disk(rank: int, world_size: int, arguments: list[str]) -> Outcome:
    """The writer starts only when two more steps are done, or the run ends."""
    reached, moved = 0, threading.Condition()
    write, close = Checkpointer._write, Checkpointer.close

    def reach(step: int) -> None:
        nonlocal reached
        with moved:
            reached = step
            moved.notify()

    def late(checkpointer: Checkpointer, step: int, *args: Any) -> None:
        with moved:
            moved.wait_for(lambda: reached >= step + 2)
        write(checkpointer, step, *args)

    def closing(checkpointer: Checkpointer) -> Any:
        reach(1000)
        return close(checkpointer)

    at_steps(after=lambda engine: reach(engine._deepspeed.global_steps))
    Checkpointer._write = late  # type: ignore[method-assign]
    Checkpointer.close = closing  # type: ignore[method-assign]
    return command(rank, world_size, arguments)


# Damage

SMALL = config(2, STAGES)
CHECKSUM = f"{TENSORS}: checksum does not match its"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 2 x 2 with whole checkpoints of steps 5, 10 and 15; do not write in it."""
    run = Run(tmp_path_factory.mktemp("finished"), SMALL)
    run.change(saving(save_interval=5, keep_last=9, train_iters=15))
    run.launch(4)
    return run


# Every rank sees the one, one rank the other; what else is damage, tests/parts/test_checkpoint_files.py has.
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("missing replica folder", "replica_01/stage_00_dp_00_tp_00.json: No such file"),
        ("flipped bit", CHECKSUM),
    ],
)
def test_the_checkpoint_before_a_damaged_one_is_used(
    name: str, line: str, finished: Run, tmp_path: Path
) -> None:
    run = finished.copy(tmp_path / "run")
    DAMAGES[name](run.step_folder(15))
    outcomes = run_ranks(4, starts, run.arguments())
    assert codes(outcomes) == [0] * 4
    reported = outcomes[0].out.splitlines()
    assert f"continuing from {run.step_folder(10)}: step 10, 80 samples consumed" in reported
    (not_used,) = [line for line in reported if line.startswith("not used: ")]
    assert not_used.startswith(f"not used: {run.step_folder(15)}/{line}")
    assert f"set aside: {run.step_folder(15)} is now step_00000015.set_aside" in reported
    assert (run.checkpoints / "step_00000015.set_aside").is_dir()
    assert (run.checkpoints / "latest").read_text() == "step_00000010\n"


def test_a_damaged_checkpoint_asked_for_by_name_is_refused(finished: Run, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    DAMAGES["flipped bit"](run.step_folder(10))
    outcomes = run_ranks(4, starts, run.arguments({"checkpoint": {"load": str(run.step_folder(10))}}))
    assert codes(outcomes) == [2] * 4
    assert [len(outcome.err.splitlines()) for outcome in outcomes] == [1, 0, 0, 0]
    assert outcomes[0].err.startswith(f"checkpoint.load: {run.step_folder(10)}/{CHECKSUM}")
    assert len(catalog.steps(run.checkpoints)) == 3, "nothing is set aside for a run that does not start"


def test_a_checkpoint_holds_no_pickle(finished: Run) -> None:
    """Reading safetensors and JSON executes nothing."""
    files = [path for path in finished.step_folder(15).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}


# Places that cannot be written


@pytest.mark.usefixtures("no_patience")
def test_a_full_disk_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    """Nothing larger than what the limit allows can be written, on one rank: its part of the step is missing."""
    run = Run(tmp_path, config(2))
    run.change(saving(save_interval=5, keep_last=9, train_iters=20))
    outcomes = run_ranks(2, full_disk, run.arguments(), [*range(7, 12), *range(17, 20)])
    assert codes(outcomes) == [0, 1], "the run is finished, but its last checkpoint is missing"
    first, last = outcomes[1].err.splitlines()
    assert first.startswith("rank 1: the checkpoint of step 10 failed, earlier ones are kept: ")
    assert "step 20" in last
    assert outcomes[0].out.splitlines()[-1] == (
        "not saved: the checkpoint of iteration 20 failed on 1 of 2 ranks, and stderr says why; once that is put "
        "right, the same command goes on from the last complete one"
    )
    whole = [catalog.is_complete(run.step_folder(step)) for step in (5, 10, 15, 20)]
    assert whole == [True, False, True, False]
    assert [row["step"] for row in run.exact_metrics()[1]] == list(range(1, 21))
    (run.checkpoints / "latest").write_text("")
    again = run_ranks(2, starts, run.arguments({"checkpoint": {"load": str(run.step_folder(5))}}))
    assert codes(again) == [0, 0], "the older checkpoint is whole"


@pytest.mark.usefixtures("no_patience")
def test_a_full_disk_is_reported_by_asynchronous_saves(tmp_path: Path) -> None:
    run = Run(tmp_path, config(2))
    run.change(saving(save_interval=5, train_iters=15, async_save=True))
    outcomes = run_ranks(2, full_disk, run.arguments(), range(2, 15))
    assert codes(outcomes) == [0, 1]
    last = outcomes[0].out.splitlines()[-1]
    assert last.startswith("not saved: the checkpoint of iteration 15 failed on 1 of 2")
    steps, reported = ["step 5", "step 10", "the last checkpoint"], outcomes[1].err.splitlines()
    assert [step in line for step, line in zip(steps, reported, strict=True)] == [True] * 3, reported
    assert not any(catalog.is_complete(folder) for folder in catalog.steps(run.checkpoints))


def full_disk(rank: int, world_size: int, arguments: list[str], steps: Sequence[int]) -> Outcome:
    """On rank 1, files end at 64 kB after so many steps and until the next: log files fit, checkpoints do not."""
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        at_steps(
            lambda done: resource.setrlimit(resource.RLIMIT_FSIZE, (65536 if done in steps else hard, hard))
        )
    return command(rank, world_size, arguments)


WARMUP_DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_max_lr": 0.01,
        "warmup_min_lr": 0.001,
        "warmup_min_ratio": None,
        "cos_min_ratio": None,
    },
}


@pytest.mark.parametrize(
    "scheduler", [None, "cosine", WARMUP_DECAY, WSD], ids=["none", "cosine", "decay", "WSD"]
)
@pytest.mark.parametrize("precision", [{}, slow(BF16)], ids=["fp32", "bf16"])
def test_a_new_learning_rate_is_used(precision: dict[str, Any], scheduler: Any, tmp_path: Path) -> None:
    """After the resume, step by step, the rates of a run that had them from the start."""
    text = write_text(tmp_path, 200_000)
    edits = {"noloco": noloco(), **saving(save_interval=5, train_iters=8), **precision}
    if scheduler != "cosine":  # the tiny config's
        edits["scheduler"] = scheduler
    run, fresh = (Run(tmp_path / folder, edits, text) for folder in ("run", "fresh"))
    run.launch(1, changes={"training": {"train_iters": 5}})
    new: dict[str, Any] = {"optimizer": {"params": {"lr": 0.003}}, "noloco": {"local_steps": 3}}
    if scheduler is WARMUP_DECAY:
        new["scheduler"] = {"params": {"warmup_max_lr": 0.003}}
    (resumed,) = run.launch(1, changes=new)
    assert "changed: optimizer.params.lr: 0.01 in the checkpoint, 0.003 now" in resumed.out
    assert "changed: noloco.local_steps: 4 in the checkpoint, 3 now" in resumed.out
    fresh.launch(1, changes=new)
    (rows,), (expected,) = run.exact_metrics(), fresh.exact_metrics()
    rates = [row["train/learning_rate"] for row in rows]
    assert rates[5:] == pytest.approx([row["train/learning_rate"] for row in expected[5:]], rel=1e-9)
    assert rates[:5] != pytest.approx([row["train/learning_rate"] for row in expected[:5]], rel=0.1)
    paused = [row["time/exchange_seconds"] > 0 for row in metrics(run.folder)[0]]
    assert paused == [done in (4, 6) for done in range(1, 9)], "the new k"


# Another number of replicas


@pytest.fixture(scope="module")
def four_replicas(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("four"), config(4))
    run.change(saving(train_iters=SAVED))
    run.launch(4)
    return run


def flat(run: Run, step: int, replicas: range, name: str) -> torch.Tensor:
    """Shape [replicas, elements]: all parameter groups of a replica of one rank."""
    ranks = (Position(replica, 0, 0, 0) for replica in replicas)
    files = [load_file(catalog.file_of(run.step_folder(step), at, name)) for at in ranks]
    groups = sum(key.startswith(f"{name}.") for key in files[0])
    return torch.stack([torch.cat([file[f"{name}.{group}"] for group in range(groups)]) for file in files])


@pytest.mark.parametrize("replicas", [6, slow(2)])
def test_another_number_of_replicas(replicas: int, four_replicas: Run, tmp_path: Path) -> None:
    run = four_replicas.copy(tmp_path / "run")
    run.change({"parallel": {"replicas": replicas}, **saving(train_iters=SAVED + 2)})
    outcomes = run.launch(replicas)
    assert codes(outcomes) == [0] * replicas
    reported = [line for line in outcomes[0].out.splitlines() if line.startswith("replica ")]
    assert reported == describe_replicas(Topology(4), Topology(replicas))
    for rows in run.exact_metrics()[: min(replicas, 4)]:
        last, first = rows[SAVED - 1], rows[SAVED]
        assert first["train/consumed_samples"] - last["train/consumed_samples"] == replicas * 4
        assert abs(first["train/loss"] - last["train/loss"]) < 0.5, "the loss at random weights is 2 above"


@pytest.mark.parametrize("replicas", [6, 2])
def test_what_each_replica_continues_from(replicas: int, four_replicas: Run, tmp_path: Path) -> None:
    run = four_replicas.copy(tmp_path / "run")
    run.change({"parallel": {"replicas": replicas}, **saving()})
    restored = run_ranks(replicas, restored_state, run.arguments())
    for name in ("slow_weights", "outer_momentum"):
        saved = flat(run, SAVED, range(4), name)
        found = torch.stack([state[name] for state in restored])
        assert torch.equal(found, saved[[replica % 4 for replica in range(replicas)]])


def restored_state(rank: int, world_size: int, arguments: list[str]) -> dict[str, torch.Tensor]:
    """What a rank begins its first step with."""
    already_joined()
    run = build_run(arguments[arguments.index("--config") + 1])
    return {name: tensor.clone() for name, tensor in run.peers.outer.state().items()}


def test_a_finished_run_has_saved_its_model(tmp_path: Path) -> None:
    """Also without a save interval; the same command then has nothing to do, and leaves the facts of the run."""
    run = Run(tmp_path, {"noloco": noloco(), "training": {"train_iters": 5}})
    run.launch(1)
    assert (run.checkpoints / "latest").read_text() == "step_00000005\n"
    (again,) = run.launch(1)
    assert (again.code, again.err) == (0, "")
    assert "nothing to do: iteration 5 of 5 is already reached" in again.out
    assert [path.name for path in run.checkpoints.iterdir() if path.is_dir()] == ["step_00000005"]
    run.launch(1, changes={"training": {"train_iters": 4}})
    assert json.loads((run.checkpoints.parent / "run.json").read_text())["steps"] == 5


def test_data_may_move_but_not_become_others(tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("before", "moved", "other")]
    texts[0].mkdir()
    text = Path(write_text(texts[0], 200_000))
    run = Run(tmp_path / "run", {"noloco": noloco(), **saving(train_iters=4)}, str(texts[0]))
    run.launch(1)
    texts[0].rename(texts[1])
    shutil.copytree(texts[1], texts[2])
    with (texts[2] / text.name).open("r+") as file:
        file.write("as many characters, others")
    outcomes, longer = [], {"training": {"train_iters": 5}}
    for folder in texts[1:]:
        outcomes += run_ranks(1, starts, run.arguments({"data": {"text": str(folder)}} | longer))
    assert codes(outcomes) == [0, 2]
    difference = f'data.text: "{texts[0]}" in the checkpoint, '
    assert f'changed: {difference}"{texts[1]}" now' in outcomes[0].out.splitlines()
    assert outcomes[1].err == (
        f'{difference}"{texts[2]}" now, with other contents; a resume cannot change it: change it back, or start '
        "anew in another training.output_dir\n"
    )
    texts[2].rename(texts[0])
    (outcome,) = run_ranks(1, starts, run.arguments(longer))
    reported = "changed: the training data have other contents than those of the checkpoint, or another order"
    assert f"\n{reported}; what was read for training may now be read for validation\n" in outcome.out


# No replica waits for another


@pytest.mark.usefixtures("no_patience")
def test_a_replica_saves_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, SMALL)
    run.change(saving(save_interval=5, train_iters=7))
    outcomes = run_ranks(4, only_replica_0_saves, run.arguments())
    assert codes(outcomes) == [0] * 4
    folders = catalog.steps(run.checkpoints)
    assert [catalog.step_of(folder) for folder in folders] == [7, 5]
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["replica_00"]
        assert len(list(folder.glob("replica_00/*.json"))) == 2
        assert not catalog.is_complete(folder)
    assert not (run.checkpoints / "latest").exists()


def only_replica_0_saves(rank: int, world_size: int, arguments: list[str]) -> Outcome:
    """Replica 1 never calls `save`, and does not go on before replica 0 has."""
    original: Callable[..., SaveReport] = Checkpointer.save
    store = dist.distributed_c10d._get_default_store()

    def save(checkpointer: Checkpointer, step: int, counters: dict[str, float]) -> SaveReport:
        replica_size = world_size // 2
        if rank < replica_size:
            report = original(checkpointer, step, counters)
            store.set(f"saved/{rank}/{step}", "")
            return report
        store.wait([f"saved/{other}/{step}" for other in range(replica_size)])
        return SaveReport(step, 0.0, None)

    Checkpointer.save = save  # type: ignore[method-assign]
    return command(rank, world_size, arguments)


@pytest.fixture(autouse=True)
def _nothing_half_written(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.rglob("*.partial"))
