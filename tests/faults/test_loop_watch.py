"""Mistakes of a loop around an attached model, each told once: in torch, with Accelerate, in the Trainer."""

import copy
import gc
import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron_noloco.attach import attach
from megatron_noloco.attach.loop_watch import COPY_CHANGES, PER_MICROBATCH, SKIPPED
from tests.kit.jobs import federation, paper, run_jobs
from tests.kit.ranks import run_python

if HAS_ACCELERATE := find_spec("accelerate") is not None:
    import transformers.trainer  # noqa: F401  before ranks are forked

K, STEPS = 3, 7
LARGE = 3e38  # of which the square is infinite
ALONE = "the loop ends after local step {} without average(): the model is that of replica 0 alone; call"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def points(step: int, overflows: bool) -> torch.Tensor:
    return torch.full((4, 3), LARGE if overflows and step in (4, 5) else 1.0)


class Loop:
    """A loop of `STEPS` steps of the optimizer, of two microbatches each, with one of the mistakes."""

    def __init__(self, folder: Path, mistake: str) -> None:
        self.mistake, self.model = mistake, model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", enabled=mistake == "skipped")
        self.prepare()
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.frozen = copy.deepcopy(self.model)  # such as the reference of DPO, which is no mistake
        self.noloco = attach(self.model, paper(local_steps=K), **federation(folder, 0, 1))

    def prepare(self) -> None: ...

    def run(self) -> None:
        for step in range(STEPS):
            for number in range(2):
                self.backward(self.model(points(step, self.mistake == "skipped")).square().mean())
                if number == 1:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.optimizer.zero_grad()
                    if self.mistake == "copy":
                        self.ema.update_parameters(self.model)
                if number == 1 or self.mistake == "microbatch":
                    self.noloco.step()
        if self.mistake != "average":
            self.noloco.average()
        self.noloco.close()

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()


class AccelerateLoop(Loop):
    def prepare(self) -> None:
        from accelerate import Accelerator

        self.accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.accelerator.scaler = self.scaler if self.mistake == "skipped" else None
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def run(self) -> None:
        for step in range(STEPS):
            for _ in range(2):
                with self.accelerator.accumulate(self.model):
                    loss = self.model(points(step, self.mistake == "skipped")).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients and self.mistake == "copy":
                    self.ema.update_parameters(self.model)
                if self.accelerator.sync_gradients or self.mistake == "microbatch":
                    self.noloco.step()
        if self.mistake != "average":
            self.noloco.average()
        self.noloco.close()


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, overflows: bool) -> None:
        self.overflows = overflows

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"x": points(row // 2, self.overflows)[0]}


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = model()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


class TrainerLoop:
    def __init__(self, folder: Path, mistake: str) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        from megatron_noloco.attach.hf_trainer import NolocoCallback

        args = TrainingArguments(
            output_dir=str(folder / "out"), per_device_train_batch_size=1, gradient_accumulation_steps=2,
            max_steps=STEPS, report_to=[], use_cpu=True, save_strategy="no", logging_strategy="no",
            disable_tqdm=True, optim="sgd", max_grad_norm=0.0,
        )  # fmt: skip
        module = WithLoss()
        self.trainer: Any = Trainer(module, args, train_dataset=Rows(mistake == "skipped"))
        self.trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(range(2 * STEPS))
        if mistake == "skipped":
            self.trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        class Other(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                if mistake == "copy":
                    ema.update_parameters(module)
                if mistake == "average" and args.max_steps:
                    raise KeyError("the loop fails, and the program goes on")

        self.callback = NolocoCallback(
            self.trainer, settings=paper(local_steps=K), **federation(folder, 0, 1)
        )
        self.trainer.add_callback(self.callback)
        self.trainer.add_callback(Other)
        self.mistake = mistake

    def run(self) -> None:
        if self.mistake != "average":
            self.trainer.train()
            return
        with pytest.raises(KeyError):
            self.trainer.train()
        self.callback.noloco.close()


LOOPS: dict[str, Callable[[Path, str], Any]] = {
    "torch": Loop,
    "Accelerate": AccelerateLoop,
    "Trainer": TrainerLoop,
}


LINES = {
    "": None,
    "microbatch": PER_MICROBATCH,
    "skipped": SKIPPED,
    "copy": COPY_CHANGES,
    "average": ALONE,
}


def lines_of(slot: int, rank: int, folder: Path, loop: str, mistakes: list[str]) -> dict[str, list[str]]:
    found = {}
    for mistake in mistakes:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            LOOPS[loop](folder / f"with {mistake}", mistake).run()
        ours = "noloco", "the optimizer", "a copy", "the loop"
        found[mistake] = [str(one.message) for one in caught if str(one.message).startswith(ours)]
    return found


@pytest.mark.parametrize("loop", LOOPS)
def test_a_mistake_is_told_once(loop: str, tmp_path: Path) -> None:
    """In one process, in which each loop begins anew; the Trainer's callback counts steps, not microbatches."""
    if loop != "torch" and not HAS_ACCELERATE:
        pytest.skip("accelerate is not installed")
    mistakes = [mistake for mistake in LINES if (loop, mistake) != ("Trainer", "microbatch")]
    ((found,),) = run_jobs(tmp_path, 1, 1, lines_of, tmp_path, loop, mistakes)
    done = 1 if loop == "Trainer" else STEPS
    for mistake in mistakes:
        line = LINES[mistake]
        expected = [] if line is None else [line.format(done)[:60]]
        assert [one[:60] for one in found[mistake]] == expected, mistake


def without_close(slot: int, rank: int, folder: Path) -> list[str]:
    """What is said of a loop that ends without close(), before and after an average."""
    found = []
    for averages in (False, True):
        noloco = attach(model(), paper(local_steps=K), **federation(folder / f"{averages}", 0, 1))
        noloco.step()
        if averages:
            noloco.average()
        with redirect_stderr(io.StringIO()) as said:
            del noloco
            gc.collect()
        (line,) = (line for line in said.getvalue().splitlines() if line.startswith("the loop"))
        found.append(line)
    return found


def test_a_loop_that_is_not_closed_says_so(tmp_path: Path) -> None:
    ((lines,),) = run_jobs(tmp_path, 1, 1, without_close, tmp_path)
    starts = ALONE.format(1), "the loop of replica 0 ends without close()"
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == [*starts]


@pytest.mark.parametrize("end", ["", "1 / 0"])
def test_a_process_that_ends_in_between_says_so(end: str, tmp_path: Path) -> None:
    """Not after an exception, which is the reason."""
    lines = (
        "from pathlib import Path",
        "from torch.nn import Linear",
        "from megatron_noloco.attach import attach",
        "from megatron_noloco.federation import membership",
        "from tests.kit.jobs import federation, paper",
        "membership.FIRST_SECONDS = 0.0",
        f"noloco = attach(Linear(3, 1), paper(), **federation(Path({str(tmp_path)!r}), 0, 1))",
        "noloco.step()",
        end,
    )
    said = run_python("-c", "\n".join(lines)).stderr
    assert (ALONE.format(1) in said) == (not end)
    assert ("ZeroDivisionError" in said) == bool(end)
