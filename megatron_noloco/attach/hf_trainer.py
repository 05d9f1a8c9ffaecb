"""NoLoCo for the `Trainer` of Hugging Face's transformers, alone or with DeepSpeed.

    trainer = Trainer(model, args, ...)
    trainer.add_callback(NolocoCallback(trainer, FederationSettings(slots=4, ...), slot=0))
    trainer.train()             # or trainer.train(resume_from_checkpoint=True)
    trainer.save_model()

Each replica is a job of its own, started as ever (python, torchrun, accelerate launch, deepspeed). In it the
Trainer reduces gradients over all ranks of the job, so they end at the replica. Needs transformers and accelerate.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DefaultFlowCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from megatron_noloco.attach.attached import Attached, attach
from megatron_noloco.files import write_whole
from megatron_noloco.settings import FederationSettings, NolocoSettings


class NolocoCallback(TrainerCallback):
    """Rounds with the other jobs, from the beginning of `Trainer.train` to its end.

    Give all jobs the same model and `TrainingArguments.seed`, and each its own data: its own part of the dataset,
    or another `data_seed`; and its own `output_dir`.

    - A round follows every k optimizer steps. With `TrainingArguments.logging_strategy` other than "no" its spread
      and partner are logged like the loss, as `noloco_spread` and `noloco_partner`.
    - Every checkpoint of the Trainer gets the state of the rounds as well, one file for each rank:
      `checkpoint-N/noloco_00000.pt`. `resume_from_checkpoint` continues from it, where the checkpoint lies in
      `output_dir`. To begin a replica anew from another one, copy that one's checkpoint folder there.
    - A job that has fallen behind goes on at the step of the others: `global_step` and the learning rate jump. A
      log, an evaluation or a save that was due at a step in between takes place there.
    - At the end the replicas average, see `Attached.average`. So `trainer.save_model()` after `trainer.train()`
      saves the one model of all replicas; the checkpoints, also that of the last step, are of this replica alone.

    Args:
        trainer: to which it is added.
        federation: how this job finds the others.
        settings: of the method, the same in all jobs, as is seed.
        slot: the number of this job's replica, from 0.
        seed: of the groups, see `Grouping`.
        average: whether the replicas average at the end.

    Raises ValueError, at the beginning of the training, as `attach` does; for a checkpoint without a state; and
    with `load_best_model_at_end`, which would replace the weights that the rounds are about.
    """

    def __init__(
        self,
        trainer: Trainer,
        federation: FederationSettings,
        settings: NolocoSettings | None = None,
        *,
        slot: int,
        seed: int = 0,
        average: bool = True,
    ) -> None:
        self._trainer = trainer
        self._federation = federation
        self._settings = settings
        self._slot, self._seed = slot, seed
        self._average = average
        self._noloco: Attached | None = None

    @property
    def noloco(self) -> Attached:
        """What `attach` returned; there from the beginning of the training."""
        assert self._noloco is not None, "training has not begun"
        return self._noloco

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end: NoLoCo ends with an average of the replicas; set it to False"
            )
        saved = None
        if state.global_step:
            file = _file(args, state)
            if not file.exists():
                raise ValueError(
                    f"{file} is missing: the checkpoint to resume from lies in output_dir, and was saved with a "
                    "NolocoCallback"
                )
            saved = torch.load(file, map_location="cpu", weights_only=True)
        self._noloco = attach(
            self._trainer.model_wrapped,
            self._settings,
            federation=self._federation,
            slot=self._slot,
            seed=self._seed,
            state=saved,
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        reports = self.noloco.step()
        self._catch_up(args, state, control)
        if reports and args.logging_strategy != "no":
            logs = control.should_log  # which `log` takes for done
            for report in reports:
                others = [replica for replica in report.exchange.group if replica != self._slot]
                partner = others[0] if others else -1  # a skipped round
                self._trainer.log({"noloco_spread": report.spread, "noloco_partner": partner})
            control.should_log = logs

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        write_whole(_file(args, state), lambda path: torch.save(self.noloco.state_dict(), path))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._average:
            self.noloco.average()
        self.noloco.close()

    def _catch_up(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Where the others are ahead, go on where they are.

        What is due at a step in between, such as a save, is done at the step where this job goes on.
        """
        engine = self._trainer.model_wrapped
        schedule: Any = (
            getattr(engine, "lr_scheduler", None) or self._trainer.lr_scheduler
        )  # DeepSpeed has its own
        while state.global_step < self.noloco.done:
            state.global_step += 1
            schedule.step()
            DefaultFlowCallback().on_step_end(args, state, control)


def _file(args: TrainingArguments, state: TrainerState) -> Path:
    """Of the state of this rank, in the checkpoint of this step."""
    folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    return folder / f"noloco_{args.process_index:05d}.pt"
