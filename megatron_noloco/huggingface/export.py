"""`python -m megatron_noloco export`: a checkpoint becomes a Hugging Face folder."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import Manifest
from megatron_noloco.checkpoint.files import verify
from megatron_noloco.checkpoint.inspect import find_step_folder
from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.config import RunConfig
from megatron_noloco.data.tokenizer import Tokenizer, build_tokenizer
from megatron_noloco.huggingface import llama as huggingface
from megatron_noloco.huggingface import safetensors_file
from megatron_noloco.huggingface.card import model_card
from megatron_noloco.huggingface.safetensors_file import Slot
from megatron_noloco.plans.topology import Position

UNFINISHED = "UNFINISHED"  # a file of this name marks a folder whose check failed or was never made
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WRITERS = 2  # files written at a time: the memory of a few tensors each


@dataclass(frozen=True)
class Source:
    """A whole checkpoint, and which of its replicas make up the exported model."""

    folder: Path
    manifests: list[Manifest]
    config: RunConfig
    replicas: list[int]

    @property
    def vocab_size(self) -> int:
        return self.config.model.vocab_size or self.tokenizer.vocab_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError when its files are gone."""
        return build_tokenizer(self.config.tokenizer)

    def losses(self) -> dict[int, dict[str, float]]:
        """What the last evaluation before the checkpoint measured, by replica."""
        topology = self.manifests[0].topology
        counters = {
            replica: self.manifests[topology.rank(Position(replica, topology.pp - 1, 0, 0))].counters
            for replica in range(topology.replicas)
        }
        return {replica: figures for replica, figures in counters.items() if "validation_loss" in figures}


def open_source(path: Path, combine: str) -> Source:
    """Raises ValueError when the checkpoint is not whole, or `combine` asks for what it does not hold."""
    folder = find_step_folder(path)
    manifests = catalog.read_manifests(folder)
    everyone = list(range(manifests[0].topology.replicas))
    source = Source(folder, manifests, RunConfig.from_dict(manifests[0].config), everyone)
    source = replace(source, replicas=_choose(source, combine))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda manifest: _verify_weights(folder, manifest), manifests))
    return source


def _verify_weights(folder: Path, manifest: Manifest) -> None:
    """DeepSpeed's files are not read, and may be gone."""
    weights = {name: record for name, record in manifest.files.items() if name.endswith(".safetensors")}
    verify(catalog.replica_folder(folder, manifest.position.replica), weights)


def _choose(source: Source, combine: str) -> list[int]:
    """The replicas that make up the model; raises ValueError."""
    if combine == "mean":
        return source.replicas
    if combine == "best":
        losses = {replica: figures["validation_loss"] for replica, figures in source.losses().items()}
        if len(losses) < len(source.replicas):
            raise ValueError(
                f"{source.folder}: no validation losses recorded; use --combine mean or replica=K"
            )
        return [min(losses, key=lambda replica: (math.isnan(losses[replica]), losses[replica]))]
    match = re.fullmatch(r"replica=(\d+)", combine)
    if match is None:
        raise ValueError(f'--combine: {combine!r} is not known; use "mean", "best" or "replica=K"')
    if int(match[1]) not in source.replicas:
        raise ValueError(f"--combine {combine}: the checkpoint has replicas 0 to {source.replicas[-1]}")
    return [int(match[1])]


def export(source: Source, output: Path, dtype: str, max_shard_bytes: int) -> None:
    """Write the Hugging Face folder, marked as unfinished; `check.check_export` takes the mark away.

    Peak memory is a few tensors.
    Raises ValueError when `output` exists and is not an unfinished export.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output}: is a file; give another --output")
    if output.exists() and any(output.iterdir()) and not (output / UNFINISHED).exists():
        raise ValueError(f"{output}: exists and is not empty; give another --output, or remove it")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    (output / UNFINISHED).write_text("the logits of this model have not been compared with the trainer's\n")
    model, vocab_size = source.config.model, source.vocab_size
    end = source.tokenizer.end_of_document
    _write_json(output / "config.json", huggingface.hf_config(model, vocab_size, dtype, end))
    _write_json(output / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
    source.tokenizer.save(output, model.seq_length)
    _write_weights(source, output, DTYPES[dtype], max_shard_bytes)
    (output / "README.md").write_text(model_card(source))


def _write_weights(source: Source, output: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """The weight files, and where there are several the index that transformers reads."""
    origins = _slots(source, dtype)
    files = safetensors_file.distribute(list(origins), max_shard_bytes)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {slot.name: name for name, held in zip(names, files, strict=True) for slot in held}
        total = sum(slot.bytes for slot in origins)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(output / "model.safetensors.index.json", index)

    def write(name: str, slots: list[Slot]) -> None:
        with CheckpointReader(source.folder, source.manifests) as reader:
            tensors = _tensors(reader, source, slots, origins)
            safetensors_file.write(output / name, slots, tensors)

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, names, files))


def _slots(source: Source, dtype: torch.dtype) -> dict[Slot, str]:
    """Every Hugging Face tensor there will be, and the one of ours that it is made from."""
    with CheckpointReader(source.folder, source.manifests) as reader:
        unread = {name: torch.empty(reader.shape(name), device="meta") for name in reader.names}
    return {
        Slot(theirs, tuple(tensor.shape), dtype): ours
        for ours, full in unread.items()
        for theirs, tensor in huggingface.to_hf(ours, full, source.config.model, source.vocab_size)
    }


def _tensors(
    reader: CheckpointReader, source: Source, slots: list[Slot], origins: dict[Slot, str]
) -> Iterator[Tensor]:
    for ours, wanted in groupby(slots, key=origins.__getitem__):
        full = reader.read(ours, source.replicas)
        parts = dict(huggingface.to_hf(ours, full, source.config.model, source.vocab_size))
        del full
        for slot in wanted:
            yield parts[slot.name].to(slot.dtype)
        del parts  # before the next is read


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def losses_report(source: Source) -> list[str]:
    """Replicas and their mean model side by side, as last evaluated."""
    losses = source.losses()
    lines = [
        f"replica {replica}: validation loss {f['validation_loss']:.4f}" for replica, f in losses.items()
    ]
    means = {figures["mean_model_loss"] for figures in losses.values() if "mean_model_loss" in figures}
    steps = {int(figures["evaluated_step"]) for figures in losses.values()}
    return [
        *lines,
        *(f"mean model: validation loss {mean:.4f} (at step {max(steps)})" for mean in sorted(means)[:1]),
    ]
