"""`python -m megatron_noloco evaluate`: losses by the trainer's own forward pass.

Evaluates a checkpoint's slow weights, those that `export` writes.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_noloco.data.auto_tokenizer import build_tokenizer
from megatron_noloco.data.blend import Blend, SampleDataset
from megatron_noloco.data.microbatches import ValidationSource
from megatron_noloco.data.opening import open_validation, open_whole
from megatron_noloco.data.samples import IGNORED
from megatron_noloco.data.sources import Needs
from megatron_noloco.data.tokenizer import Tokenizer, TokenizerChoice
from megatron_noloco.errors import UserError
from megatron_noloco.huggingface.source import hugging_face, open_source
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.huggingface.whole_model import WholeModel
from megatron_noloco.model.architecture import Architecture

_BATCH_TOKENS = 1 << 12
_MAX_SEQ_LENGTH = 2048  # default for a Hugging Face model, whose context may be too long for the memory

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Result:
    """The loss of one set of weights on one dataset, or the mean over a blend in its proportions."""

    model: str
    dataset: str
    loss: float  # mean, nats per token
    tokens: int  # number of tokens in the mean
    bytes_per_token: float  # of their text

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """The loss of a byte of text, which compares models with other tokenizers; NaN where there is no text."""
        return self.loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else math.nan


def evaluate(
    architecture: Architecture,
    data: Blend,
    tokenizer: Tokenizer,
    readers: Mapping[str, Read],
    samples: int | None,
) -> Iterator[Result]:
    """Evaluate every set of weights on `samples` samples of every dataset, or on all if None.

    Of a blend its mean follows its datasets.

    Args:
        readers: of each set (a replica, their mean), by its name.
    """
    model, shares = WholeModel(architecture), np.array(data.weights)
    for name, read in readers.items():
        model.load(read)
        results = list[Result]()
        for dataset in data.parts:
            chosen = len(dataset) if samples is None else min(samples, len(dataset))
            results.append(Result(name, dataset.name, *_mean_loss(model, dataset, chosen, tokenizer)))
            yield results[-1]
        if len(results) > 1:
            loss, text = shares @ [[one.loss, one.bytes_per_token] for one in results]
            yield Result(name, data.name, float(loss), sum(one.tokens for one in results), float(text))


def _mean_loss(
    model: WholeModel, dataset: SampleDataset, samples: int, tokenizer: Tokenizer
) -> tuple[float, int, float]:
    """Return the mean loss, the number of labels in the mean, and the bytes of text of a label."""
    batch = min(samples, max(1, _BATCH_TOKENS // dataset.seq_length))
    source, total, tokens, text = ValidationSource(dataset, batch, None), 0.0, 0, 0
    for start in range(0, samples, batch):
        microbatch = source.microbatch(start // batch)
        microbatch.labels[samples - start :] = IGNORED
        counted = microbatch.labels >= 0
        total += float(model.losses(*microbatch).double()[counted].sum())
        tokens += int(counted.sum())
        documents = microbatch.documents
        if documents is None:
            documents = torch.zeros_like(microbatch.labels)
        read = microbatch.tokens.numpy(), microbatch.labels.numpy(), documents.numpy()
        for sample, labels, numbers in zip(*read, strict=True):
            for document in np.split(np.arange(len(labels)), np.flatnonzero(np.diff(numbers)) + 1):
                learnt = document[labels[document] >= 0]
                text += tokenizer.bytes_of(labels[learnt], sample[learnt[0]]) if len(learnt) else 0
    return total / tokens, tokens, text / tokens


def open_weights(
    paths: Sequence[Path], data: str | None, seq_length: int | None, tokenizer_place: Path | None = None
) -> tuple[Architecture, Blend, Tokenizer, Mapping[str, Read]]:
    """Return what `evaluate` takes of a Hugging Face folder or of a checkpoint.

    Args:
        paths: one Hugging Face folder, or the paths of a checkpoint (see `find_ensemble`).
        data: a text or records, a file or folder, or a dataset's prefix; None: the run's own validation split.
        seq_length: tokens in a sample; None: the model's.
        tokenizer_place: see `open_source`.

    Where samples are longer than the model's context, or files of text are left out, a line on stderr says so.

    Raises UserError when the model, or the data to evaluate it on, is missing.
    """
    if (folder := hugging_face(paths, tokenizer_place)) is not None:
        path = folder.path
        if data is None:
            raise UserError(f"{path}: a Hugging Face folder has no validation split; give --data")
        trained, source = folder.architecture, None
        readers: dict[str, Read] = {str(path): PretrainedWeights(path, trained)}
        tokenizer = folder.tokenizer(None) or build_tokenizer(TokenizerChoice(str(path)))
        length = min(trained.seq_length, _MAX_SEQ_LENGTH)
    else:
        source = open_source(paths, "mean", tokenizer_place)
        trained, tokenizer = source.architecture, source.tokenizer
        sets = {f"replica {replica}": [replica] for replica in source.replicas}
        if len(sets) > 1 and source.saved.weights_are_equal:
            sets = {f"each of {len(sets)} replicas (equal weights)": source.replicas[:1]}
        elif len(sets) > 1:
            sets["mean model"] = source.replicas
        read = source.reader().read
        readers = {name: partial(read, replicas=replicas) for name, replicas in sets.items()}
        length = trained.seq_length
    architecture = replace(trained, seq_length=seq_length or length)
    needs = Needs(architecture.vocab_size, architecture.seq_length)
    if data is not None:
        cache = source.config.data.cache if source else None
        samples, notes = open_whole(data, tokenizer, needs, cache)
        read_data = Blend([samples])
        if notes:
            sys.stderr.write(f"--data {data}: {notes}\n")
    else:
        assert source is not None
        counters, block = source.saved.manifests[0].counters, source.config.data
        flags = {name: getattr(block, name) for name in ("reset_attention_mask", "eod_mask_loss")}
        needs = replace(needs, end_of_document=tokenizer.end_of_document, **flags)
        read_data = open_validation(block.source, tokenizer, needs, counters, trained.seq_length)
    if architecture.seq_length > trained.seq_length:
        sys.stderr.write(
            f"--seq-length {architecture.seq_length}: the model's context is {trained.seq_length} tokens; it was "
            "not trained to read longer samples\n"
        )
    return architecture, read_data, tokenizer, readers
