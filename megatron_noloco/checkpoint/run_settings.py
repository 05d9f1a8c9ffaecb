"""The checkpoint settings of a run, and which settings of a run may change when it is resumed."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_noloco.errors import UserError

TOKENS, TEMPLATE = "digest", "template_digest"  # of a tokenizer, by which another one is told
_TOKENIZER = "data.tokenizer_model"
# Settings that say where data lie or how text is read, which may change if the tokens stay the same.
_SAME_DATA = (
    "data.text",
    "data.data_path",
    "data.train_data_path",
    "data.valid_data_path",
    "data.sft_data_path",
    "data.split_special_tokens",
    "data.prepend_bos",
)
_BY_FILE = "training_data_3"  # counter of runs of 0.4 whose files of text were each in one split
_SPLIT = "data.split"
# Settings (dotted names, or blocks) that must not change: other weights would be loaded, or samples repeated.
_FIXED = ("model", "data", "training.seed", "optimizer.type", "bf16.enabled", "fp16", "data_types")
# Exceptions, which another layout may need: padding of the vocabulary, and memory for activations.
_EXCEPTED = (
    "model.make_vocab_size_divisible_by",
    "model.recompute_granularity",
    "model.recompute_method",
    "model.recompute_num_layers",
    "model.recompute_modules",
    "data.cache",
)
# Settings whose changes are allowed and not reported.
_NOT_REPORTED = (
    "training",
    "checkpoint",
    "evaluation",
    "tensorboard",
    "wandb",
    "data.cache",
    "parallel.replicas",
    "noloco.deadline_seconds",
    "noloco.transport",
)


@dataclass(frozen=True)
class CheckpointSettings:
    """The checkpoint settings of a run.

    Attributes:
        folder: the folder of the step folders.
        run: the JSON of the run, which each manifest contains.
        meant: returns the JSON of a run, perhaps one of another version, as this version writes it, with the
            values that null stands for.
        keep_last: number of complete checkpoints that are kept.
        async_save: whether training continues while a copy of the state is being written.
        load: "auto" (the newest intact checkpoint in `folder`), "none", or a step folder.
        training_data: checksums of the training data by the counter of a checkpoint that has them, newest first;
            then that of the validation data.
        tokenizer: the digests of the run's tokenizer (TOKENS) and of its chat template (TEMPLATE); empty: unknown.
        first_weights: a digest of the pretrained weights with which the run began; None: not known, or random.
    """

    folder: Path
    run: dict[str, Any]
    meant: Callable[[dict[str, Any]], dict[str, Any]]
    keep_last: int
    async_save: bool
    load: str
    training_data: Mapping[str, int] = field(default_factory=dict)
    tokenizer: dict[str, str] = field(default_factory=dict)
    first_weights: str | None = None

    @property
    def seed(self) -> int:
        return int(self.run["training"]["seed"])

    def changes(
        self,
        saved: dict[str, Any],
        counters: Mapping[str, float] | None = None,
        own: bool = True,
        tokenizer: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Return a line for each setting that differs from the JSON `saved` of a run.

        Raises UserError, a line per setting, for settings that a resume must not change.

        Args:
            counters: those of the checkpoint.
            own: whether it is a checkpoint of this run.
            tokenizer: the digests of the checkpoint's.
        """
        refused, allowed = [], []
        tokenizer = tokenizer or {}
        told = TOKENS in tokenizer and TOKENS in self.tokenizer
        if told and tokenizer[TOKENS] != self.tokenizer[TOKENS]:
            place = self.run["data"]["tokenizer_model"]
            refused.append(
                f"{_TOKENIZER}: {place} reads texts as other tokens than the checkpoint's tokenizer"
            )
        elif told and tokenizer[TEMPLATE] != self.tokenizer[TEMPLATE]:
            allowed.append(f"{_TOKENIZER}: another chat template than the checkpoint's")
        counters = counters or {}
        if self.training_data and _BY_FILE in counters:
            refused.append(
                "data.text: the checkpoint's run divided its files otherwise into training and validation, and "
                "would be validated on what it has trained on"
            )
        same = same_data(self.training_data, counters)
        differences = list(_differences(self.meant(saved), self.meant(self.run)))
        # Another split makes other contents of the same files.
        comparable = all(name != _SPLIT for name, *_ in differences)
        for name, before, after in differences:
            line = f"{name}: {json.dumps(before)} in the checkpoint, {json.dumps(after)} now"
            if name == _TOKENIZER and told and None not in (before, after):
                allowed.append(line)  # the same tokens, or refused above
            elif name in _SAME_DATA and None not in (before, after, same):
                if same or not comparable:
                    allowed.append(line)
                else:
                    refused.append(f"{line}, with other contents")
            elif _is_in(name, _FIXED) and name not in _EXCEPTED:
                refused.append(line)
            elif not _is_in(name, _NOT_REPORTED):
                allowed.append(line)
        if refused:
            remedy = "a resume cannot change it: change it back, or start anew in another training.output_dir"
            if not own:
                remedy = (
                    "a run that continues this step cannot change it: take that of the checkpoint, or leave "
                    "checkpoint.load out"
                )
            raise UserError("\n".join(f"{line}; {remedy}" for line in refused))
        return allowed


def tokenizer_folder(job_folder: Path) -> Path:
    """Return where a run, or a job of a federation, keeps a copy of its tokenizer."""
    return job_folder / "tokenizer"


def same_data(training_data: Mapping[str, int], counters: Mapping[str, float]) -> bool | None:
    """Return whether the training data of these checksums are those of a checkpoint; None: it does not say."""
    return next((counters[name] == value for name, value in training_data.items() if name in counters), None)


def _is_in(name: str, names: tuple[str, ...]) -> bool:
    return any(name == other or name.startswith(other + ".") for other in names)


def _differences(before: Any, after: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name and both values of every setting that differs."""
    if isinstance(before, dict) or isinstance(after, dict):
        before, after = _settings_of(before), _settings_of(after)
        for key in sorted({*before, *after}):
            inner = f"{name}.{key}" if name else key
            yield from _differences(before.get(key), after.get(key), inner)
    elif before != after:
        yield name, before, after


def _settings_of(block: Any) -> dict[str, Any]:
    """Return the settings of a block, none if it is missing or, as DeepSpeed's blocks can be, not enabled."""
    return block if isinstance(block, dict) and block.get("enabled") is not False else {}
