"""What blocks of the user's file are made of, and the blocks about a run; others have files of their own."""

import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Union, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

from megatron_noloco.settings import PAPER, bounds_of, options_of


def _checked_path(path: str) -> str:
    """Return a path with a "~" at its beginning replaced by the home folder."""
    if "\0" in path:
        raise ValueError("has a NUL character (\\u0000), which no file's name can have; remove it")
    return os.path.expanduser(path)


Text = Annotated[str, Field(min_length=1)]
FilePath = Annotated[Text, AfterValidator(_checked_path)]  # or a word that stands for one, such as "auto"
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Size = Annotated[float, Field(ge=0)]


def field(default: Any, meaning: str, **bounds: Any) -> Any:
    """Return a pydantic field; a default of ... means that it is required."""
    return Field(default=default, description=meaning, **bounds)


class Block(BaseModel):
    """Strict: "10" is not 10 and true is not 1, because a guess that is wrong costs days of training."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SettingsBlock(Block):
    """A block that is made from a dataclass of settings; see `block_of`."""

    SETTINGS: ClassVar[type]

    @model_validator(mode="before")
    @classmethod
    def _recipe(cls, given: Any) -> Any:
        """Fill in the values of a recipe."""
        has = "recipe" in cls.model_fields and isinstance(given, dict)
        return PAPER | given if has and given.get("recipe") == "paper" else given

    def settings(self) -> Any:
        """Return the settings; raises ValueError where they exclude each other, one line for each problem."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return self.SETTINGS(
            **{
                name: value.settings() if isinstance(value, SettingsBlock) else value
                for name, value in values.items()
            }
        )


def block_of(settings: type) -> type[SettingsBlock]:
    """Return the block with the types, bounds, defaults and meanings of a dataclass of `settings`."""
    hints, definitions = get_type_hints(settings), dict[str, Any]()
    for entry in fields(settings):
        bounds, default = dict[str, Any](bounds_of(entry.metadata)), entry.default
        options = []
        for option in options_of(hints[entry.name]):
            if is_dataclass(option):
                assert isinstance(option, type)
                block = block_of(option)
                option, default = block, block()
            if option in (int, float):
                option = Annotated[option, Field(**bounds)]
            elif option is str and entry.metadata.get("path"):
                option = FilePath
            options.append(option)
        annotation: Any = Union[tuple(options)]  # noqa: UP007
        if "refused" in entry.metadata:
            annotation = Annotated[annotation, BeforeValidator(_refusing(entry.metadata["refused"]))]
        definitions[entry.name] = annotation, Field(default=default, description=entry.metadata["meaning"])
    made: type[SettingsBlock] = create_model(
        settings.__name__, __base__=SettingsBlock, __doc__=settings.__doc__, **definitions
    )
    made.SETTINGS = settings
    return made


def _refusing(reasons: dict[str, str]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, str) and value in reasons:
            raise ValueError(f'"{value}" {reasons[value]}')
        return value

    return check


class TrainingConfig(Block):
    """The run."""

    train_iters: Positive = field(..., "Local steps of the whole run.")
    seed: NonNegative = field(1234, "Seed of weights, sample order, groups and routes.")
    log_interval: Positive = field(10, "Local steps between two log lines.")
    output_dir: FilePath = field("runs/default", "Folder for logs and checkpoints.")
    pretrained: FilePath | None = field(
        None, "Folder of a Hugging Face model whose weights every replica starts from; null: random."
    )
    exit_duration_minutes: Annotated[float, Field(gt=0)] | None = field(
        None, "Save and exit after so many minutes; null: never."
    )
    watchdog_seconds: Size = field(
        120.0,
        "Seconds after which a rank that stands still says in which step, and what it waits for from whom; "
        "0: never (`watch` still shows it). It ends nothing: noloco.deadline_seconds ends a round without an "
        "answer.",
    )
    peak_tflops: Annotated[float, Field(gt=0)] | None = field(
        None,
        "TFLOP/s that a GPU reaches at best in the precision of the run, for the MFU in the log; null: "
        "those of its data sheet, where it is known.",
    )

    def folder_of(self, replica: int) -> Path:
        """Return the folder in which a replica writes about itself."""
        return Path(self.output_dir) / f"replica_{replica:02d}"


class CheckpointConfig(Block):
    """What is saved, and where a run continues. Replaces DeepSpeed's block of the same name."""

    save_interval: NonNegative = field(
        0, "Local steps between two checkpoints; 0: only at the end, and when the run is stopped."
    )
    keep_last: Positive = field(2, "Complete checkpoints kept; older ones are removed.")
    async_save: bool = field(False, "Whether training continues while a copy of the state is being written.")
    load: FilePath = field(
        "auto",
        '"auto": continue from the newest sound checkpoint in training.output_dir; "none": start anew, '
        "each time; or a step folder: start from there, and after the next save as with auto.",
    )


class EvaluationConfig(Block):
    """The loss on the validation split."""

    interval: NonNegative = field(0, "Local steps between two evaluations; 0: at the end only.")
    iters: NonNegative = field(
        10,
        "Microbatches per evaluation and dataset (virtual stages: rounded up to a multiple of the stages); "
        "0 switches evaluation off.",
    )
    full: bool = field(False, "Whether an evaluation takes all of the validation split, not iters.")
    mean_model: bool = field(
        True, "Whether the mean of the replicas is evaluated too; needs their weights exchanged."
    )


class TensorBoardConfig(Block):
    """TensorBoard. Replaces DeepSpeed's block of the same name, which would write for global rank 0 only."""

    enabled: bool = field(
        True,
        "Whether scalars are also written for TensorBoard, in a folder per replica under "
        "training.output_dir.",
    )


class WandbConfig(Block):
    """Weights & Biases. Replaces DeepSpeed's block of the same name."""

    enabled: bool = field(
        False, "Whether every replica also has a run in Weights & Biases; needs the package wandb."
    )
    project: Text = field("megatron_noloco", "Project of these runs.")
    group: str | None = field(None, "Group of these runs; null: the name of the folder training.output_dir.")
    team: str | None = field(None, "Owner of these runs, wandb's entity; null: your own account.")
