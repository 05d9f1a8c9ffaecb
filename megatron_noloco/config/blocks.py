"""Blocks of the user's file that are ours; `noloco`, `model` and `data` have files of their own."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from megatron_noloco.settings import bounds_of, options_of

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]


class Block(BaseModel):
    """Strict: "10" is not 10 and true is not 1, because a guess that is wrong costs days of training."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # Keys of DeepSpeed's block of this name that are refused, each with the reason; "": it has no effect here.
    NOT_HERE: ClassVar[dict[str, str]] = {}


class SettingsBlock(Block):
    """A block that is made from a dataclass of settings; see `block_of`."""

    SETTINGS: ClassVar[type]

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
            options.append(Annotated[option, Field(**bounds)] if option in (int, float) else option)
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

    train_iters: Positive = Field(description="Local steps of the whole run.")
    seed: NonNegative = Field(default=1234, description="Seed of weights, sample order, groups and routes.")
    log_interval: Positive = Field(default=10, description="Local steps between two log lines.")
    output_dir: str = Field(
        default="runs/default", min_length=1, description="Folder for logs and checkpoints."
    )
    pretrained: str | None = Field(
        default=None,
        description="Folder of a Hugging Face model whose weights every replica starts from; null: random.",
    )
    exit_duration_minutes: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Save and exit after so many minutes; null: never."
    )
    watchdog_seconds: Annotated[float, Field(ge=0)] = Field(
        default=120.0,
        description="A rank that has stood still for so long says in which step, and what it waits for from whom; "
        "0: never (`watch` still shows it). Nothing is ended by it: noloco.deadline_seconds is what ends a round "
        "without an answer.",
    )
    peak_tflops: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="TFLOP/s that a GPU reaches at best in the precision of the run, for the MFU in the log; "
        "null: those of its data sheet, where it is known.",
    )

    def folder_of(self, replica: int) -> Path:
        """Of what a replica writes about itself."""
        return Path(self.output_dir) / f"replica_{replica:02d}"


class CheckpointConfig(Block):
    """What is saved, and where a run continues. Replaces DeepSpeed's block of the same name."""

    NOT_HERE: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            "tag_validation",
            "checkpoint_serialization",
            "writer",
            "load_universal",
            "use_node_local_storage",
            "parallel_write",
        ),
        "",
    )

    save_interval: NonNegative = Field(
        default=0, description="Local steps between two checkpoints; 0: only when the run is asked to stop."
    )
    keep_last: Positive = Field(default=2, description="Complete checkpoints kept; older ones are removed.")
    async_save: bool = Field(
        default=False, description="Whether training continues while a copy of the state is being written."
    )
    load: str = Field(
        default="auto",
        min_length=1,
        description='"auto": continue from the newest sound checkpoint in training.output_dir; "none": start '
        "anew; or a step folder.",
    )
    fewer_replicas: Literal["drop", "fold"] = Field(
        default="drop",
        description="Resumed with fewer replicas: forget the others, or fold them into the mean of those kept.",
    )


class EvaluationConfig(Block):
    """The loss on the validation split."""

    interval: NonNegative = Field(
        default=0, description="Local steps between two evaluations; 0: at the end only."
    )
    iters: NonNegative = Field(
        default=10,
        description="Microbatches per evaluation and dataset (virtual stages: rounded up to a multiple of the "
        "stages); 0 switches evaluation off.",
    )
    full: bool = Field(
        default=False, description="Whether an evaluation takes all of the validation split, not iters."
    )
    mean_model: bool = Field(
        default=True,
        description="Whether the mean of the replicas is evaluated too; needs their weights exchanged.",
    )


class TensorBoardConfig(Block):
    """TensorBoard. Replaces DeepSpeed's block of the same name, which would write for global rank 0 only."""

    NOT_HERE: ClassVar[dict[str, str]] = dict.fromkeys(
        ("output_path", "job_name"),
        "events are written to training.output_dir/replica_XX",
    )

    enabled: bool = Field(
        default=True,
        description="Whether scalars are also written for TensorBoard, in a folder per replica under "
        "training.output_dir.",
    )


class WandbConfig(Block):
    """Weights & Biases. Replaces DeepSpeed's block of the same name."""

    enabled: bool = Field(
        default=False,
        description="Whether every replica also has a run in Weights & Biases; needs the package wandb.",
    )
    project: str = Field(default="megatron_noloco", min_length=1, description="Of these runs.")
    group: str | None = Field(
        default=None, description="Of these runs; null: the name of the folder training.output_dir."
    )
    team: str | None = Field(
        default=None, description="Whose runs they are (wandb's entity); null: your own."
    )
