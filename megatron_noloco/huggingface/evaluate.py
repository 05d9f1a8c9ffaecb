"""`python -m megatron_noloco evaluate`: loss and perplexity by the trainer's own forward pass.

What is measured of a checkpoint are slow weights, as an export ships them; right after a round the fast weights
are the same.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.config import RunConfig
from megatron_noloco.data.dataset import SampleDataset
from megatron_noloco.data.datasets import validation_datasets, whole_dataset
from megatron_noloco.data.fast_tokenizer import FastTokenizer
from megatron_noloco.data.microbatches import VALIDATION_SEED
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.huggingface import llama as huggingface
from megatron_noloco.huggingface.export import open_source
from megatron_noloco.huggingface.folder import HuggingFaceWeights
from megatron_noloco.huggingface.forward import WholeModel
from megatron_noloco.plans.samples import SampleOrder

_BATCH_TOKENS = 1 << 12
_LONGEST = 2048  # tokens in a sample of a Hugging Face model, whose longest context may be out of reach

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Model:
    """Weights to be measured: one set or, of a checkpoint, one per replica and their mean."""

    config: RunConfig
    tokenizer: Tokenizer
    vocab_size: int
    names: list[str]
    open: Callable[[], AbstractContextManager[list[Read]]]  # how to read each set


@dataclass(frozen=True)
class Figures:
    """Of one set of weights on one dataset."""

    model: str
    dataset: str
    loss: float  # mean, nats per token
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def evaluate(model: Model, data: str | None, samples: int | None) -> Iterator[Figures]:
    """Measure every set of weights on every dataset; raises ValueError when there is nothing to measure on."""
    datasets = list(_datasets(model, data))
    whole = WholeModel(model.config, model.vocab_size)
    with model.open() as sets:
        for name, read in zip(model.names, sets, strict=True):
            whole.load(read)
            for dataset in datasets:
                chosen = len(dataset) if samples is None else min(samples, len(dataset))
                loss = _mean_loss(whole, dataset, SampleOrder(len(dataset), VALIDATION_SEED).ids(0, chosen))
                yield Figures(name, dataset.name, loss, chosen * dataset.seq_length)


def _mean_loss(whole: WholeModel, dataset: SampleDataset, ids: np.ndarray) -> float:
    batch = max(1, _BATCH_TOKENS // dataset.seq_length)
    total = 0.0
    for start in range(0, len(ids), batch):
        samples = torch.from_numpy(
            np.stack([dataset[index] for index in ids[start : start + batch].tolist()])
        )
        losses = whole.losses(samples[:, :-1].contiguous(), samples[:, 1:].contiguous())
        total += float(losses.double().sum())
    return total / (len(ids) * dataset.seq_length)


def _datasets(model: Model, data: str | None) -> list[SampleDataset]:
    config, seq_length = model.config, model.config.model.seq_length
    if data is not None:
        return [whole_dataset(data, model.tokenizer, model.vocab_size, seq_length)]
    return list(validation_datasets(config.source, model.tokenizer, model.vocab_size, seq_length))


def open_model(path: Path, data: str | None, seq_length: int | None) -> Model:
    """A checkpoint's step folder or a run's output_dir, or a Hugging Face folder; raises ValueError."""
    is_run = (path / "checkpoints").is_dir()  # which may keep a config.json of its own
    if (path / "config.json").is_file() and not is_run:
        if data is None:
            raise ValueError(f"{path}: a Hugging Face folder has no validation split; give --data")
        return _open_hugging_face(path, data, seq_length)
    source = open_source(path, "mean")
    raw = source.config.to_dict()
    raw["model"]["seq_length"] = seq_length or raw["model"]["seq_length"]
    names = [f"replica {replica}" for replica in source.replicas]
    sets = [[replica] for replica in source.replicas]
    if len(names) > 1:
        names.append("mean model")
        sets.append(source.replicas)

    @contextmanager
    def open_sets() -> Iterator[list[Read]]:
        with CheckpointReader(source.folder, source.manifests) as reader:
            yield [partial(reader.read, replicas=replicas) for replicas in sets]

    return Model(RunConfig.from_dict(raw), source.tokenizer, source.vocab_size, names, open_sets)


def _open_hugging_face(folder: Path, data: str, seq_length: int | None) -> Model:
    block = huggingface.model_block(folder)
    config = RunConfig.from_dict(
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW"},
            "model": {
                **block,
                "seq_length": seq_length or min(block["seq_length"], _LONGEST),
                "make_vocab_size_divisible_by": 1,
            },
            "data": {"text": data},
            "training": {"train_iters": 1},
            "noloco": {"enabled": False},
        }
    )
    tokenizer = FastTokenizer(folder)

    @contextmanager
    def open_sets() -> Iterator[list[Read]]:
        with HuggingFaceWeights(folder) as theirs:
            yield [
                partial(
                    huggingface.from_hf,
                    read=theirs,
                    model=config.model,
                    padded_vocab_size=config.architecture().padded_vocab_size,
                )
            ]

    return Model(config, tokenizer, block["vocab_size"], [str(folder)], open_sets)
