"""One replica: Megatron-core's pipeline drives forward and backward, DeepSpeed everything after."""

from functools import cached_property
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.op_builder import FusedAdamBuilder
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor

from megatron_noloco.config import RunConfig
from megatron_noloco.engine.checkpoint import CheckpointableEngine
from megatron_noloco.engine.mpu import ReplicaMpu
from megatron_noloco.engine.quiet import quiet
from megatron_noloco.engine.weights import MasterWeights
from megatron_noloco.metrics import LAST, Record, Reduction, unrecorded
from megatron_noloco.metrics.reduction import largest, total
from megatron_noloco.model.stage import Stage
from megatron_noloco.pipeline.groups import Groups, ProcessGroup
from megatron_noloco.pipeline.pipeline import MicrobatchLoss, Pipeline, ReadMicrobatch
from megatron_noloco.plans.routing import Routes


class ReplicaEngine:
    """Trains this rank's stage of one replica, one local step at a time, and records the step's numbers."""

    def __init__(self, config: RunConfig, groups: Groups, stage: Stage, record: Record = unrecorded) -> None:
        self.groups = groups
        self.record = record
        self.microbatches = config.microbatches
        self._tied = stage.tied_weight if groups.tied_embedding is not None else None
        if self._tied is not None and not groups.first_stage:
            self._tied.ds_pipe_replicated = True  # type: ignore[attr-defined]  # counts once in the norm
        self._deepspeed = _build_deepspeed(config, groups, stage)
        self.pipeline = Pipeline(stage, groups, config.micro_batch_size, config.model.seq_length, record)
        if config.precision == "fp16":
            stage.config.grad_scale_func = lambda loss: loss * self._optimizer.loss_scale

    @property
    def _optimizer(self) -> Any:
        return self._deepspeed.optimizer

    @property
    def weights(self) -> MasterWeights:
        """This rank's master weights; live."""
        return MasterWeights(self._optimizer)

    def train_batch(self, read: ReadMicrobatch, routes: Routes) -> list[MicrobatchLoss]:
        """One local step: forward and backward over all microbatches, then the inner optimizer.

        Returns the losses on the last stage, an empty list elsewhere.
        """
        self._deepspeed.module.train()
        losses = self.pipeline.run(read, routes, self.microbatches)
        self._complete_gradients()
        self.record("train/learning_rate", float(self._optimizer.param_groups[0]["lr"]), LAST)
        self._deepspeed.allreduce_gradients()
        self._deepspeed.step()
        skipped = int(getattr(self._optimizer, "overflow", False))  # fp16: the weights did not move
        self.record("train/grad_norm", self._deepspeed.get_global_grad_norm(), LAST)  # before clipping
        self.record("train/loss_scale", float(getattr(self._optimizer, "loss_scale", 1.0)), LAST)
        self.record("train/skipped_steps", skipped, Reduction(total, largest))
        return losses

    @torch.no_grad()
    def evaluate(self, read: ReadMicrobatch, routes: Routes, microbatches: int) -> list[MicrobatchLoss]:
        """Forward passes only; losses on the last stage, an empty list elsewhere."""
        self._deepspeed.module.eval()
        return self.pipeline.run(read, routes, microbatches, forward_only=True)

    def collect_state(self) -> dict[str, Any]:
        """File name -> state in DeepSpeed's format, for the files this rank writes; live tensors."""
        return self._deepspeed.collect_state()

    def restore_state(self, folder: Path) -> None:
        """Take up the state in `folder`, but the hyperparameters of this run's config.

        DeepSpeed restores those of the checkpoint: a learning rate changed for the resume would be ignored.
        """
        optimizer, scheduler = self._optimizer, self._deepspeed.lr_scheduler
        configured = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        clip_grad = optimizer.clip_grad
        self._deepspeed.restore_state(folder)
        optimizer.clip_grad = clip_grad
        for group, values in zip(optimizer.param_groups, configured, strict=True):
            group.update(values)
        if scheduler is not None:
            scheduler.step(scheduler.last_batch_iteration)  # the rate of the step reached, by this schedule

    def parameter_layout(self) -> list[tuple[str, list[int]]]:
        """Name (in the unsplit model) and shape of each parameter, in the order of the flat weights."""
        names = {parameter: row.name for row, parameter in self.pipeline.stage.named_rows()}
        bit16_groups = getattr(self._optimizer, "bf16_groups", None) or self._optimizer.bit16_groups
        return [(names[parameter], list(parameter.shape)) for group in bit16_groups for parameter in group]

    def _complete_gradients(self) -> None:
        """Sum what the schedule leaves partial inside a stage's shards and between tied embeddings.

        Core does this in `finalize_model_grads`, which wants its own data-parallel wrapper.
        """
        if self.pipeline.stage.config.sequence_parallel:
            partial = [
                p for p in self._deepspeed.module.parameters() if getattr(p, "sequence_parallel", False)
            ]
            _sum_gradients([self._gradient(p) for p in partial], self.groups.tp)
        if self._tied is not None and self.groups.tied_embedding is not None:
            _sum_gradients([self._gradient(self._tied)], self.groups.tied_embedding)

    def _gradient(self, parameter: torch.nn.Parameter) -> Tensor:
        if isinstance(self._optimizer, BF16_Optimizer):
            return self._fp32_gradients[parameter]
        return self._optimizer.get_gradient_for_reduction(parameter)

    @cached_property
    def _fp32_gradients(self) -> dict[torch.nn.Parameter, Tensor]:
        """Where DeepSpeed's bf16 optimizer accumulates each parameter's gradient, flat."""
        optimizer = self._optimizer
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
        return {
            parameter: gradient
            for parameters, gradients in groups
            for parameter, gradient in zip(parameters, gradients, strict=True)
        }


def _sum_gradients(gradients: list[Tensor], group: ProcessGroup) -> None:
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _build_deepspeed(config: RunConfig, groups: Groups, stage: Stage) -> CheckpointableEngine:
    """A DeepSpeed engine whose world is this replica.

    `deepspeed.initialize` hard-codes which engine it builds and how; the constructor takes what we need.
    """
    if not torch.cuda.is_available():
        # DeepSpeed would compile a shared-memory all-reduce (a minute, and a C++ compiler) before it talks.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if deepspeed.comm.comm.cdb is None:
        deepspeed.comm.init_distributed(dist_init_required=False, verbose=False)
    mpu = ReplicaMpu(groups)
    settings = deepspeed_settings(config)
    with quiet():
        engine = CheckpointableEngine(
            args=None,
            model=stage,
            mpu=mpu,
            config=settings,
            config_class=DeepSpeedConfig(settings, mpu),
            dist_init_required=False,
        )
    # One call of step() per batch: the schedule has already gone through every microbatch.
    engine.set_gradient_accumulation_boundary(True)
    return engine


def deepspeed_settings(config: RunConfig) -> dict[str, Any]:
    """The user's ds_config, completed.

    ZeRO stage 0 is run as stage 1: with outside backward passes DeepSpeed's stage-0 optimizers clip by a wrong
    norm (fp32) or take a step in their constructor (bf16, fp16), stage 1 gives the exact numbers with less memory.
    In bf16, gradients accumulate in fp32 over the microbatches as they do in Megatron, unless the file asks for
    another `data_types.grad_accum_dtype`; DeepSpeed then needs two more settings to be right.
    Adam is DeepSpeed's fused kernel where it can be had, else torch's; `torch_adam` in the file decides itself.
    """
    settings = dict(config.deepspeed)
    if config.precision == "bf16":
        settings["data_types"] = {"grad_accum_dtype": "fp32", **settings.get("data_types", {})}
        if settings["data_types"]["grad_accum_dtype"] == "fp32":
            settings["bf16"] = {"immediate_grad_update": True, **settings["bf16"]}
            settings.setdefault("communication_data_type", "fp32")
    settings["zero_optimization"] = {**settings.get("zero_optimization", {}), "stage": 1}
    optimizer = settings["optimizer"]
    if optimizer["type"].lower() in ("adam", "adamw"):
        parameters = {"torch_adam": not _fused_adam_loads(), **optimizer.get("params", {})}
        settings["optimizer"] = {**optimizer, "params": parameters}
    return settings


def _fused_adam_loads() -> bool:
    """Where it is not installed, DeepSpeed compiles it, which needs ninja and the CUDA toolkit."""
    if not torch.cuda.is_available():  # on a CPU it could be had, too, but takes minutes and a compiler
        return False
    try:
        FusedAdamBuilder().load(verbose=False)
    except Exception:  # of the compiler, of its absence, of a toolkit that does not fit torch
        return False
    return True
