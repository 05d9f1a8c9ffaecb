"""The trainer's own forward pass of a whole model: one rank, fp32, no transformers."""

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.config import RunConfig
from megatron_noloco.job.join import join
from megatron_noloco.job.launcher import read_world
from megatron_noloco.plans.topology import Topology
from megatron_noloco.quiet import quieten


class WholeModel:
    """All stages and shards of a replica in this process, on the accelerator if there is one."""

    def __init__(self, config: RunConfig, vocab_size: int) -> None:
        quieten()
        from megatron_noloco.model.stage import Llama, build_stage
        from megatron_noloco.pipeline import cpu
        from megatron_noloco.pipeline.groups import build_groups

        if not dist.is_initialized():
            join(read_world({}), "gloo")
        cpu.prepare()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tied = config.architecture(vocab_size).tied_embeddings
        self._groups = build_groups(Topology(), routed=False)
        stage = build_stage(_as_one_rank(config), self._groups, vocab_size)
        self._chunk = cast(Llama, stage.to(self.device).eval().chunks[0])

    def load(self, read: Callable[[str], Tensor]) -> None:
        """Take the weights that `read` gives by their names in the unsplit model."""
        from megatron_noloco.model import weights

        weights.load(self._chunk, self._groups, 0, self._tied, read)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Of int64 tokens [batch, tokens]: [batch, tokens, padded vocabulary], on the host."""
        return self._chunk(tokens.to(self.device), None, None).float().cpu()

    @torch.no_grad()
    def losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss of each label, nats, shape [batch, tokens], on the host."""
        labels = labels.to(self.device)
        return self._chunk(tokens.to(self.device), None, None, labels=labels).float().cpu()


def _as_one_rank(config: RunConfig) -> RunConfig:
    raw = config.to_dict()
    raw["parallel"] = {"replicas": 1}
    raw["training"] = {**raw["training"], "pretrained": None}
    raw["bf16"] = raw["fp16"] = {"enabled": False}
    raw["train_batch_size"] = "auto"
    return RunConfig.from_dict(raw)
