"""NoLoCo for the `Trainer` of Hugging Face's transformers, alone, with FSDP2 or with DeepSpeed.

    trainer = Trainer(model, args, ...)
    trainer.add_callback(NolocoCallback(trainer, FederationSettings(rendezvous=...), slot=0))
    trainer.train()             # or trainer.train(resume_from_checkpoint=True)
    trainer.save_model()

Each replica is a job of its own, started as usual (python, torchrun, accelerate launch, deepspeed). The Trainer
reduces gradients over all ranks of the job, which are the replica. Needs transformers and accelerate.
"""

import inspect
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import (
    DefaultFlowCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from megatron_noloco.attach.attached import Attached
from megatron_noloco.attach.attaching import attach
from megatron_noloco.errors import UserError
from megatron_noloco.files import put_in_place, write_whole
from megatron_noloco.outer.vectors import number_tensor
from megatron_noloco.settings import FederationSettings, NolocoSettings

_NAME = "noloco_{:05d}.pt"  # of a rank's state in a checkpoint
_UPLOADS_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


class NolocoCallback(TrainerCallback):
    """Runs rounds with the other jobs, from the beginning of `Trainer.train` to its end.

    Give all jobs the same model and `TrainingArguments.seed`, and each its own data: its own part of the dataset,
    or another `data_seed`; and its own `output_dir`.

    - A round follows every k optimizer steps. With `TrainingArguments.logging_strategy` other than "no" its spread
      and partner are logged like the loss, as `noloco_spread` and `noloco_partner`.
    - Every checkpoint of the Trainer gets the state of the rounds as well, one file for each rank:
      `checkpoint-N/noloco_00000.pt`. `resume_from_checkpoint` continues from it if the checkpoint is in
      `output_dir`. It is written to `output_dir` and moved, so that there is one whenever the Trainer deletes an
      older checkpoint. Just-in-time checkpoints (`enable_jit_checkpoint`) get it when they are there, and
      checkpoints that are uploaded (`hub_strategy`) before. To start a replica again from another one, copy the
      other's checkpoint folder there.
    - A job that begins when others have trained takes over the present state of one: its weights, its rounds, and
      its optimizer.
    - A job that has fallen behind continues at the step of the others: `global_step` and the learning rate jump.
      A log, an evaluation or a save that was due at a step in between takes place there.
    - At the end the replicas average (`Attached.average`). So `trainer.save_model()` after `trainer.train()`
      saves the one model of all replicas; every checkpoint, also that of the last step, is of this replica alone.
    - A training that ends before `max_steps` (`should_training_stop`, early stopping, a just-in-time checkpoint)
      leaves at once: it waits for no other job, skips a round that is due, and does not average. Add this
      callback last, so that it sees what others decide.
    - `train()` may be called again. After an exception it goes on at the step where it failed, unless it resumes
      from a checkpoint; until then, or until `noloco.close()`, or the end of the process, other jobs see this one
      as slow.

    Args:
        trainer: the Trainer to which the callback is added.
        federation: how this job finds the others; see `attach`, also for `settings`, `slot` and `seed`.

    Raises UserError at the beginning of the training as `attach` does, for a checkpoint without a state, for
    uploads of checkpoints to which other ranks would add their states too late, and with
    `load_best_model_at_end`, which would replace the average; later for a model that is loaded meanwhile.
    """

    def __init__(
        self,
        trainer: Trainer,
        federation: FederationSettings,
        settings: NolocoSettings | None = None,
        *,
        slot: int,
        seed: int = 0,
    ) -> None:
        self._trainer = trainer
        self._attach = partial(attach, settings=settings, federation=federation, slot=slot, seed=seed)
        self._noloco: Attached | None = None
        self._written_at = -1  # the step whose state is written, and waits for the Trainer's checkpoint
        self._trains = False  # also after an exception
        self._loaded = False  # weights into the model, since the training began
        self._failed = False  # the training that is left
        self._model: ref[Any] | None = None  # that is attached

    @property
    def noloco(self) -> Attached:
        """The object that `attach` returned; available once training has begun."""
        assert self._noloco is not None, "training has not begun"
        return self._noloco

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if args.load_best_model_at_end:
            raise UserError(
                "load_best_model_at_end: NoLoCo ends with an average of the replicas; set it to False"
            )
        _check_uploads(args)
        saved = self._left_over() if self._trains else None
        self._written_at, self._loaded = -1, False
        if state.global_step:
            file = _file(args, state)
            if not file.exists() and _waiting(args).exists():
                file = _waiting(args)  # the job was killed before it was moved; attach checks that they fit
            if not file.exists():
                raise UserError(
                    f"{file} is missing: the checkpoint to resume from must be in output_dir, and saved with a "
                    "NolocoCallback"
                )
            saved = torch.load(file, map_location="cpu", weights_only=True)
        inner: Any = [self._trainer.optimizer, _schedule_of(self._trainer)]
        self._noloco = self._attach(
            self._trainer.model_wrapped, state=saved, inner=inner, stopped=self._ends_early
        )
        # By a `train` that resumes after one that has failed; else the next step refuses it.
        self._noloco.when_loaded = partial(setattr, self, "_loaded", True)
        self._trains, self._model = True, ref(self._trainer.model)
        if saved is not None and not state.global_step:
            self._catch_up(args, state, control)  # of the failed training; the schedule is new
        state.global_step = self.noloco.done  # that of another job, if its state was taken over

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Complete the checkpoint of another callback, and begin that which is due at the end of an epoch."""
        self._complete(args, state)
        if control.should_save:
            self._write(args, state)

    on_pre_optimizer_step = on_epoch_end = on_step_begin

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._loaded:
            raise UserError(
                "weights were loaded into the model while it is trained; the next round would undo it"
            )
        self._complete(args, state)
        reports = self.noloco.step()
        self._catch_up(args, state, control)
        if reports and args.logging_strategy != "no":
            logs = control.should_log  # `log` resets it
            for report in reports:
                own = self.noloco.outer.place.replica
                others = [replica for replica in report.exchange.group if replica != own]
                spread = {"noloco_spread": report.spread} if others else {}
                partner = others[0] if others else -1  # a skipped round
                self._trainer.log({**spread, "noloco_partner": partner})
            control.should_log = logs
        if control.should_save:
            self._write(args, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._trains:  # else the Trainer's own `push_to_hub`, of the model at the end
            self._put_in_place(args, state)

    on_push_begin = on_save

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        early = state.global_step < state.max_steps
        if not early:
            self.noloco.average()
        self.noloco.close(at_once=early)
        self._trains = False
        if early:
            warnings.warn(
                f"the training has ended after {state.global_step} of {state.max_steps} steps: the weights are "
                "those of this replica, not the average of all",
                stacklevel=2,
            )

    def _ends_early(self) -> bool:
        """Return whether the training is to end before its last step, or has failed. Called from any thread."""
        control, state = self._trainer.control, self._trainer.state
        managers = (getattr(one, "jit_manager", None) for one in self._trainer.callback_handler.callbacks)
        due = any(manager.is_checkpoint_requested for manager in managers if manager is not None)
        return self._failed or due or (control.should_training_stop and state.global_step < state.max_steps)

    def _left_over(self) -> dict[str, Tensor] | None:
        """Leave a training that has failed; return its state if the model still has its weights."""
        self._failed = True
        before = self.noloco
        saved = before.state_dict()
        before.close(at_once=True)
        self._failed = self._trains = False
        same = self._model is not None and self._model() is self._trainer.model and not self._loaded
        if not same or not before.done:
            return None
        del saved["weights"]  # an engine may have rounded them
        return saved

    def _complete(self, args: TrainingArguments, state: TrainerState) -> None:
        """Put the state into a checkpoint of this step, if there is one.

        The Trainer does not call `on_save` for just-in-time checkpoints. So this is called after other callbacks,
        and before the weights change.
        """
        if _random_state(args, _file(args, state)).exists():
            self._put_in_place(args, state)

    def _put_in_place(self, args: TrainingArguments, state: TrainerState) -> None:
        """Move the state into the Trainer's checkpoint of this step, unless it is there: it may be uploaded."""
        file = _file(args, state)
        if not _is_complete(args, file):
            self._write(args, state)
            put_in_place(_waiting(args), file)
            os.utime(file)  # see `_is_complete`
        self._written_at = -1

    def _write(self, args: TrainingArguments, state: TrainerState) -> None:
        """Write the state after `global_step` steps, also before their round, unless it is written."""
        if self._written_at != state.global_step:
            saved = self.noloco.state_dict() | {"local_steps_done": number_tensor(state.global_step)}
            _waiting(args).parent.mkdir(parents=True, exist_ok=True)
            write_whole(_waiting(args), lambda path: torch.save(saved, path))
            self._written_at = state.global_step

    def _catch_up(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Advance the Trainer to `noloco.done`, the step of the others where they are ahead.

        A save or an evaluation that is due at a step in between is done at the step where this job continues.
        """
        schedule = _schedule_of(self._trainer)
        # A schedule that follows the loss is stepped by the Trainer's evaluations.
        by_loss = "metrics" in inspect.signature(schedule.step).parameters
        while state.global_step < self.noloco.done:
            state.global_step += 1
            if state.global_step > self.noloco.taken and not by_loss:  # a schedule taken over has these steps
                schedule.step()
            DefaultFlowCallback().on_step_end(args, state, control)


def _schedule_of(trainer: Trainer) -> Any:
    """Return the schedule of the learning rate; DeepSpeed has its own."""
    return getattr(trainer.model_wrapped, "lr_scheduler", None) or trainer.lr_scheduler


def _check_uploads(args: TrainingArguments) -> None:
    """Raise UserError where the Trainer would upload checkpoints without the state of each rank.

    Rank 0 uploads, and waits for no other rank. transformers 4 uploads before any callback is called.
    """
    if not args.push_to_hub or HubStrategy(args.hub_strategy) not in _UPLOADS_CHECKPOINTS:
        return
    if args.world_size > 1 or not hasattr(TrainerCallback, "on_push_begin"):
        raise UserError(
            f'hub_strategy "{HubStrategy(args.hub_strategy).value}": checkpoints would be uploaded without the '
            'state of the rounds; it needs a job of one rank, and transformers 5. Use "every_save" or "end"'
        )


def _is_complete(args: TrainingArguments, file: Path) -> bool:
    """Return whether a file has this rank's state of the checkpoint around it, not of an earlier one."""
    saved = _random_state(args, file)
    return file.exists() and saved.exists() and file.stat().st_mtime_ns >= saved.stat().st_mtime_ns


def _random_state(args: TrainingArguments, file: Path) -> Path:
    """Return the file that the Trainer writes for this rank, beside that of its state."""
    suffix = f"_{args.process_index}" if args.world_size > 1 else ""
    return file.with_name(f"rng_state{suffix}.pth")


def _waiting(args: TrainingArguments) -> Path:
    """Return where this rank's state waits for its checkpoint; the Trainer uploads no name with "_" before it."""
    return Path(str(args.output_dir)) / f"_{_NAME.format(args.process_index)}"


def _file(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the file of this rank's state in the checkpoint of this step."""
    folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    return folder / _NAME.format(args.process_index)
