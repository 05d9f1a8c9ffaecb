"""The whole configuration of a run: its blocks, the rules between them, and the values that it stands for."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from typing import Any

from pydantic import ValidationError

from megatron_noloco.config import data_block, deepspeed_block, model_block, parallel_block
from megatron_noloco.config.blocks import (
    Block,
    CheckpointConfig,
    EvaluationConfig,
    TensorBoardConfig,
    TrainingConfig,
    WandbConfig,
)
from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.config.deepspeed_block import DeepSpeedConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.config.old_forms import in_todays_form, of_saved_run
from megatron_noloco.config.parallel_block import ParallelConfig
from megatron_noloco.config.wording import ConfigError, unknown_key
from megatron_noloco.data.sources import DocumentBorders
from megatron_noloco.errors import UserError
from megatron_noloco.fields import fields_of, problems_of
from megatron_noloco.model.architecture import Architecture, Compute, Precision
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import (
    PAPER,
    FederationSettings,
    TrainerSettings,
    federation_problems,
    groups_problem,
    recommended,
)


class File(DeepSpeedConfig):
    """All that a file may hold: our blocks and DeepSpeed's keys."""

    noloco: TrainerSettings = TrainerSettings()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    federation: FederationSettings = FederationSettings()
    data: DataConfig = DataConfig()
    training: TrainingConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()


BLOCKS: dict[str, Any] = {
    name: field.annotation
    for name, field in File.model_fields.items()
    if name not in DeepSpeedConfig.model_fields
}
_NAMES = (*BLOCKS, *(name for name, _ in fields_of(File)))


@dataclass(frozen=True)
class RunConfig:
    """A configuration that has passed every check that needs neither ranks nor a tokenizer.

    `topology` and `architecture` make the others. `deepspeed` holds the file's other top-level keys with every
    "auto" resolved and all three batch numbers filled in: it can be handed to DeepSpeed (which must see a world of
    this replica's data parallelism) as it is. `translations` has a line for each old form that the file has.
    `left_out` names the settings of the method that the file leaves to its recipe.
    """

    noloco: TrainerSettings
    model: ModelConfig
    parallel: ParallelConfig
    federation: FederationSettings
    data: DataConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    tensorboard: TensorBoardConfig
    wandb: WandbConfig
    deepspeed: dict[str, Any]
    translations: tuple[str, ...] = dataclass_field(default=(), compare=False)
    left_out: tuple[str, ...] = dataclass_field(default=(), compare=False)

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        replicas = self.parallel.replicas if self.parallel.replicas != "auto" else None
        replicas = None if self.federation.exists else replicas
        yield from _check_federation(self.federation, self.noloco, self.parallel)
        yield from self._problems_among(replicas)
        yield from _check_rounds(self.noloco, self.training, replicas)
        yield from model_block.check_model(self.model)
        yield from parallel_block.check_parallel(self.model, self.parallel, self.microbatches)
        yield from _check_zero(self.deepspeed["zero_optimization"], self.parallel)
        yield from data_block.check_data(self.data, self.evaluation)
        yield from _check_without_effect(self.evaluation, self.wandb)
        yield from data_block.check_documents(self.data, self.model)
        yield from data_block.check_tokenizer(self.data, self.model.vocab_size)
        # As many replicas as there will be ranks for: more than one.
        yield from _check_loss_scale(self._routing(replicas or 2), self.deepspeed)

    def _problems_among(self, replicas: int | None) -> Iterator[str]:
        """Yield what the method refuses with so many replicas; None: their number is not known yet."""
        if problem := groups_problem(self.noloco, replicas):
            yield f"noloco.{problem}"

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "RunConfig":
        """Return the configuration in a parsed JSON object; raises ConfigError with all problems in file order."""
        raw, translations = in_todays_form(raw)
        values = deepspeed_block.prepared(_with_choices(raw))
        file: Any = None
        problems: list[str] = []
        try:
            file = File.model_validate(values)
        except ValidationError as error:
            problems = problems_of(error, File, unknown=partial(unknown_key, elsewhere=_NAMES))
        problems += deepspeed_block.check_params(values)
        if not problems:
            deepspeed, problems = deepspeed_block.resolve(
                {key: value for key, value in values.items() if key not in BLOCKS},
                file.parallel.data_parallel_size,
                file.training.train_iters,
            )
        if problems:
            raise ConfigError("\n".join(sorted(problems, key=lambda line: _place(line, raw))))
        blocks = {name: getattr(file, name) for name in BLOCKS}
        config = cls(
            deepspeed=deepspeed, **blocks, translations=translations, left_out=_left_out(values, file)
        )
        replicas = file.parallel.replicas
        return config.among(None if replicas == "auto" else replicas)

    @classmethod
    def of_checkpoint(cls, saved: dict[str, Any]) -> "RunConfig":
        """Return the configuration that a checkpoint was saved with, possibly by an earlier version.

        Its method, optimizer and schedule have the settings of the checkpoint only where these are still accepted.
        """
        saved = of_saved_run(saved)
        try:
            return cls.from_dict(saved)
        except ConfigError:
            without = {"evaluation", "tensorboard", "wandb", "federation"}
            known = {name: saved[name] for name in saved.keys() & File.model_fields.keys() - without}
            method = {
                name: saved["noloco"][name] for name in ("enabled", "method") if name in saved["noloco"]
            }
            return cls.from_dict({**deepspeed_block.accepted(known), "noloco": method})

    def among(self, replicas: int | None) -> "RunConfig":
        """Return the configuration for `replicas` in one job; their number decides what the recipe chooses.

        None: it is not known, and the recipe chooses nothing.
        """
        return self if replicas is None else self._with_left_out(recommended(replicas))

    def continuing(self, saved: dict[str, Any], replicas: int | None) -> "RunConfig":
        """Return the configuration of a run that continues the one of the JSON `saved`.

        Settings that the file leaves to the recipe are as they were there, if method and recipe are the same and
        `replicas` can have them.
        """
        then, now = saved.get("noloco", {}), self.noloco
        if (then.get("method"), then.get("recipe", now.recipe)) != (now.method, now.recipe):
            return self
        try:
            found = self._with_left_out(then)
        except UserError:  # for a value that is gone, such as payload "int16"
            return self
        return self if groups_problem(found.noloco, replicas) else found

    def _with_left_out(self, values: Mapping[str, Any]) -> "RunConfig":
        changes = {name: values[name] for name in self.left_out if name in values}
        return replace(self, noloco=replace(self.noloco, **changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of this configuration, with all defaults; from_dict reads it back."""
        blocks = ((name, getattr(self, name)) for name in BLOCKS)
        return {
            **self.deepspeed,
            **{name: b.model_dump() if isinstance(b, Block) else asdict(b) for name, b in blocks},
        }

    def topology(self, world_size: int, slot: int = 0) -> Topology:
        """Return the layout of this job's `world_size` ranks; raises ConfigError when the numbers do not fit.

        Args:
            slot: in a federation, the number of this job's replica.
        """
        separate_jobs = self.federation.exists
        try:
            topology = parallel_block.lay_out(self.parallel, world_size, separate_jobs)
            if separate_jobs:
                topology = replace(topology, slot=slot, separate_jobs=True)
        except UserError as error:
            raise ConfigError(str(error)) from None
        if problems := list(self._problems_among(topology.ensemble)):
            raise ConfigError("\n".join(problems))
        return topology

    def routing(self, topology: Topology) -> Routing:
        """Return the plan of routes; `active` says whether any microbatch leaves its replica."""
        return self._routing(topology.replicas)

    def _routing(self, replicas: int) -> Routing:
        stages = self.parallel.pipeline_model_parallel_size
        return Routing(replicas, self.microbatches, self.training.seed, self.noloco.routing, stages)

    def architecture(self, tokenizer_vocab: int = 0) -> Architecture:
        """Return the model for a tokenizer of `tokenizer_vocab` tokens (0: not known, `model.vocab_size` decides).

        Raises ConfigError when the vocabulary is too small, or does not divide over the tensor-parallel ranks.
        """
        try:
            architecture = self.model.architecture(tokenizer_vocab)
        except UserError as error:
            raise ConfigError(str(error)) from None
        if problems := list(parallel_block.check_vocabulary(architecture, self.parallel)):
            raise ConfigError("\n".join(problems))
        return architecture

    @property
    def compute(self) -> Compute:
        """Return how the model is computed."""
        return self.model.compute(self.precision, self.data.separate_documents, self.parallel.split)

    def documents(self, end_of_document: int) -> DocumentBorders:
        """Return how the borders of documents are treated; a document ends with the token `end_of_document`."""
        return DocumentBorders(end_of_document, self.data.reset_attention_mask, self.data.eod_mask_loss)

    @property
    def micro_batch_size(self) -> int:
        """Return the samples in a microbatch."""
        return int(self.deepspeed["train_micro_batch_size_per_gpu"])

    @property
    def world_size(self) -> int | None:
        """Return the ranks of a job; None where `parallel.replicas` is "auto"."""
        return self.parallel.replica_size if self.federation.exists else self.parallel.world_size

    @property
    def microbatches(self) -> int:
        """Return the microbatches per data-parallel rank and local step (DeepSpeed's accumulation steps)."""
        return int(self.deepspeed["gradient_accumulation_steps"])

    @property
    def replica_batch(self) -> int:
        """Return the samples that one replica consumes per local step (DeepSpeed's train_batch_size)."""
        return int(self.deepspeed["train_batch_size"])

    @property
    def zero_stage(self) -> int:
        """Return DeepSpeed's stage of ZeRO, 1 or 2."""
        return int(self.deepspeed["zero_optimization"]["stage"])

    @property
    def precision(self) -> Precision:
        if self.deepspeed.get("bf16", {}).get("enabled", False):
            return "bf16"
        return "fp16" if self.deepspeed.get("fp16", {}).get("enabled", False) else "fp32"


def _with_choices(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the file with the values of the recipe that it names, and those of local_steps "auto"."""
    noloco = raw.get("noloco")
    if not isinstance(noloco, dict):
        return raw
    if noloco.get("recipe") == "paper":
        noloco = {**PAPER, **noloco}
    if noloco.get("local_steps") == "auto":
        noloco = {"most_waiting": 0.1, **noloco, "local_steps": 1}
    return raw | {"noloco": noloco}


def _left_out(values: dict[str, Any], file: File) -> tuple[str, ...]:
    """Return the settings that the file leaves to its recipe: none for DiLoCo, separate jobs, or sites."""
    if file.noloco.method != "noloco" or file.noloco.sites is not None or file.federation.exists:
        return ()
    names = tuple(recommended(1))
    return names if values.get("noloco", {}).keys().isdisjoint(names) else ()


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
        yield 'noloco.local_steps "auto" and most_waiting: jobs of a federation cannot agree on it; give a number'
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


def _check_without_effect(evaluation: EvaluationConfig, wandb: WandbConfig) -> Iterator[str]:
    """Yield settings that have no effect, and read as if they had."""
    if evaluation.full and not evaluation.iters:
        yield (
            "evaluation.full true has no effect with evaluation.iters 0, which switches evaluation off; leave one "
            "of them out"
        )
    if (given := sorted(wandb.model_fields_set)) and "enabled" not in given:
        yield f"wandb.{given[0]} has no effect without wandb.enabled, which is missing; set it to true or false"


def _check_zero(zero: dict[str, Any], parallel: ParallelConfig) -> Iterator[str]:
    """Yield why gradients cannot be divided, or would be added up with those of different experts."""
    for name in ("pipeline_model_parallel_size", "tensor_model_parallel_size"):
        if zero["stage"] == 2 and (size := getattr(parallel, name)) > 1:
            yield (
                f"zero_optimization.stage 2 needs parallel.{name} 1, not {size}: it reduces gradients during the "
                "backward pass, before stages or tensor-parallel ranks could add up theirs; use 1"
            )
    for name in ("reduce_scatter", "contiguous_gradients"):
        if parallel.expert_model_parallel_size > 1 and not zero.get(name, True):
            yield (
                f"zero_optimization.{name} false: with parallel.expert_model_parallel_size > 1 DeepSpeed would "
                "add up the gradients of different experts; leave it out"
            )


def _check_loss_scale(routing: Routing, deepspeed: dict[str, Any]) -> Iterator[str]:
    fp16 = deepspeed.get("fp16", {})
    if routing.active and fp16.get("enabled", False) and not fp16.get("loss_scale", 0):
        yield (
            "fp16 with a dynamic loss scale does not go together with routing: replicas with different "
            "loss scales would exchange gradients; set a static fp16.loss_scale, or use bf16, or set "
            'noloco.routing to "off" (or parallel.replicas to 1)'
        )
