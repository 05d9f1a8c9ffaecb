"""The blocks about a run; others have their own files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from megatron_noloco.fields import (
    AboveZero,
    FilePath,
    NonNegative,
    Positive,
    Settings,
    Size,
    Text,
    field,
    offered_field,
    shared_field,
)

AUTO_SAVE_SECONDS = 1800.0


class TrainingConfig(Settings):
    """The run: its length, its folder, its log."""

    train_iters: Positive = shared_field(..., "Local steps of the whole run.")
    seed: NonNegative = shared_field(1234, "Seed of weights, sample order, groups and routes.")
    log_interval: Positive = offered_field(10, "Local steps between two log lines.")
    output_dir: FilePath = field("runs/default", "Folder for logs and checkpoints.")
    pretrained: FilePath | None = field(
        None, "Folder of a Hugging Face model whose weights every replica starts from; null: random."
    )
    exit_duration_minutes: AboveZero | None = field(None, "Save and exit after so many minutes; null: never.")
    watchdog_seconds: Size = offered_field(
        120.0,
        "Seconds after which a rank that makes no progress writes in which step it is, and whom it waits for; "
        "0: never (`watch` still shows it). The watchdog ends nothing: noloco.deadline_seconds ends a round "
        "without an answer.",
    )
    peak_tflops: AboveZero | None = field(
        None,
        "Peak TFLOP/s of a GPU in the precision of the run, for the MFU in the log; null: the peak of its data "
        "sheet, if it is known.",
    )

    def folder_of(self, replica: int) -> Path:
        """Return the folder in which a replica writes about itself."""
        return Path(self.output_dir) / f"replica_{replica:02d}"


class CheckpointConfig(Settings):
    """Checkpoints: when they are saved, and from which one a run continues. Replaces DeepSpeed's `checkpoint`."""

    save_interval: NonNegative | Literal["auto"] = offered_field(
        "auto",
        'Local steps between two checkpoints; 0: only at the end, and when the run is stopped; "auto": every 30 '
        "minutes, too.",
    )
    keep_last: Positive = field(2, "Complete checkpoints kept; older ones are removed.")
    async_save: bool = field(False, "Whether training continues while a copy of the state is being written.")
    load: FilePath = field(
        "auto",
        '"auto": continue from the newest sound checkpoint in training.output_dir; "none": start anew at every '
        'start; or a step folder: start from it, and once the run has saved, continue as with "auto".',
    )


class EvaluationConfig(Settings):
    """The loss on the validation split."""

    interval: NonNegative = offered_field(0, "Local steps between two evaluations; 0: at the end only.")
    iters: NonNegative = offered_field(
        10,
        "Microbatches per evaluation and dataset (virtual stages: rounded up to a multiple of the stages); "
        "0 switches evaluation off. If it is left out, a short text may have fewer.",
    )
    full: bool = offered_field(False, "Whether an evaluation takes all of the validation split, not iters.")
    mean_model: bool = field(
        True,
        "Whether the mean of the replicas of this job is evaluated too; their weights are then exchanged. Has no "
        "effect in a federation, where each job evaluates its own replica.",
    )

    def rules(self) -> Iterator[str]:
        if self.full and not self.iters:
            yield (
                "full true has no effect with iters 0, which switches evaluation off; leave one of them out"
            )


class TensorBoardConfig(Settings):
    """TensorBoard. Replaces DeepSpeed's block of the same name, which would write for global rank 0 only."""

    enabled: bool = field(
        True,
        "Whether scalars are also written for TensorBoard, in a folder per replica under "
        "training.output_dir.",
    )


class WandbConfig(Settings):
    """Weights & Biases. Replaces DeepSpeed's block of the same name."""

    enabled: bool = field(
        False, "Whether every replica also has a run in Weights & Biases; needs the package wandb."
    )
    project: Text = field("megatron_noloco", "Project of these runs.")
    group: str | None = field(None, "Group of these runs; null: the name of the folder training.output_dir.")
    team: str | None = field(None, "Owner of these runs, wandb's entity; null: your own account.")

    def rules(self) -> Iterator[str]:
        if (given := sorted(self.model_fields_set)) and "enabled" not in given:
            yield f"{given[0]} has no effect without enabled, which is missing; set it to true or false"
