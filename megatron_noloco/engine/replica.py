"""Trains one replica: Megatron-core's pipeline runs forward and backward, DeepSpeed the rest of a step."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.engine import state
from megatron_noloco.engine.gradients import PartialGradients
from megatron_noloco.engine.initialize import build_deepspeed
from megatron_noloco.engine.layout import FlatPart, held_of
from megatron_noloco.engine.state import MasterWeights, bit16_groups
from megatron_noloco.job.activity import now
from megatron_noloco.model.parameters import Read
from megatron_noloco.model.stage import Stage
from megatron_noloco.monitor.metrics import Record, unrecorded
from megatron_noloco.pipeline.groups import Groups
from megatron_noloco.pipeline.pipeline import MicrobatchLoss, Pipeline, ReadMicrobatch
from megatron_noloco.pipeline.stream_clock import StreamClock
from megatron_noloco.plans.canonical import Block
from megatron_noloco.plans.routing import Routes

_REDUCING = "reducing gradients and clipping them with the other ranks of the replica"
_POLL_SECONDS = 1e-4


class ReplicaEngine:
    """Trains this rank's stage of one replica, one local step at a time, and records the step's numbers.

    Args:
        ds_config: DeepSpeed's configuration with the three batch numbers filled in; see `deepspeed_settings`.

    Attributes:
        lost_step: whether the last local step was skipped although the loss scale could not be lowered.
    """

    def __init__(
        self, stage: Stage, groups: Groups, ds_config: Mapping[str, Any], record: Record = unrecorded
    ) -> None:
        self.stage = stage
        self.groups = groups
        self.record = record
        self.microbatches = int(ds_config["gradient_accumulation_steps"])
        micro_batch_size = int(ds_config["train_micro_batch_size_per_gpu"])
        self._tied = stage.tied_weight if groups.tied_embedding is not None else None
        if self._tied is not None and not groups.first_stage:
            self._tied.ds_pipe_replicated = True  # type: ignore[attr-defined]  # counts it once in the norm
        self._deepspeed = build_deepspeed(stage, groups, ds_config)
        self._gradients = PartialGradients(stage, groups, self._optimizer, self._tied)
        self.pipeline = Pipeline(stage, groups, micro_batch_size, stage.architecture.seq_length, record)
        self._device = self.pipeline.communicator.device
        self.lost_step = False
        self._computing, self._stepping = StreamClock(self._device), StreamClock(self._device)
        if stage.config.fp16:
            stage.config.grad_scale_func = lambda loss: loss * self._optimizer.loss_scale

    @property
    def _optimizer(self) -> Any:
        return self._deepspeed.optimizer

    @property
    def weights(self) -> MasterWeights:
        """This rank's master weights, not a copy."""
        shared = self.groups.tp.size() > 1
        copied = [parameter for row, parameter in self.stage.named_rows() if shared and row.tp_dim is None]
        if self._tied is not None:
            copied.append(self._tied)
        return MasterWeights(self._optimizer, copied)

    def train_batch(self, read: ReadMicrobatch, routes: Routes) -> list[MicrobatchLoss]:
        """Take one local step: forward and backward over all microbatches, then the inner optimizer.

        Returns the losses on the last stage, an empty list elsewhere.
        """
        self._deepspeed.module.train()
        scaler = getattr(self._optimizer, "loss_scaler", None)
        lowest = getattr(scaler, "min_scale", math.inf) >= getattr(scaler, "cur_scale", 1.0)
        with self._computing.running():
            losses = self.pipeline.run(read, routes, self.microbatches, after_backward=self._reduce_one)
        self.record("time/forward_backward_seconds", self._computing.take())
        self.record("train/learning_rate", float(self._optimizer.param_groups[0]["lr"]))
        # Hops are queued on a GPU, and the host waits for them in the norm.
        now.part(lambda: self.pipeline.communicator.waits.inside() or _REDUCING)
        with self._stepping.running():
            self._gradients.complete()
            self._deepspeed.allreduce_gradients()
            self._progress_while_computing()
            self._deepspeed.step()
        self.record("time/optimizer_seconds", self._stepping.take())
        self.record("train/grad_norm", self._deepspeed.get_global_grad_norm())
        self.record("train/loss_scale", float(getattr(self._optimizer, "loss_scale", 1.0)))
        # `overflow`: the gradient's norm was not finite, and neither weights nor moments changed.
        skipped = self._optimizer.overflow
        self.record("train/skipped_steps", int(skipped))
        self.lost_step = bool(skipped) and lowest
        return losses

    def _progress_while_computing(self) -> None:
        """On a GPU, have rounds progress until it has done what is queued; the norm would wait for that."""
        if self._device.type != "cuda":
            return
        queued = torch.cuda.current_stream().record_event()
        while self.pipeline.between_microbatches() and not queued.query():
            time.sleep(_POLL_SECONDS)

    def _reduce_one(self) -> None:
        """With ZeRO 2, reduce the gradients of one microbatch and keep this rank's part of them."""
        if self._deepspeed.zero_optimization_partition_gradients():
            self._deepspeed.set_gradient_accumulation_boundary(False)
            self._deepspeed.allreduce_gradients()
            self._deepspeed.set_gradient_accumulation_boundary(True)

    @torch.no_grad()
    def evaluate(self, read: ReadMicrobatch, routes: Routes, microbatches: int) -> list[MicrobatchLoss]:
        """Run forward passes only. Returns the losses on the last stage, an empty list elsewhere."""
        self._deepspeed.module.eval()
        return self.pipeline.run(read, routes, microbatches, forward_only=True)

    # State

    @torch.no_grad()
    def fill(self, read: Read) -> None:
        """Fill the master weights, which the stage's precision has rounded; the working weights stay as they are.

        Args:
            read: returns full tensors by their names in the unsplit model, those from which the stage was built.
        """
        rows = {parameter: row for row, parameter in self.stage.named_rows()}
        weights, tp = self.weights, self.groups.tp
        for part, pieces in zip(weights.parts(), weights.pieces_of_groups(), strict=True):
            for parameter, begin, end, own in pieces:
                if begin < end:
                    row = rows[parameter]
                    tensor = row.slice(read(row.source), tp.rank(), tp.size()).flatten()
                    part[own : own + end - begin].copy_(tensor[begin:end])

    def tensors(self) -> dict[str, Tensor]:
        """Return master weights and the inner optimizer's tensors by name, not copied; see `state.tensors_of`."""
        return state.tensors_of(self._deepspeed, self.weights)

    def numbers(self) -> dict[str, Any]:
        """Return the rest of the state, for JSON; the same on all ranks of the replica."""
        return state.numbers_of(self._deepspeed)

    def restore(self, tensors: Iterable[tuple[str, Tensor]], numbers: Mapping[str, Any]) -> None:
        """Restore what `tensors` and `numbers` returned, with the hyperparameters of this run's config.

        A collective: gathers the working weights over the data-parallel ranks.
        """
        state.restore(self._deepspeed, self.weights, tensors, numbers)

    def skip(self, steps: int) -> None:
        """Set counters and learning rate as if `steps` more local steps were done; weights do not change."""
        state.advance(self._deepspeed, steps)

    def held(self) -> tuple[list[Block], list[Block]]:
        """Return what this rank has of the canonical vector; see `held_of`."""
        groups = self.groups
        return held_of(self.parameter_layout(), self.stage.architecture, groups.topology, groups.position)

    def parameter_layout(self) -> list[FlatPart]:
        """Return where each parameter lies in the flat weights."""
        names = {parameter: row.name for row, parameter in self.stage.named_rows()}
        return [
            FlatPart(len(part), [(names[parameter], list(parameter.shape)) for parameter in group])
            for part, group in zip(self.weights.parts(), bit16_groups(self._optimizer), strict=True)
        ]
