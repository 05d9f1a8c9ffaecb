"""Runs one batch through this rank's stage by Megatron-core's schedules."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_noloco.job.activity import now
from megatron_noloco.monitor.metrics import Record, unrecorded
from megatron_noloco.pipeline.communicator import RoutedCommunicator
from megatron_noloco.pipeline.core_versions import balancing_losses
from megatron_noloco.pipeline.groups import Groups
from megatron_noloco.plans.routing import Routes

# (replica, microbatch) -> tokens, labels, and the number of each token's document, or None where attention
# crosses documents; int64 [micro_batch_size, seq_length]. A label < 0 has no loss.
ReadMicrobatch = Callable[[int, int], tuple[Tensor, Tensor, Tensor | None]]


class MicrobatchLoss(NamedTuple):
    """The mean loss of one microbatch."""

    origin: int  # the replica whose data the microbatch is
    loss: Tensor  # scalar, nats per token that has a loss; 0 if no token has one
    tokens: Tensor  # scalar, number of tokens that have a loss


class Stage(Protocol):
    """The attributes of a stage that the pipeline uses."""

    chunks: nn.ModuleList  # more than one when the schedule is interleaved
    config: TransformerConfig
    separate_documents: (
        bool  # whether attention stays inside documents, so that every chunk reads their borders
    )


class Pipeline:
    """Runs one batch through this rank's stage: forward and backward, or forward only.

    Attributes:
        between_microbatches: called before each forward pass of a microbatch; by default it does nothing. Returns
            whether it has more to do.
    """

    def __init__(
        self,
        stage: Stage,
        groups: Groups,
        micro_batch_size: int,
        seq_length: int,
        record: Record = unrecorded,
    ) -> None:
        self.stage = stage
        self.record = record
        self.groups = groups
        self.communicator = RoutedCommunicator(groups, stage.config)
        self.micro_batch_size = micro_batch_size
        self.seq_length = seq_length
        self.between_microbatches: Callable[[], bool] = lambda: False
        virtual = self.communicator.vpp
        self._schedule = get_forward_backward_func(groups.topology.pp, virtual if virtual > 1 else None)

    def run(
        self,
        read: ReadMicrobatch,
        routes: Routes,
        microbatches: int,
        forward_only: bool = False,
        after_backward: Callable[[], None] = lambda: None,
    ) -> list[MicrobatchLoss]:
        """Pass `microbatches` through the pipeline; gradients add up in the parameters' `.grad`.

        Differentiates the mean over the microbatches of the mean over each one's tokens. Every chunk reads what it
        needs of the origin that the routes give: the first the tokens, the last the labels, and all of them the
        borders of documents, if attention stays inside these. Returns the losses on the last stage, an empty
        list elsewhere.

        Args:
            after_backward: called after the backward pass of each microbatch but the last, if there is one stage.
        """
        groups, device = self.groups, self.communicator.device
        at, stages = groups.position, groups.topology.pp

        def on_device(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        def forward_step(order: Iterator[int], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            self.between_microbatches()
            microbatch = next(order)
            if microbatch and stages == 1:
                after_backward()
            now.part(f"microbatch {microbatch}, forward")
            origin = routes.origin((chunk.vp_stage or 0) * stages + at.stage, at.replica, microbatch)
            tokens = labels = documents = None
            if chunk.pre_process or chunk.post_process or self.stage.separate_documents:
                tokens, labels, documents = read(origin, microbatch)
            tokens = on_device(tokens if chunk.pre_process else None)
            labels = on_device(labels if chunk.post_process else None)
            output = chunk(tokens, None, on_device(documents), labels=labels)

            def mean_loss(token_losses: Tensor) -> tuple[Tensor, MicrobatchLoss]:
                assert labels is not None, "only the last chunk has losses"
                counted = labels >= 0
                tokens_with_loss = counted.sum()
                loss = (token_losses.float() * counted).sum() / tokens_with_loss.clamp(min=1)
                return loss, MicrobatchLoss(origin, loss.detach().clone(), tokens_with_loss)

            return output, mean_loss

        self.communicator.begin(routes, microbatches)
        chunks = list(self.stage.chunks)
        # Every chunk computes the microbatches in ascending order.
        losses: list[MicrobatchLoss] = self._schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(range(microbatches)) for _ in chunks],
            model=chunks,
            num_microbatches=microbatches,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self.communicator,
            pg_collection=groups.collection,
        )
        waited = self.communicator.waits.take()
        if not forward_only:
            self.record("routing/wait_seconds", waited)
            self._record(losses, microbatches)
        return losses

    def _record(self, losses: list[MicrobatchLoss], microbatches: int) -> None:
        """Record bytes and losses of the pass; tensor-parallel ranks have equal losses, so one records."""
        self.record("total/routed_bytes", self.communicator.bytes_to_others)
        balance = take_load_balancing_loss()
        if balance is not None:
            shares = self.stage.config.num_layers * microbatches * self.groups.topology.dp
            self.record("train/load_balancing_loss", balance / shares)
        at = self.groups.position
        for origin, loss, _ in losses if at.tp == 0 else []:
            self.record("train/loss", loss)
            self.record(f"origin/loss of {origin}", loss)
            self.record(f"origin/microbatches of {origin}", 1)
            self.record("routing/share", int(origin != at.replica))


def take_load_balancing_loss() -> Tensor | None:
    """Return the load-balancing loss since the last call, without its coefficient; None without one.

    The sum over this rank's layers and microbatches, each of which adds 1 where all experts have equal shares
    (Fedus et al. 2021, arXiv 2101.03961, equation 4, over all choices of a token). Where tensor-parallel ranks
    share the tokens, this rank's part. Core's routers keep the loss for core's log, which would all-reduce it.
    """
    kept = balancing_losses()
    if not kept:
        return None
    summed = torch.stack(kept).sum()
    for losses in kept:
        losses.zero_()
    return summed
