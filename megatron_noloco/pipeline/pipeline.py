"""One batch through this rank's stage, by Megatron-core's schedules."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_noloco.metrics import MEAN, SUM, TOTAL, Record, Reduction, unrecorded
from megatron_noloco.metrics.reduction import mean, total
from megatron_noloco.pipeline.balance import take_balance
from megatron_noloco.pipeline.communicator import RoutedCommunicator
from megatron_noloco.pipeline.groups import Groups
from megatron_noloco.plans.routing import Routes

# (replica, microbatch) -> tokens and labels, both int64 [micro_batch_size, seq_length]
ReadMicrobatch = Callable[[int, int], tuple[Tensor, Tensor]]


class MicrobatchLoss(NamedTuple):
    """The mean loss per token of one microbatch (a scalar tensor), and the replica whose data it was."""

    origin: int
    loss: Tensor


class Stage(Protocol):
    """What the pipeline needs of a stage: its model chunks, more than one when the schedule is interleaved."""

    chunks: nn.ModuleList
    config: TransformerConfig


class Pipeline:
    """Runs one batch through this rank's stage: forward and backward, or forward only.

    Attributes:
        between_microbatches: called before each forward pass of a microbatch; by default it does nothing.
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
        self.between_microbatches: Callable[[], None] = lambda: None
        virtual = self.communicator.vpp
        self._last_chunk = groups.topology.pp * virtual - 1
        self._schedule = get_forward_backward_func(groups.topology.pp, virtual if virtual > 1 else None)

    def run(
        self, read: ReadMicrobatch, routes: Routes, microbatches: int, forward_only: bool = False
    ) -> list[MicrobatchLoss]:
        """Pass `microbatches` through the pipeline; gradients add up in the parameters' `.grad`.

        The loss that is differentiated is the mean over the microbatches. The first stage reads the tokens of
        its own replica; the last reads the labels of the origin that the routes name. Returns the losses on the
        last stage, an empty list elsewhere.
        """
        groups = self.groups
        replica = groups.position.replica

        def forward_step(order: Iterator[int], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            self.between_microbatches()
            microbatch = next(order)
            origin, tokens, labels = replica, None, None
            if chunk.pre_process:
                tokens = read(replica, microbatch)[0].to(self.communicator.device, non_blocking=True)
            if chunk.post_process:
                origin = routes.origin(self._last_chunk, replica, microbatch)
                labels = read(origin, microbatch)[1].to(self.communicator.device, non_blocking=True)
            output = chunk(tokens, None, None, labels=labels)

            def mean_loss(token_losses: Tensor) -> tuple[Tensor, MicrobatchLoss]:
                loss = token_losses.float().mean()
                return loss, MicrobatchLoss(origin, loss.detach().clone())

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
        if not forward_only:
            self._record(losses, microbatches)
        return losses

    def _record(self, losses: list[MicrobatchLoss], microbatches: int) -> None:
        """What this pass cost and showed; all tensor-parallel ranks have the same losses, so one records them."""
        self.record("routing/wait_seconds", self.communicator.wait_seconds, MEAN)
        self.record("total/routed_bytes", self.communicator.bytes_to_others, TOTAL)
        balance = take_balance()
        if balance is not None:
            shares = self.stage.config.num_layers * microbatches * self.groups.topology.dp
            self.record("train/load_balancing_loss", balance / shares, Reduction(mean, total))
        at = self.groups.position
        for origin, loss in losses if at.tp == 0 else []:
            self.record("train/loss", loss, MEAN)
            self.record(f"origin/loss of {origin}", loss, MEAN)
            self.record(f"origin/microbatches of {origin}", 1, SUM)
            self.record("routing/share", int(origin != at.replica), MEAN)
