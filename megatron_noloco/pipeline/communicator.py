"""Routes microbatches between the replicas under Megatron-core's pipeline schedules, which run unchanged.

Core's schedules ask a `P2PCommunicator` to send to "next" and receive from "previous"; ours decides which
ranks these are. It cannot deadlock: all replicas of a stage run the same schedule, so each performs the same
sequence of operations, and at every boundary and microbatch the routes are a permutation. So, if
the replicas of every stage are relabelled along the route of one microbatch, the routed run is that of replicas
without routes: each send of an unrouted pipeline is at the same point of the sender's program, and its receive at
the same point of the receiver's. Between two ranks, messages of one direction match in the order of posting;
activations and gradients travel in two groups, so that with two stages, where next and previous are the same
stage, the directions cannot be mistaken for each other.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_noloco.job.activity import now
from megatron_noloco.pipeline.groups import Groups, ProcessGroup
from megatron_noloco.pipeline.stream_clock import StreamClock
from megatron_noloco.plans.routing import Routes
from megatron_noloco.plans.topology import Position


class Hop(NamedTuple):
    """A message of the pipeline: the rank at its other end, and its microbatch."""

    rank: int
    microbatch: int


class RoutedCommunicator(P2PCommunicator):
    """Chooses for each microbatch with which replica's neighbouring stage this stage exchanges tensors.

    Activations and their gradients have shape [seq_length (/ tp with sequence parallelism), micro_batch_size,
    hidden_size] and the pipeline's dtype. Overrides only `_communicate` of Megatron-core's communicator;
    the pipeline group stays that of the replica, so that the schedules' warm-up counts do not change.

    Attributes:
        waits: seconds spent waiting for activations and gradients.
        bytes_to_others: bytes sent to other replicas since `begin`.
    """

    def __init__(self, groups: Groups, config: TransformerConfig) -> None:
        super().__init__(groups.pp, config)
        self.groups = groups
        self.vpp = groups.topology.vpp
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.waits = StreamClock(self.device)
        self.bytes_to_others = 0
        self._awaited: list[str] = []  # descriptions of the messages under way

    def begin(self, routes: Routes, microbatches: int) -> None:
        """Prepare the hops of the next pass of the schedule over `microbatches`."""
        self.bytes_to_others = 0
        me, stages = self.groups.position, self.groups.topology.pp
        last_boundary = stages * self.vpp - 1

        def rank(replica: int, stage: int) -> int:
            return self.groups.topology.rank(Position(replica, stage % stages, me.dp, me.tp))

        def receivers(order: list[tuple[int, int]]) -> Iterator[Hop]:
            for microbatch, chunk in order:
                boundary = chunk * stages + me.stage
                if boundary < last_boundary:
                    replica = routes.next_replica(boundary, me.replica, microbatch)
                    yield Hop(rank(replica, me.stage + 1), microbatch)

        def senders(order: list[tuple[int, int]]) -> Iterator[Hop]:
            for microbatch, chunk in order:
                boundary = chunk * stages + me.stage - 1
                if boundary >= 0:
                    replica = routes.previous_replica(boundary, me.replica, microbatch)
                    yield Hop(rank(replica, me.stage - 1), microbatch)

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
        """Carry out one combined send and receive of the schedule; post all operations before waiting for any.

        The two messages of `send_forward_recv_backward` have different microbatches, hence different replicas.
        """
        assert wait_on_reqs, "overlapped p2p is off: core frees outputs that would still be under way"
        received_prev = self._empty(tensor_shape) if recv_prev else None
        received_next = self._empty(tensor_shape) if recv_next else None
        forward, backward = self.groups.forward_hops, self.groups.backward_hops
        requests: list[Any] = []
        self._awaited = []
        requests += self._post(tensor_send_next, self._send_next, received_prev, self._recv_prev, forward)
        requests += self._post(tensor_send_prev, self._send_prev, received_next, self._recv_next, backward)
        what = f"waiting for {' and '.join(self._awaited)}"
        now.part(what)
        with self.waits.running(what):
            for request in requests:
                request.wait()
        now.part("")
        for received in (received_prev, received_next):
            if received is not None:
                received.requires_grad_()
        return received_prev, received_next, None

    def _post(
        self,
        outgoing: Tensor | None,
        receivers: Iterator[Hop],
        incoming: Tensor | None,
        senders: Iterator[Hop],
        group: ProcessGroup,
    ) -> list[Any]:
        operations = []
        what = "activations" if group is self.groups.forward_hops else "gradients"
        if outgoing is not None:
            receiver, microbatch = next(receivers)
            self._awaited.append(f"{self._described(receiver)} to take the {what} of microbatch {microbatch}")
            if self.groups.topology.position(receiver).replica != self.groups.position.replica:
                self.bytes_to_others += outgoing.nbytes
            # detach: gloo must not see a tensor that autograd may free or version-check
            operations.append(dist.P2POp(dist.isend, outgoing.detach().contiguous(), receiver, group))
        if incoming is not None:
            sender, microbatch = next(senders)
            self._awaited.append(f"the {what} of microbatch {microbatch} from {self._described(sender)}")
            operations.append(dist.P2POp(dist.irecv, incoming, sender, group))
        return dist.batch_isend_irecv(operations) if operations else []

    def _described(self, rank: int) -> str:
        at = self.groups.topology.position(rank)
        return f"rank {rank} (replica {at.replica}, stage {at.stage})"

    def _empty(self, shape: Any) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.config.pipeline_dtype, device=self.device)


def schedule_order(microbatches: int, vpp: int, stages: int) -> list[tuple[int, int]]:
    """Return the (microbatch, model chunk) pairs in the order in which a stage computes their forward passes."""
    if vpp == 1:
        return [(microbatch, 0) for microbatch in range(microbatches)]
    return get_schedule_table(microbatches, vpp, stages)
