"""The check of an export: its logits under transformers against the trainer's own forward pass."""

import json
from pathlib import Path

import torch
from torch import Tensor

from megatron_noloco.huggingface.export import DTYPES, UNFINISHED
from megatron_noloco.huggingface.forward import WholeModel
from megatron_noloco.huggingface.source import Source

TOLERANCE = 1e-4  # largest difference of a logit, both models in fp32


def check_export(source: Source, output: Path) -> float:
    """The largest difference between the two models' logits on the same tokens, both in fp32.

    Takes away the mark of an unfinished export when it is below the tolerance. The trainer's model is
    assembled from the checkpoint's own tensors, not from the exported ones, rounded as the export rounds them.
    """
    architecture = source.architecture
    length = 64 + (architecture.sliding_window or 0)  # tokens outside the window, or it would not show
    tokens = torch.randint(
        architecture.vocab_size,
        (2, min(length, architecture.seq_length)),
        generator=torch.Generator().manual_seed(0),
    )
    difference = float((_logits_there(output, tokens) - _logits_here(source, output, tokens)).abs().max())
    if difference < TOLERANCE:
        (output / UNFINISHED).unlink()
    return difference


@torch.no_grad()
def _logits_there(output: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    return model.eval()(tokens).logits


def _logits_here(source: Source, output: Path, tokens: Tensor) -> Tensor:
    """Megatron-core's forward pass, as one rank, in fp32."""
    rounding = DTYPES[json.loads((output / "config.json").read_text())["dtype"]]
    model, reader = WholeModel(source.architecture), source.reader()
    model.load(lambda name: reader.read(name, source.replicas).to(rounding))
    return model.logits(tokens)[..., : source.architecture.vocab_size]
