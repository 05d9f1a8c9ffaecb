"""The checkpoint that an export or an evaluation reads, and which of its replicas form the model."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_noloco.checkpoint.catalog import WEIGHTS
from megatron_noloco.checkpoint.ensemble import Ensemble, find_ensemble
from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.checkpoint.run_settings import TOKENS, tokenizer_folder
from megatron_noloco.config import RunConfig, saved_config
from megatron_noloco.data.auto_tokenizer import find_tokenizer
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError, prefix_errors_with
from megatron_noloco.huggingface.folder import ModelFolder
from megatron_noloco.model.architecture import Architecture


@dataclass(frozen=True)
class ModelSource:
    """A complete checkpoint, and those of its replicas whose mean is the model."""

    saved: Ensemble
    config: RunConfig
    replicas: list[int]
    tokenizer_place: Path | None = None  # where the run's tokenizer is, if the user says so

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer: at a given place, the run's copy, or its own; raises UserError where none is."""
        run_folders = [step.absolute().parents[1] for step in self.saved.folders.values()]
        places = [self.tokenizer_place] if self.tokenizer_place else map(tokenizer_folder, run_folders)
        manifest = self.saved.manifests[0]
        with prefix_errors_with("the run's tokenizer is not found (give --tokenizer FOLDER)"):
            return find_tokenizer(self.config.data.tokenizer, places, manifest.tokenizer.get(TOKENS, ""))

    @property
    def architecture(self) -> Architecture:
        return self.saved.manifests[0].architecture

    def reader(self) -> CheckpointReader:
        return CheckpointReader(self.saved)

    def losses_report(self) -> list[str]:
        """Return lines with the last evaluated losses of the replicas and of their mean model."""
        evaluations = self.saved.losses.values()
        means = {losses["mean_model_loss"] for losses in evaluations if "mean_model_loss" in losses}
        steps = {int(losses["evaluated_step"]) for losses in evaluations}
        return self.saved.losses_in_words + [
            f"mean model: validation loss {mean:.4f} (at step {max(steps)})" for mean in sorted(means)[:1]
        ]


def hugging_face(paths: Sequence[Path], tokenizer: Path | None) -> ModelFolder | None:
    """Return the Hugging Face folder that a model is; None: it is a checkpoint.

    Raises UserError for several folders, and for one with another `tokenizer`.
    """
    first = paths[0]
    is_run = (first / "checkpoints").is_dir()  # which may have a config.json
    if is_run or not (first / "config.json").is_file():
        return None
    if len(paths) > 1:
        raise UserError(f"{first}: a Hugging Face folder is one model; give it alone")
    if tokenizer is not None:
        raise UserError(f"--tokenizer: {first} is a Hugging Face folder, which has its own; leave it out")
    return ModelFolder(first)


def open_source(paths: Sequence[Path], combine: str, tokenizer: Path | None = None) -> ModelSource:
    """Find a checkpoint, verify its weights, and choose replicas.

    Raises UserError when the checkpoint is incomplete or damaged, or has no replica as `combine` requires.

    Args:
        paths: of the checkpoint, see `find_ensemble`.
        tokenizer: the folder of the run's tokenizer; None: the run's copy, or where its config says.
        combine: "mean" of all replicas, the "best" one by validation loss, or "replica=K".
    """
    saved = find_ensemble(paths)
    source = ModelSource(saved, saved_config(saved.manifests[0].config), _choose(saved, combine), tokenizer)
    with ThreadPoolExecutor() as pool:
        # Not the other files, which a resume needs: they may be gone.
        names = [[saved.file(manifest.position, WEIGHTS).name] for manifest in saved.manifests]
        list(pool.map(saved.verify, saved.manifests, names))
    return source


def _choose(saved: Ensemble, combine: str) -> list[int]:
    """Return the replicas whose mean is the model; raises UserError."""
    if combine == "mean":
        return saved.replicas
    if combine == "best":
        losses = {replica: figures["validation_loss"] for replica, figures in saved.losses.items()}
        if not losses:
            raise UserError(f"{saved}: no validation losses recorded; use --combine mean or replica=K")
        return [min(losses, key=losses.__getitem__)]  # NaN is not recorded
    match = re.fullmatch(r"replica=(\d+)", combine)
    if match is None:
        raise UserError(f'--combine: {combine!r} is not known; use "mean", "best" or "replica=K"')
    if int(match[1]) not in saved.replicas:
        replicas = ", ".join(map(str, saved.replicas))
        raise UserError(f"--combine {combine}: the checkpoint has replicas {replicas}")
    return [int(match[1])]
