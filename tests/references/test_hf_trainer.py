"""NoLoCo in the Trainer of Hugging Face; each replica is a job of its own."""

import json
import os
import re
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_noloco.attach import attach
from megatron_noloco.attach.hf_trainer import NolocoCallback
from megatron_noloco.federation import membership
from tests.kit.jobs import federation, members_of, paper, run_jobs
from tests.kit.ranks import REPOSITORY, key_file, run_script, run_torchrun, slow, until

EXAMPLE = REPOSITORY / "examples" / "hf_trainer.py"
FSDP_ON_CPU = REPOSITORY / "tests" / "kit" / "fsdp_on_cpu.py"
ON_A_CPU = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
FSDP2 = {  # as `accelerate launch --use_fsdp --fsdp_version 2` sets them
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
SETTINGS = paper(local_steps=2)
ZERO_2 = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 2},
}
needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="the Trainer needs accelerate, which is not installed"
)
if find_spec("accelerate"):
    import transformers.trainer  # noqa: F401  before ranks are forked


class Loop:
    """Stands for a Trainer: what its callback sees of it, and when the callback is called."""

    callback: Any

    def __init__(self, folder: Path, slot: int) -> None:
        torch.manual_seed(0)
        self.slot, self.model_wrapped = slot, nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model_wrapped.parameters(), lr=0.1)
        self.lr_scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        off = dict.fromkeys(("load_best_model_at_end", "logging_first_step", "push_to_hub"), False)
        strategies = dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "steps")
        self.args = SimpleNamespace(
            output_dir=str(folder / f"replica_{slot}"), process_index=0, world_size=1, eval_delay=0,
            **off, **strategies,
        )  # fmt: skip
        self.state: Any = SimpleNamespace(
            global_step=0, max_steps=12, logging_steps=3, eval_steps=4, save_steps=5
        )
        self.control: Any = SimpleNamespace(
            should_log=True, should_evaluate=False, should_save=False, should_training_stop=False
        )
        self.logged: list[dict[str, Any]] = []
        self.callback_handler = SimpleNamespace(callbacks=list[Any]())

    def begin(self, folder: Path, **options: Any) -> Any:
        """Begin to train in the federation of this folder; returns the callback."""
        there = federation(folder, self.slot, 2, **options)
        self.callback = NolocoCallback(self, settings=SETTINGS, **there)  # type: ignore[arg-type]
        self.call("on_train_begin")
        return self.callback

    def call(self, event: str) -> None:
        getattr(self.callback, event)(self.args, self.state, self.control)

    @property
    def model(self) -> nn.Module:
        return self.model_wrapped

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)
        self.control.should_log = False  # as transformers does

    def steps(self, until: int) -> None:
        while self.state.global_step < until:
            generator = torch.Generator().manual_seed(7 * self.state.global_step + self.slot)
            points = torch.rand(4, 3, generator=generator)
            self.optimizer.zero_grad()
            self.model_wrapped(points).square().mean().backward()
            self.optimizer.step()
            self.lr_scheduler.step()
            self.state.global_step += 1
            self.call("on_step_end")
            assert self.control.should_log, "the loss is logged as well"

    @property
    def folder(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model_wrapped.parameters()).detach().clone()


def interrupted(slot: int, rank: int, folder: Path) -> tuple[list[int], Tensor, Tensor, list[dict[str, Any]]]:
    """Train, and go on from a checkpoint whose `on_save` the job did not live to see.

    Returns where it went on, and the step of the state that the next `on_save` completes; the weights after the
    last step, and after the average; the lines logged.
    """
    loop = Loop(folder, slot)
    loop.begin(folder / "first")
    loop.steps(4)
    loop.control.should_save = True  # as DefaultFlowCallback, the first one, says
    loop.steps(5)
    loop.callback.noloco.close()

    noloco = loop.begin(folder / "second").noloco
    steps = [loop.state.global_step, noloco.done]
    until(members_of(noloco).present)
    loop.steps(6)
    loop.folder.mkdir()  # which the Trainer has written
    loop.call("on_save")
    steps.append(int(saved_in(loop.folder)["local_steps_done"]))
    loop.control.should_save = False
    loop.steps(12)
    last = loop.weights()
    loop.call("on_train_end")
    return steps, last, loop.weights(), loop.logged


def late(slot: int, rank: int, folder: Path) -> tuple[int, dict[str, Any], float]:
    """Job 1 comes when job 0 has trained long, and has saved nothing.

    The step at which a job began, and then the state of its inner optimizer and its learning rate.
    """
    if slot == 0:
        membership.FIRST_SECONDS = 0.0  # nobody is there to be waited for
    loop = Loop(folder, slot)
    loop.optimizer.param_groups[0]["momentum"] = 0.9
    came, loop.state.max_steps = folder / "came", 10**6
    if slot == 1:
        until((folder / "trained").exists)
    loop.begin(folder, start_with=1 + slot, rounds_behind=2)
    found = loop.state.global_step, loop.optimizer.state_dict()["state"], loop.lr_scheduler.get_last_lr()[0]
    if slot == 1:
        came.touch()
    while slot == 0 and not came.exists():
        loop.steps(loop.state.global_step + 1)
        if loop.state.global_step == 20:
            (folder / "trained").touch()
        time.sleep(0.01)
    loop.callback.noloco.close()
    return found


def test_a_job_that_comes_late_begins_at_the_step_of_the_others(tmp_path: Path) -> None:
    """With the state of the inner optimizer of one of them."""
    (((first, fresh, _),), ((second, inner, rate),)) = run_jobs(tmp_path, 2, 1, late, tmp_path)
    assert first == 0
    assert not fresh
    assert second >= 20
    assert inner[0]["momentum_buffer"].norm() > 0
    assert rate == pytest.approx(0.1 * 0.9**second)


def uninterrupted(slot: int, rank: int, folder: Path) -> Tensor:
    loop = Loop(folder, slot)
    noloco = attach(loop.model_wrapped, SETTINGS, **federation(folder, slot, 2))
    loop.callback = SimpleNamespace(on_step_end=lambda *_: noloco.step())
    loop.steps(12)
    noloco.close()
    return loop.weights()


def test_trainer_killed_in_save_trains_as_plain_loop(tmp_path: Path) -> None:
    """To the last bit. The state is written before the Trainer deletes the checkpoint before."""
    found = [one for (one,) in run_jobs(tmp_path, 2, 1, interrupted, tmp_path)]
    expected = [one for (one,) in run_jobs(tmp_path, 2, 1, uninterrupted, tmp_path / "plain")]
    for slot, (steps, last, averaged, logged) in enumerate(found):
        assert steps == [5, 5, 6]
        assert torch.equal(last, expected[slot])
        torch.testing.assert_close(averaged, (expected[0] + expected[1]) / 2, rtol=0, atol=1e-7)
        assert [line["noloco_partner"] for line in logged] == [1 - slot] * 6
        assert all(line["noloco_spread"] > 0 for line in logged)


def test_a_job_that_fell_behind_goes_on_where_the_others_are(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 0)
    loop.callback = NolocoCallback(loop, **federation(tmp_path, 0, 2))  # type: ignore[arg-type]
    noloco = loop.callback._noloco = SimpleNamespace(step=lambda: [], done=7, taken=-1, state_dict=dict)
    loop.state.global_step, loop.control.should_log = 4, False
    loop.call("on_step_end")
    assert loop.state.global_step == 7
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**3)
    assert not loop.control.should_training_stop
    assert loop.control.should_save, "due at step 5"
    assert loop.control.should_log, "due at step 6"
    assert not loop.control.should_evaluate, "due at steps 4, which was not left out, and 8"
    noloco.done, noloco.taken = 9, 8
    loop.call("on_step_end")
    lr = pytest.approx(0.1 * 0.9**4)
    assert loop.optimizer.param_groups[0]["lr"] == lr, "a schedule that was taken over has step 8 already"
    loop.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer)  # which has no steps
    noloco.done = 12
    loop.call("on_step_end")
    assert loop.optimizer.param_groups[0]["lr"] == lr
    assert loop.control.should_training_stop


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Loop]:
    """Return a loop that trains in a federation of which nobody else is there."""
    monkeypatch.setattr(membership, "FIRST_SECONDS", 0.0)
    loop = Loop(tmp_path, 0)
    loop.begin(tmp_path, start_with=1)
    yield loop
    loop.callback.noloco.close()


def save_as_the_trainer(loop: Loop) -> None:
    loop.folder.mkdir(parents=True, exist_ok=True)
    (loop.folder / "rng_state.pth").write_bytes(b"")


def saved_in(folder: Path) -> dict[str, Tensor]:
    saved: dict[str, Tensor] = torch.load(folder / "noloco_00000.pt", weights_only=True)
    return saved


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_epoch_end"])
def test_checkpoint_of_another_callback_gets_state(loop: Loop, tmp_path: Path, event: str) -> None:
    """As transformers' just-in-time checkpoints, which are saved without `on_save`; and is continued from."""
    loop.steps(3)
    loop.control.should_save = False
    save_as_the_trainer(loop)
    loop.call(event)
    loop.control.should_training_stop = True
    with pytest.warns(UserWarning, match="ended after 3 of 12 steps"):
        loop.call("on_train_end")
    assert int(saved_in(loop.folder)["local_steps_done"]) == 3
    loop.control.should_training_stop = False
    assert loop.begin(tmp_path, start_with=1).noloco.done == 3


def test_checkpoint_before_round_has_state_before_it(loop: Loop) -> None:
    """The just-in-time callback comes first at the end of a step. A complete checkpoint is left alone."""
    loop.steps(1)
    loop.state.global_step = 2
    save_as_the_trainer(loop)
    loop.state.global_step = 1
    outer = loop.callback.noloco.outer
    before = outer.slow_weights.clone()
    loop.steps(2)
    saved = saved_in(loop.folder)
    assert int(saved["local_steps_done"]) == 2
    assert torch.equal(saved["slow_weights"], before)
    assert not torch.equal(outer.slow_weights, before)
    written = (loop.folder / "noloco_00000.pt").stat()
    loop.call("on_step_begin")
    assert (loop.folder / "noloco_00000.pt").stat() == written
    assert loop.logged == [{"noloco_partner": -1}], "of one replica there is no spread"


def test_a_checkpoint_that_is_uploaded_has_the_state(loop: Loop) -> None:
    """The Trainer uploads between its files of a checkpoint and `on_save`, which must not replace what is read."""
    loop.args.push_to_hub, loop.args.hub_strategy = True, "checkpoint"
    loop.control.should_save = True
    loop.steps(3)
    (waiting,) = Path(loop.args.output_dir).glob("*.pt")
    assert waiting.name.startswith("_"), "which the Trainer does not upload with the model"
    save_as_the_trainer(loop)
    loop.call("on_push_begin")
    assert int(saved_in(loop.folder)["local_steps_done"]) == 3
    before = (loop.folder / "noloco_00000.pt").stat()
    loop.call("on_save")
    assert (loop.folder / "noloco_00000.pt").stat() == before
    assert not waiting.exists()


def test_early_end_skips_round_and_average(tmp_path: Path) -> None:
    """The other job is there and stands still."""
    assert run_jobs(tmp_path, 2, 1, one_ends_early, tmp_path)[0] == [
        ("replica 1: a job was asked to stop", True)
    ]


def one_ends_early(slot: int, rank: int, folder: Path) -> tuple[str, bool]:
    """What a job was told of its round; whether its weights stay its own."""
    loop = Loop(folder, slot)
    noloco = loop.begin(folder).noloco
    if slot == 1:
        until((folder / "left").exists)
        noloco.close()
        return "", False
    told: list[Any] = []
    step = noloco.step
    noloco.step = lambda: told.extend(step()) or told
    threading.Timer(0.5, lambda: setattr(loop.control, "should_training_stop", True)).start()
    loop.steps(2)
    before = loop.weights()
    warnings.simplefilter("ignore")
    loop.call("on_train_end")
    (folder / "left").touch()
    return told[0].exchange.missed, torch.equal(loop.weights(), before)


def test_training_after_failure_continues(loop: Loop) -> None:
    loop.steps(3)
    before = loop.callback.noloco.outer.slow_weights.clone()
    loop.state.global_step = 0  # an exception; `train()` begins anew
    loop.lr_scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.9)
    loop.call("on_train_begin")
    assert loop.state.global_step == loop.callback.noloco.done == 3
    assert torch.equal(loop.callback.noloco.outer.slow_weights, before)
    loop.steps(12)
    loop.call("on_train_end")


def test_resume_after_failure_loads_checkpoint(loop: Loop) -> None:
    loop.steps(2)
    saved = {name: value.clone() for name, value in loop.model.state_dict().items()}
    save_as_the_trainer(loop)
    loop.call("on_save")
    loop.steps(3)
    loop.model.load_state_dict(saved)
    loop.state.global_step = 2
    loop.call("on_train_begin")
    assert loop.callback.noloco.done == 2
    loop.model.load_state_dict(saved)
    with pytest.raises(ValueError, match="weights were loaded into the model while it is trained"):
        loop.steps(3)


@pytest.mark.parametrize(
    ("args", "step", "line"),
    [
        ({"load_best_model_at_end": True}, 0, "load_best_model_at_end: NoLoCo ends with an average"),
        (
            {"push_to_hub": True, "hub_strategy": "all_checkpoints", "world_size": 2},
            0,
            'hub_strategy "all_checkpoints": checkpoints would be uploaded without the state of the rounds',
        ),
        ({}, 5, r".*checkpoint-5/noloco_00000.pt is missing: the checkpoint to resume from must be in"),
    ],
)
def test_best_model_and_stateless_checkpoint_are_refused(
    tmp_path: Path, args: dict[str, Any], step: int, line: str
) -> None:
    loop = Loop(tmp_path, 0)
    vars(loop.args).update(args)
    loop.state.global_step = step
    with pytest.raises(ValueError, match=line):
        loop.begin(tmp_path)


@needs_accelerate
@pytest.mark.parametrize(
    ("ranks", "engine"),
    [(1, "torch"), *(slow(2, engine) for engine in ("DistributedDataParallel", "FSDP2", "DeepSpeed"))],
)
def test_the_example_trains_resumes_and_ends_with_one_model(tmp_path: Path, ranks: int, engine: str) -> None:
    more = []
    key_file(tmp_path.parent, f"{tmp_path.name}.key")
    if engine == "DeepSpeed":
        (tmp_path / "zero_2.json").write_text(json.dumps(ZERO_2))
        more = ["--deepspeed", str(tmp_path / "zero_2.json")]

    def of_one_rank(slot: int, rank: int, *options: str) -> str:
        os.environ |= ON_A_CPU
        return run_script(EXAMPLE, *options, "--slot", str(slot))

    def under_torchrun(slot: int, *options: str) -> str:
        script, environ = [str(EXAMPLE), *options, "--slot", str(slot)], ON_A_CPU
        if engine == "FSDP2":
            script, environ = [str(FSDP_ON_CPU), *script], ON_A_CPU | FSDP2
        finished = run_torchrun(ranks, script[0], script[1:], 400, environ)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    def jobs(steps: int) -> list[str]:
        options = ["--slots", "2", "--folder", str(tmp_path), "--steps", str(steps), *more]
        if ranks == 1:
            return [text for (text,) in run_jobs(tmp_path, 2, 1, of_one_rank, *options)]
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda slot: under_torchrun(slot, *options), (0, 1)))

    for steps, rounds in ((30, 3), (60, 3)):
        said = jobs(steps)
        for slot, text in enumerate(said):
            assert re.findall(r"'noloco_partner': (\d)", text) == [str(1 - slot)] * rounds, text
            saved = tmp_path / f"replica_{slot}" / f"checkpoint-{steps}"
            assert len(list(saved.glob("noloco_*.pt"))) == ranks
        if engine == "FSDP2":
            continue  # the Trainer saves no whole model, nor could it on a CPU
        models = [(tmp_path / f"replica_{slot}" / "final" / "model.safetensors") for slot in range(2)]
        assert models[0].read_bytes() == models[1].read_bytes()
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", said[0])]
    assert losses[-1] < 3.3, "of 5.5 at the start"
