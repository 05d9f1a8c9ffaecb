"""What the start of a run checks alone, before any process talks to another; `config --check` calls it too."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_noloco.config import RunConfig
from megatron_noloco.config.deepspeed_keys import TORCH_OPTIMIZERS
from megatron_noloco.data.corpus import find_text
from megatron_noloco.data.indexed import IndexedTokens
from megatron_noloco.data.tokenizer import Tokenizer, build_tokenizer
from megatron_noloco.huggingface.pretrained import check_fits
from megatron_noloco.spec.architecture import Architecture
from megatron_noloco.spec.data import Source, TextSource


def check_start(config: RunConfig) -> tuple[Tokenizer, Architecture]:
    """The tokenizer and the model of a run that this machine could start; raises ValueError, one line per problem.

    Changes nothing on disk. Data is looked for, not read: what it holds is checked when it is.
    """
    _check_arithmetic(config)
    _check_optimizer(config.deepspeed["optimizer"])
    _check_writable(Path(config.training.output_dir))
    tokenizer = build_tokenizer(config.tokenizer)
    architecture = config.architecture(tokenizer.vocab_size)
    if config.training.pretrained is not None:
        check_fits(Path(config.training.pretrained), architecture)
    _check_source(config.source)
    return tokenizer, architecture


def _check_arithmetic(config: RunConfig) -> None:
    if config.precision != "fp16" or torch.cuda.is_available():
        return
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        raise ValueError(
            "fp16.enabled: this machine has no GPU, and its CPU no fp16 arithmetic; use bf16 or fp32"
        )


def _check_optimizer(optimizer: Mapping[str, Any]) -> None:
    """What only the optimizer itself knows, such as that SGD's Nesterov needs momentum."""
    name = optimizer["type"]
    if name.lower() == "lion" and not torch.cuda.is_available():
        raise ValueError("optimizer.type: DeepSpeed's Lion needs a GPU; use AdamW")
    if name in TORCH_OPTIMIZERS:
        try:
            getattr(torch.optim, name)([torch.zeros(1)], **optimizer["params"])
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"optimizer.params: torch's {name} does not take them: {error}") from None


def _check_writable(output_dir: Path) -> None:
    """Now, not at the first log line or checkpoint; in the folder itself, or in that which will hold it."""
    folder = output_dir.absolute()
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"training.output_dir: cannot write in {output_dir}: {error.strerror}") from None


def _check_source(source: Source) -> None:
    if isinstance(source, TextSource):
        find_text(source.text)
        return
    for blend in filter(None, (source.train, source.validation)):
        for prefix, _ in blend.parts:
            IndexedTokens(prefix)
