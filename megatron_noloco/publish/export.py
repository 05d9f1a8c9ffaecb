"""`python -m megatron_noloco export`: a checkpoint becomes a Hugging Face folder."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_noloco.config import RunConfig
from megatron_noloco.data.tokenizer import Tokenizer, build_tokenizer
from megatron_noloco.model import huggingface
from megatron_noloco.plans.topology import Position
from megatron_noloco.publish.card import model_card
from megatron_noloco.training.checkpoint import catalog
from megatron_noloco.training.checkpoint.catalog import Manifest
from megatron_noloco.training.checkpoint.files import verify
from megatron_noloco.training.checkpoint.inspect import find_step_folder
from megatron_noloco.training.checkpoint.reader import CheckpointReader

UNFINISHED = "UNFINISHED"  # a file of this name marks a folder whose check failed or was never made
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        return build_tokenizer(self.config.data)

    def losses(self) -> dict[int, dict[str, float]]:
        """What the last evaluation before the checkpoint measured, by replica."""
        topology = self.manifests[0].topology
        counters = {
            replica: self.manifests[topology.rank(Position(replica, topology.stages - 1, 0, 0))].counters
            for replica in range(topology.replicas)
        }
        return {replica: figures for replica, figures in counters.items() if "validation_loss" in figures}


def open_source(path: Path, combine: str) -> Source:
    """Raises ValueError when the checkpoint is not whole, or `combine` asks for what it does not hold."""
    folder = find_step_folder(path)
    manifests = catalog.read_manifests(folder)
    for manifest in manifests:
        verify(catalog.replica_folder(folder, manifest.position.replica), manifest.files)
    config = RunConfig.from_dict(manifests[0].config)
    everyone = list(range(manifests[0].topology.replicas))
    source = Source(folder, manifests, config, everyone)
    if combine == "mean":
        return source
    if combine == "best":
        losses = source.losses()
        if len(losses) < len(everyone):
            raise ValueError(f"{folder}: no validation losses recorded; use --combine mean or replica=K")
        best = min(losses, key=lambda replica: losses[replica]["validation_loss"])
        return Source(folder, manifests, config, [best])
    match = re.fullmatch(r"replica=(\d+)", combine)
    if match is None:
        raise ValueError(f'--combine: {combine!r} is not known; use "mean", "best" or "replica=K"')
    if int(match[1]) not in everyone:
        raise ValueError(f"--combine {combine}: the checkpoint has replicas 0 to {everyone[-1]}")
    return Source(folder, manifests, config, [int(match[1])])


def export(source: Source, output: Path, dtype: str, max_shard_bytes: int) -> None:
    """Write the Hugging Face folder, marked as unfinished; `check.check_export` takes the mark away.

    Peak memory is one file of at most `max_shard_bytes` and a few tensors.
    Raises ValueError when `output` exists and is not an unfinished export.
    """
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
    with CheckpointReader(source.folder, source.manifests) as reader:
        _write_weights(output, _tensors(reader, source, DTYPES[dtype]), max_shard_bytes)
    (output / "README.md").write_text(model_card(source))


def _tensors(reader: CheckpointReader, source: Source, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name in reader.names:
        full = reader.read(name, source.replicas)
        for theirs, tensor in huggingface.to_hf(name, full, source.config.model, source.vocab_size):
            yield theirs, tensor.to(dtype).contiguous()


def _write_weights(output: Path, tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """Files of at most `max_shard_bytes` (or one tensor), and the index that transformers reads."""
    files: list[list[str]] = []
    batch: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(batch, output / f"part-{len(files):05d}", metadata={"format": "pt"})
        files.append(list(batch))
        batch.clear()

    for name, tensor in tensors:
        if batch and size + tensor.nbytes > max_shard_bytes:
            flush()
            size = 0
        batch[name] = tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(files) == 1:
        (output / "part-00000").rename(output / "model.safetensors")
        return
    names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    for number, name in enumerate(names):
        (output / f"part-{number:05d}").rename(output / name)
    weight_map = {tensor: name for name, held in zip(names, files, strict=True) for tensor in held}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(output / "model.safetensors.index.json", index)


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
