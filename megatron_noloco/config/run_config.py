"""The whole configuration of a run: its blocks, the rules between them, and the values that it stands for."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import Field, ValidationError

from megatron_noloco.config import data_block, parallel_block
from megatron_noloco.config.blocks import (
    CheckpointConfig,
    EvaluationConfig,
    TensorBoardConfig,
    TrainingConfig,
    WandbConfig,
)
from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.config.deepspeed_block import (
    AUTO,
    MICRO,
    STEPS,
    TRAIN,
    Batch,
    DeepSpeedConfig,
    Fp16Config,
    ZeroConfig,
)
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.config.noloco_block import TrainerSettings
from megatron_noloco.config.optimizer_block import check_schedule, schedule_as_deepspeed
from megatron_noloco.config.parallel_block import ParallelConfig
from megatron_noloco.config.programs import hint_of
from megatron_noloco.errors import UserError
from megatron_noloco.fields import fields_of, problems_of
from megatron_noloco.model.architecture import Architecture, Compute
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import MOST_SLOTS, FederationSettings, federation_problems, groups_problem


class RunConfig(DeepSpeedConfig):
    """The user's file: our blocks, and DeepSpeed's keys.

    Checked by every rule that needs neither ranks nor a tokenizer. `resolve` makes it the final one of a run.
    Raises UserError, with all problems in the order of the file.
    """

    noloco: TrainerSettings = TrainerSettings()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    federation: FederationSettings = FederationSettings()
    data: DataConfig = Field(default_factory=dict, validate_default=True)
    training: TrainingConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()

    @classmethod
    def _problems_of(cls, error: ValidationError, given: dict[str, Any]) -> list[str]:
        names = (*BLOCKS, *(name for name, _ in fields_of(cls)))
        lines = problems_of(error, cls, hint=partial(hint_of, elsewhere=names))
        return sorted(lines, key=lambda line: _place(line, given))

    def rules(self) -> Iterator[str]:
        """Yield what the rules between blocks refuse."""
        replicas = self.parallel.replicas if self.parallel.replicas != "auto" else None
        replicas = None if self.federation.exists else replicas
        if self.bf16.enabled and self.fp16.enabled:
            yield "bf16 and fp16 are both enabled; choose one of them"
        if self.scheduler is not None:
            yield from check_schedule(self.optimizer, self.scheduler, self.training.train_iters)
        try:
            microbatches = self.microbatches
        except UserError as error:
            yield str(error)
            return
        yield from _check_federation(self.federation, self.noloco, self.parallel)
        if problem := groups_problem(self.noloco, replicas):
            yield f"noloco.{problem}"
        yield from _check_rounds(self.noloco, self.training, replicas)
        yield from parallel_block.check_stages(self.model, self.parallel, microbatches)
        yield from parallel_block.check_tensor_parallel(self.model, self.parallel)
        yield from parallel_block.check_expert_parallel(self.model, self.parallel)
        yield from _check_zero(self.zero_optimization, self.parallel)
        yield from data_block.check_validation(self.data, self.evaluation)
        yield from data_block.check_documents(self.data, self.model)
        yield from data_block.check_tokenizer(self.data, self.model.vocab_size)
        # As many replicas as there will be ranks for: more than one.
        yield from _check_loss_scale(self._routing(replicas or 2), self.fp16)

    def as_deepspeed(self) -> dict[str, Any]:
        """Return what DeepSpeed is given: every default, so that its own never count, and every "auto" resolved.

        It must see a world of this replica's data parallelism.
        """
        given = self.model_dump(include=set(DeepSpeedConfig.model_fields), exclude_none=True)
        accumulated = self.data_types.grad_accum_dtype or ("fp32" if self.bf16.enabled else self.precision)
        reduced = "fp32" if accumulated == "fp32" else self.precision
        settled: dict[str, Any] = {
            "data_types": {"grad_accum_dtype": accumulated},
            "communication_data_type": self.communication_data_type or reduced,
            TRAIN: self.batch.samples,
            MICRO: self.batch.micro,
            STEPS: self.batch.steps,
            "optimizer": self.optimizer.as_deepspeed(),
            "zero_optimization": given["zero_optimization"] | {"stage": self.zero_stage},
        }
        if self.scheduler is not None:
            settled["scheduler"] = schedule_as_deepspeed(self.scheduler, self.training.train_iters)
        if self.gradient_clipping == AUTO:
            settled["gradient_clipping"] = 1.0
        if self.optimizer.type in ("Muon", "SGD"):
            settled["zero_allow_untested_optimizer"] = True  # as DeepSpeed calls all but Adam and Lion
        return given | settled

    def given(self) -> dict[str, Any]:
        """Return the JSON object of this configuration, without fields that were left out."""
        return self.model_dump(exclude_unset=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of this configuration, with all defaults."""
        return {**self.as_deepspeed(), **self.model_dump(include=set(BLOCKS))}

    def meant(self, tokenizer_vocab: int = 0) -> dict[str, Any]:
        """Return the JSON object of this configuration, with what null stands for; see `ModelConfig.meant`."""
        return self.to_dict() | {"model": self.model.meant(tokenizer_vocab)}

    def shared(self) -> dict[str, Any]:
        """Return the fields in which jobs must not differ, by block; those of the method are compared apart."""
        return {name: getattr(self, name).shared() for name in BLOCKS if name != "noloco"}

    def topology(self, world_size: int, slot: int = 0) -> Topology:
        """Return the layout of this job's `world_size` ranks; raises UserError when the numbers do not fit.

        Args:
            slot: in a federation, the number of this job's replica.
        """
        separate_jobs = self.federation.exists
        topology = parallel_block.lay_out(self.parallel, world_size, separate_jobs)
        if separate_jobs:
            topology = replace(topology, slot=slot, separate_jobs=True)
        if problem := groups_problem(self.noloco, topology.total_replicas):
            raise UserError(f"noloco.{problem}")
        return topology

    def smallest_topology(self) -> Topology:
        """Return the layout of the fewest replicas, from 2 on, that the method can have. Raises UserError."""
        problem = UserError("")
        for replicas in range(2, MOST_SLOTS + 1):
            try:
                return self.topology(replicas * self.parallel.replica_size)
            except UserError as error:
                problem = error
        raise problem

    def routing(self, topology: Topology) -> Routing:
        """Return the plan of routes; `active` says whether any microbatch leaves its replica."""
        return self._routing(topology.replicas)

    def _routing(self, replicas: int) -> Routing:
        stages = self.parallel.pipeline_model_parallel_size
        return Routing(replicas, self.microbatches, self.training.seed, self.noloco.routing, stages)

    def architecture(self, tokenizer_vocab: int = 0) -> Architecture:
        """Return the model for a tokenizer of `tokenizer_vocab` tokens (0: not known, `model.vocab_size` decides).

        Raises UserError when the vocabulary is too small, or does not divide over the tensor-parallel ranks.
        """
        architecture = self.model.architecture(tokenizer_vocab)
        if problems := list(parallel_block.check_vocabulary(architecture, self.parallel)):
            raise UserError("\n".join(problems))
        return architecture

    @property
    def compute(self) -> Compute:
        """Return how the model is computed."""
        return self.model.compute(self.precision, self.data.separate_documents, self.parallel.split)

    @property
    def batch(self) -> Batch:
        """Return the batch of a replica. Raises UserError."""
        return self.batch_of(self.parallel.data_parallel_size)

    @property
    def micro_batch_size(self) -> int:
        """Return the samples in a microbatch."""
        return self.batch.micro

    @property
    def microbatches(self) -> int:
        """Return the microbatches per data-parallel rank and local step (DeepSpeed's accumulation steps)."""
        return self.batch.steps

    @property
    def replica_batch(self) -> int:
        """Return the samples that one replica consumes per local step (DeepSpeed's train_batch_size)."""
        return self.batch.samples

    @property
    def world_size(self) -> int | None:
        """Return the ranks of a job; None where `parallel.replicas` is "auto"."""
        replicas = 1 if self.federation.exists else self.parallel.replicas
        return None if replicas == "auto" else replicas * self.parallel.replica_size


BLOCKS: dict[str, Any] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if name not in DeepSpeedConfig.model_fields
}


def _place(line: str, raw: dict[str, Any]) -> tuple[int, int]:
    """Return the place in the file of the key that a line begins with; what is missing comes last."""
    names = [*re.split(r"[:\s]", line)[0].split("."), ""]
    block = raw.get(names[0])
    keys, inner = list(raw), list(block) if isinstance(block, dict) else []
    places = [of.index(name) if name in of else len(of) for of, name in ((keys, names[0]), (inner, names[1]))]
    return places[0], places[1]


def _check_federation(
    federation: FederationSettings, noloco: TrainerSettings, parallel: ParallelConfig
) -> Iterator[str]:
    """Yield what separate jobs lack, and what the trainer cannot do with them."""
    if federation == FederationSettings():
        return
    yield from federation_problems(federation, noloco)
    if not federation.exists:
        return
    if not noloco.enabled:
        yield "noloco.enabled false: a federation is there for rounds; set it to true"
    if parallel.replicas not in ("auto", 1):
        yield f"parallel.replicas {parallel.replicas}: a job of a federation is one replica; leave it out"
    if noloco.transport != "auto":
        yield f'noloco.transport "{noloco.transport}": a federation has a transport of its own; leave it out'
    if noloco.most_waiting is not None:
        yield (
            'noloco.local_steps "auto": jobs of a federation cannot agree on it; give a number, such as the one '
            "that `megatron-noloco plan FILE --bandwidth RATE --step TIME` shows"
        )
    if noloco.routing != "off" and parallel.pipeline_model_parallel_size > 1:
        yield (
            f'noloco.routing "{noloco.routing}": a local step would wait for replicas that are '
            'other jobs; set it to "off"'
        )


def _check_rounds(noloco: TrainerSettings, training: TrainingConfig, replicas: int | None) -> Iterator[str]:
    """Yield why there is no round at all; of a resumed run all steps count, not those that are left."""
    if noloco.most_waiting is not None and noloco.routing == "round":
        yield 'noloco.routing "round" needs a fixed number of noloco.local_steps; use "microbatch", or give one'
    if noloco.enabled and replicas != 1 and noloco.local_steps > training.train_iters:
        yield (
            f"noloco.local_steps {noloco.local_steps} is more than training.train_iters {training.train_iters}: "
            "the run would end before its first round; lower it, or set noloco.enabled to false"
        )


def _check_zero(zero: ZeroConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield why gradients cannot be divided, or would be added up with those of different experts."""
    for name in ("pipeline_model_parallel_size", "tensor_model_parallel_size"):
        if zero.stage == 2 and (size := getattr(parallel, name)) > 1:
            yield (
                f"zero_optimization.stage 2 needs parallel.{name} 1, not {size}: it reduces gradients during the "
                "backward pass, before stages or tensor-parallel ranks could add up theirs; use 1"
            )
    for name in ("reduce_scatter", "contiguous_gradients"):
        if parallel.expert_model_parallel_size > 1 and not getattr(zero, name):
            yield (
                f"zero_optimization.{name} false: with parallel.expert_model_parallel_size > 1 DeepSpeed would "
                "add up the gradients of different experts; leave it out"
            )


def _check_loss_scale(routing: Routing, fp16: Fp16Config) -> Iterator[str]:
    if routing.active and fp16.enabled and not fp16.loss_scale:
        yield (
            "fp16 with a dynamic loss scale does not go together with routing: replicas with different "
            "loss scales would exchange gradients; set a static fp16.loss_scale, or use bf16, or set "
            'noloco.routing to "off" (or parallel.replicas to 1)'
        )
