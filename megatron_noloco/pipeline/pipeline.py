"""Megatron-core's pipeline schedules, unchanged, with routes between the replicas.

Core's schedules ask a `P2PCommunicator` to send to "next" and receive from "previous"; ours decides who that
is. Why it cannot deadlock: all replicas of a stage run the same schedule, so each performs the same sequence
of operations, and at every boundary and microbatch the routes are a permutation. Relabelling, for one
microbatch, the replicas of every stage along its route therefore turns the routed run into replicas that each
run alone: wherever an unrouted pipeline has a send, the routed one has the same send at the same point of the
sender's program, matched by a receive at the same point of the receiver's. Between two ranks, messages of one
direction match in the order of posting; activations and gradients travel in two groups, so that with two
stages, where next and previous are the same stage, the directions cannot be taken for each other.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_schedule_table
from torch import Tensor

from megatron_noloco.metrics import MEAN, SUM, TOTAL, Record, unrecorded
from megatron_noloco.model.stage import Stage
from megatron_noloco.pipeline.groups import Groups, ProcessGroup
from megatron_noloco.plans.routing import Routes
from megatron_noloco.plans.topology import Position

# (replica, microbatch) -> tokens and labels, both int64 [micro_batch_size, seq_length]
ReadMicrobatch = Callable[[int, int], tuple[Tensor, Tensor]]


class MicrobatchLoss(NamedTuple):
    """The mean loss per token of one microbatch (a scalar tensor), and the replica whose data it was."""

    origin: int
    loss: Tensor


class RoutedCommunicator(P2PCommunicator):
    """Decides, microbatch by microbatch, with which replica's neighbouring stage this stage talks."""

    def __init__(self, groups: Groups, stage: Stage) -> None:
        super().__init__(groups.pp, stage.config)
        self.groups = groups
        self.vpp = len(stage.chunks)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        )
        # Since `begin`; of activations and gradients, sent and received.
        self.wait_seconds = 0.0
        self.bytes_to_others = 0  # other replicas

    def begin(self, routes: Routes, microbatches: int) -> None:
        """Lay out with whom to exchange, in order, in the next pass of the schedule over `microbatches`."""
        self.wait_seconds, self.bytes_to_others = 0.0, 0
        me, stages = self.groups.position, self.groups.topology.pp
        last_boundary = stages * self.vpp - 1

        def rank(replica: int, stage: int) -> int:
            return self.groups.topology.rank(Position(replica, stage % stages, me.dp, me.tp))

        def receivers(order: list[tuple[int, int]]) -> Iterator[int]:
            for microbatch, chunk in order:
                boundary = chunk * stages + me.stage
                if boundary < last_boundary:
                    yield rank(routes.next_replica(boundary, me.replica, microbatch), me.stage + 1)

        def senders(order: list[tuple[int, int]]) -> Iterator[int]:
            for microbatch, chunk in order:
                boundary = chunk * stages + me.stage - 1
                if boundary >= 0:
                    yield rank(routes.previous_replica(boundary, me.replica, microbatch), me.stage - 1)

        forward = schedule_order(microbatches, self.vpp, stages)
        backward = [(microbatch, self.vpp - 1 - chunk) for microbatch, chunk in forward]
        self._send_next, self._recv_prev = receivers(forward), senders(forward)
        self._send_prev, self._recv_next = senders(backward), receivers(backward)

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Carry out one combined send/receive of the schedule; all operations are posted before any is awaited.

        `send_forward_recv_backward` concerns two microbatches, hence two different replicas.
        """
        assert wait_on_reqs, "overlapped p2p is off: core frees outputs that would still be under way"
        received_prev = self._empty(tensor_shape) if recv_prev else None
        received_next = self._empty(tensor_shape) if recv_next else None
        forward, backward = self.groups.forward_hops, self.groups.backward_hops
        requests: list[Any] = []
        requests += self._post(tensor_send_next, self._send_next, received_prev, self._recv_prev, forward)
        requests += self._post(tensor_send_prev, self._send_prev, received_next, self._recv_next, backward)
        started = time.perf_counter()
        for request in requests:
            request.wait()
        self.wait_seconds += time.perf_counter() - started
        for received in (received_prev, received_next):
            if received is not None:
                received.requires_grad_()
        return received_prev, received_next, None

    def _post(
        self,
        outgoing: Tensor | None,
        receivers: Iterator[int],
        incoming: Tensor | None,
        senders: Iterator[int],
        group: ProcessGroup,
    ) -> list[Any]:
        operations = []
        if outgoing is not None:
            receiver = next(receivers)
            if self.groups.topology.position(receiver).replica != self.groups.position.replica:
                self.bytes_to_others += outgoing.nbytes
            # detach: gloo must not see a tensor that autograd may free or version-check
            operations.append(dist.P2POp(dist.isend, outgoing.detach().contiguous(), receiver, group))
        if incoming is not None:
            operations.append(dist.P2POp(dist.irecv, incoming, next(senders), group))
        return dist.batch_isend_irecv(operations) if operations else []

    def _empty(self, shape: Any) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.config.pipeline_dtype, device=self.device)


def schedule_order(microbatches: int, vpp: int, stages: int) -> list[tuple[int, int]]:
    """The (microbatch, model chunk) pairs in the order in which a stage computes their forward passes."""
    if vpp == 1:
        return [(microbatch, 0) for microbatch in range(microbatches)]
    return get_schedule_table(microbatches, vpp, stages)


class Pipeline:
    """Runs one batch through this rank's stage: forward and backward, or forward only."""

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
        self.communicator = RoutedCommunicator(groups, stage)
        self.micro_batch_size = micro_batch_size
        self.seq_length = seq_length
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
        # Every chunk meets the microbatches in ascending order.
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
            self._record(losses)
        return losses

    def _record(self, losses: list[MicrobatchLoss]) -> None:
        """What this pass cost and showed; all tensor-parallel ranks have the same losses, so one records them."""
        self.record("routing/wait_seconds", self.communicator.wait_seconds, MEAN)
        self.record("total/routed_bytes", self.communicator.bytes_to_others, TOTAL)
        at = self.groups.position
        for origin, loss in losses if at.tp == 0 else []:
            self.record("train/loss", loss, MEAN)
            self.record(f"origin/loss of {origin}", loss, MEAN)
            self.record(f"origin/microbatches of {origin}", 1, SUM)
            self.record("routing/share", int(origin != at.replica), MEAN)
