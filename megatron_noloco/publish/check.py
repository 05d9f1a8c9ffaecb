"""The check of an export: its logits under transformers against the trainer's own forward pass."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.config import RunConfig
from megatron_noloco.model import quieten
from megatron_noloco.publish.export import DTYPES, UNFINISHED, Source
from megatron_noloco.training.checkpoint.reader import CheckpointReader

TOLERANCE = 1e-4  # largest difference of a logit, both models in fp32


def check_export(source: Source, output: Path) -> float:
    """The largest difference between the two models' logits on the same tokens, both in fp32.

    Takes away the mark of an unfinished export when it is below the tolerance. The trainer's model is
    assembled from the checkpoint's own tensors, not from the exported ones, rounded as the export rounds them.
    """
    tokens = torch.randint(
        source.vocab_size,
        (2, min(64, source.config.model.seq_length)),
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


@torch.no_grad()
def _logits_here(source: Source, output: Path, tokens: Tensor) -> Tensor:
    """Megatron-core's forward pass, as one rank, in fp32, on the CPU."""
    quieten()
    from megatron_noloco.model import cpu, weights
    from megatron_noloco.model.groups import build_groups
    from megatron_noloco.model.stage import build_stage
    from megatron_noloco.plans.topology import Topology
    from megatron_noloco.transport.world import join, read_world

    rounding = DTYPES[_dtype(output)]
    if not dist.is_initialized():
        join(read_world({}), "gloo")
    cpu.prepare()
    groups = build_groups(Topology(), routed=False)
    config = _as_one_rank(source.config)
    stage = build_stage(config, groups, source.vocab_size)
    with CheckpointReader(source.folder, source.manifests) as reader:

        def read(name: str) -> Tensor:
            return reader.read(name, source.replicas).to(rounding)

        tied = not config.model.untie_embeddings_and_output_weights
        weights.load(stage.chunks[0], groups, 0, tied, read)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    logits = stage.to(device).eval().chunks[0](tokens.to(device), None, None)
    return logits[..., : source.vocab_size].float().cpu()


def _dtype(output: Path) -> str:
    return str(json.loads((output / "config.json").read_text())["dtype"])


def _as_one_rank(config: RunConfig) -> RunConfig:
    raw = config.to_dict()
    raw["parallel"] = {"replicas": 1}
    raw["training"] = {**raw["training"], "pretrained": None}
    raw["bf16"] = raw["fp16"] = {"enabled": False}
    raw["train_batch_size"] = "auto"
    return RunConfig.from_dict(raw)
