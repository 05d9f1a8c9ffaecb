"""The line of the banner that says what the data of a run hold."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from megatron_noloco.data.blend import Blend
from megatron_noloco.data.cache import Made
from megatron_noloco.data.indexed import IndexedDataset
from megatron_noloco.data.record_samples import RecordSamples
from megatron_noloco.data.sources import Needs
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.plans.sample_order import slots_of

SPLITS = ("training", "validation")
# Sequences of validation, and of training, that are compared: a multiple, so that equal datasets meet. Each reads
# pages of its own.
_COMPARED = 1 << 10, 1 << 12
_COMPARED_TOKENS = 1 << 7  # of each, at its beginning and at its end: chats with the same tools begin alike


def made_in_words(dataset: IndexedDataset, blends: Sequence[Blend | None]) -> str:
    """Return a line about a dataset that was made of a text or of records."""
    name, made = dataset.name, dataset.made
    assert made is not None
    if dataset.mask is not None:
        return _records_in_words(name, made, [blend for blend in blends if blend is not None])
    size = f"{made.documents:,} documents in {made.files:,} files, {made.bytes / 1e6:.1f} MB"
    tokens = " and ".join(
        f"{blend.parts[0].learnt} {split}" for split, blend in zip(SPLITS, blends, strict=True) if blend
    )
    return f"{name}, {size}, {tokens} tokens{made.notes}"


def _records_in_words(name: str, made: Made, blends: Sequence[Blend]) -> str:
    training = blends[0]
    learnt, tokens = training.parts[0].learnt, training.tokens_per_sample * len(training)
    line = (
        f"{name}, {made.records} records, {len(training)} training samples with {learnt} tokens in answers, "
        f"{100 * learnt / tokens:.3g} % of all tokens"
    )
    samples = [part for blend in blends for part in blend.parts if isinstance(part, RecordSamples)]
    if cut := sum(part.cut for part in samples):
        line += f"; records longer than a sample, cut: {cut}"
    if left_out := sum(part.left_out for part in samples):
        line += f"; records left out, since no answer fits: {left_out}"
    return line + made.notes


def indexed_in_words(
    datasets: Iterable[IndexedDataset], blends: Sequence[Blend | None], tokenizer: Tokenizer, needs: Needs
) -> list[str]:
    """Return lines about datasets that were there.

    Raises UserError for one that lacks the BOS with which the run's documents begin, or the ends that it needs.
    """
    lines = [f"{split}: {_blend_in_words(blend)}" for split, blend in zip(SPLITS, blends, strict=True)]
    bos, fields = tokenizer.beginning_of_document, ("reset_attention_mask", "eod_mask_loss")
    needed = next((field for field in fields if getattr(needs, field)), "")
    for prefix, dataset in {dataset.name: dataset for dataset in datasets}.items():
        if not dataset.ends_with(tokenizer.end_of_document):
            lines.append(
                f"documents of {prefix} have no end-of-document token (preprocess with --append-eod)"
            )
            if needed:
                raise UserError(f"data.{needed}: {lines[-1]}, so they cannot be separated")
        begins = dataset.tokens[0] == bos
        if tokenizer.before_document and not begins:
            raise UserError(
                f"data.prepend_bos: {prefix} does not begin with BOS (token {bos}); preprocess it with "
                "--prepend-bos, or leave data.prepend_bos out"
            )
        if begins and not tokenizer.before_document and bos != tokenizer.end_of_document:
            advice = "set data.prepend_bos if it was made so, and an export adds it, too"
            lines += [f"{prefix} begins with BOS", advice]
    return lines


def _blend_in_words(blend: Blend | None) -> str:
    if blend is None:
        return "none"
    slots = slots_of(blend.weights)
    return ", ".join(
        f"{part.learnt} tokens of {part.name} ({100 * slot / sum(slots):.4g} %)"
        for part, slot in zip(blend.parts, slots, strict=True)
    )


def epochs(training: Blend, needs: Needs) -> Iterator[str]:
    """Yield how often a run of known length reads the training samples of each dataset."""
    if not needs.steps:
        return
    slots, samples = slots_of(training.weights), needs.steps * needs.global_batch
    read = [
        f"{samples * slot / sum(slots) / len(part):.3g} of {part.name}"
        for part, slot in zip(training.parts, slots, strict=True)
    ]
    yield f"epochs in {needs.steps} steps: {', '.join(read)}"


def read_twice(training: Blend, validation: Blend) -> Iterator[str]:
    """Yield how many sequences of validation are also of training, by their lengths, first and last tokens.

    Of large datasets some are compared.
    """
    evaluated = list(_ends_of(validation, _COMPARED[0]))
    trained = set(_ends_of(training, _COMPARED[1]))
    if twice := sum(ends in trained for ends in evaluated):
        yield (
            f"sequences of validation that are also training data: {twice} of {len(evaluated)} compared; the loss "
            "on them says nothing of other text"
        )


def _ends_of(blend: Blend, most: int) -> Iterator[int]:
    """Yield a hash of length, first and last tokens of up to `most` sequences of each dataset, evenly spread."""
    for dataset in (part.dataset for part in blend.parts):
        places = np.unique(np.arange(most) * dataset.sequences // most)
        for begin, length in zip(*dataset.spans(places), strict=True):
            tokens = dataset.tokens[begin : begin + length]
            ends = np.concatenate([tokens[:_COMPARED_TOKENS], tokens[-_COMPARED_TOKENS:]], dtype=np.int32)
            yield hash((length, ends.tobytes()))
