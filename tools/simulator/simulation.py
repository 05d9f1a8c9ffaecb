"""One simulated run: the JSON of the trainer, all replicas in this process."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_noloco.config import RunConfig, resolve
from megatron_noloco.data.auto_tokenizer import build_tokenizer
from megatron_noloco.data.microbatches import Microbatch, ValidationSource, gather
from megatron_noloco.data.opening import Data, open_data
from megatron_noloco.data.sources import Needs, Source, TextSource
from megatron_noloco.engine.layout import GroupKey
from megatron_noloco.model.families import Parameter, table_of
from megatron_noloco.outer import NoRounds, OuterOptimizer, RoundReport, Rounds, TorchWeights
from megatron_noloco.plans.sample_order import BatchPlan
from megatron_noloco.plans.topology import Place
from tests.kit.loopback import loopback_world
from tools.simulator.inner import LearningRate, StackedOptimizer, clip
from tools.simulator.llama import StackedLlama

SAVE_SECONDS = 300  # between saves of a run that can be continued
T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """An evaluation after `step` local steps; losses in nats per token of the validation split."""

    step: int
    replica_losses: list[float]  # of the fast weights
    mean_model_loss: float  # of the mean of the slow weights
    spread: float  # standard deviation of slow weights over the replicas, root mean square over the weights
    sent_bytes: int  # in exchanges, per replica, so far


class Simulation:
    """Holds all replicas' weights as rows of one matrix and trains them by the trainer's plans.

    Args:
        config: a run of replicas of one rank each, without routes (one stage has none).
        compiled: local steps by `torch.compile`: a third less time, after half a minute; needs a C++ compiler.
        texts: text of their own for replicas, in place of `data.text`: the first replicas (of one replica, the
            first samples of a step) have the first text, and so on; none: one text for all.

    Raises ValueError for parallel sizes other than 1, `replicas` "auto", and settings of data, model and
    inner optimizer that are not simulated.
    """

    def __init__(self, config: RunConfig, compiled: bool = False, texts: Sequence[str] = ()) -> None:
        for refusal in _refusals(config):
            raise ValueError(refusal)
        assert isinstance(config.parallel.replicas, int)
        self.replicas = config.parallel.replicas
        self.config = resolve(config, self.replicas).config
        tokenizer = build_tokenizer(config.data.tokenizer)
        architecture = config.architecture(tokenizer.vocab_size)
        self.model = StackedLlama(architecture, self._in_order(table_of(architecture)))
        self.plan = BatchPlan(self.replicas, 1, config.microbatches, config.micro_batch_size)
        seed = config.training.seed
        sources: list[Source] = [config.data.source]
        if texts and isinstance(config.data.source, TextSource):
            sources = [replace(config.data.source, path=text) for text in texts]
        if self.plan.global_batch % len(sources):
            raise ValueError(
                f"{len(sources)} texts do not divide the {self.plan.global_batch} samples of a step"
            )
        self._share = self.plan.global_batch // len(sources)  # of a step's samples, for each text
        needs = Needs(architecture.vocab_size, architecture.seq_length, self._share, seed)
        self.datasets = [open_data(source, tokenizer, needs) for source in sources]
        self.orders = [datasets.training.order(seed) for datasets in self.datasets]
        self.validation = [_validation_samples(config, datasets) for datasets in self.datasets]
        if compiled:
            _check_compiler()
        self._training_losses = torch.compile(self.model.losses) if compiled else self.model.losses
        self.weights = self.model.initial(seed).repeat(self.replicas, 1)
        self.inner = self._inner()
        self.learning_rate = LearningRate(config.as_deepspeed())
        self._turn = Lock()  # of the replicas' threads
        self.outer = self._outer()
        self.sent_bytes = 0

    def _in_order(self, rows: Iterable[Parameter]) -> list[Parameter]:
        """Sort by parameter group as the trainer's vectors are, which fragments cut."""
        muon = self.config.optimizer.type == "Muon"
        return sorted(rows, key=lambda row: GroupKey.of(row, muon), reverse=True)

    def _inner(self) -> StackedOptimizer:
        block = self.config.optimizer.as_deepspeed()
        matrices = self.model.matrices() if block["type"] != "AdamW" else ()
        return StackedOptimizer(
            self.weights, block["params"], self.model.of_each(lambda row: row.decays), matrices
        )

    def _outer(self) -> list[Rounds]:
        """Return the trainer's outer optimizers, one per replica, over messages between threads."""
        noloco, seed = self.config.noloco, self.config.training.seed
        if not noloco.enabled:
            return [NoRounds(TorchWeights([row])) for row in self.weights]
        transports = loopback_world(self.replicas, turn=self._turn)
        return [
            OuterOptimizer(TorchWeights([row]), transport, Place(replica, self.replicas), noloco, seed)
            for replica, (row, transport) in enumerate(zip(self.weights, transports, strict=True))
        ]

    def run(self, saved: Path | None = None) -> Iterator[Evaluation]:
        """Train to the end; yields every evaluation the trainer would make.

        Args:
            saved: a file that is written every few minutes. A run that finds one continues from it, and yields the
                evaluations before it again; at its end it deletes the file.
        """
        steps, interval = self.config.training.train_iters, self.config.evaluation.interval
        evaluations: list[Evaluation] = []
        if saved is not None and saved.exists():
            evaluations = self._restore(torch.load(saved, weights_only=False))
            yield from evaluations
        written = time.monotonic()
        with ThreadPoolExecutor(self.replicas) as threads:  # members of a group wait for each other
            for step in range(self.inner.steps, steps):
                self._local_step(step)
                done = step + 1
                reports = self._of_all(threads, partial(_after_local_step, done))
                self.sent_bytes += max(
                    sum(report.exchange.bytes_sent for report in of_replica) for of_replica in reports
                )
                if done == steps:
                    self.sent_bytes += max(self._of_all(threads, self._final_average))
                if done == steps or (interval and done % interval == 0):
                    self._of_all(threads, lambda outer: outer.wait())  # members need each other for that
                    evaluations.append(self.evaluate(done))
                    yield evaluations[-1]
                if saved is not None and time.monotonic() - written > SAVE_SECONDS:
                    written = time.monotonic()
                    states = self._of_all(threads, lambda outer: outer.state())
                    self._save(saved, states, evaluations)
        if saved is not None:
            saved.unlink(missing_ok=True)

    def _save(
        self, path: Path, outer: Sequence[dict[str, Tensor]], evaluations: Sequence[Evaluation]
    ) -> None:
        state = {
            "steps": self.inner.steps,
            "sent_bytes": self.sent_bytes,
            "tensors": self.inner.tensors(),
            "outer": outer,
            "evaluations": evaluations,
        }
        new = path.with_suffix(".new")
        torch.save(state, new)
        new.replace(path)

    def _restore(self, state: dict[str, Any]) -> list[Evaluation]:
        for _ in range(state["steps"]):
            self.learning_rate.next()
        self.inner.steps, self.sent_bytes = state["steps"], state["sent_bytes"]
        for tensor, kept in zip(self.inner.tensors(), state["tensors"], strict=True):
            tensor.copy_(kept)
        for outer, kept in zip(self.outer, state["outer"], strict=True):
            outer.restore(kept)
        return list(state["evaluations"])

    def _of_all(self, threads: ThreadPoolExecutor, call: Callable[[Rounds], T]) -> list[T]:
        """Call with each replica's outer optimizer, all at a time; they take turns."""

        def call_in_turn(outer: Rounds) -> T:
            with self._turn:
                return call(outer)

        return list(threads.map(call_in_turn, self.outer))

    def _final_average(self, outer: Rounds) -> int:
        """Take part in the final average; returns the bytes that the replica sends."""
        if isinstance(outer, NoRounds) or not self.config.noloco.final_average:
            return 0
        reports = [report.exchange for report in outer.finish()]
        reports += outer.average_all(self.config.training.train_iters)
        return sum(report.bytes_sent for report in reports)

    def _local_step(self, step: int) -> None:
        gradients = self._gradients(self.weights, step)
        clip(gradients, 1.0 if (norm := self.config.gradient_clipping) == "auto" else norm)
        weight_decay = self.config.optimizer.params.weight_decay
        self.inner.step(gradients, self.learning_rate.next(), weight_decay)

    def _gradients(self, weights: Tensor, step: int) -> Tensor:
        """Return the gradients of the rows of `weights` on the samples of a step, counted from 0."""
        parts = [
            _whole_samples(gather(datasets.training, order.ids(step * self._share, self._share)))
            for datasets, order in zip(self.datasets, self.orders, strict=True)
        ]
        samples = torch.cat(parts).view(self.replicas, self.plan.replica_batch, -1)
        weights.requires_grad_()
        (gradients,) = torch.autograd.grad(self._training_losses(weights, samples).sum(), weights)
        weights.requires_grad_(False)
        return gradients

    def _slow_weights(self) -> Tensor:
        """Return the slow weights of all replicas, shape [R, elements]."""
        return torch.stack([outer.state()["slow_weights"] for outer in self.outer])

    @torch.no_grad()
    def evaluate(self, step: int) -> Evaluation:
        slow = self._slow_weights()
        spread = float(slow.double().var(dim=0).mean().sqrt()) if self.replicas > 1 else 0.0
        mean_model, replicas = (losses.mean(dim=0) for losses in self.losses_by_text())
        return Evaluation(step, replicas.tolist(), float(mean_model), spread, self.sent_bytes)

    @torch.no_grad()
    def losses_by_text(self) -> tuple[Tensor, Tensor]:
        """Return the mean losses over the validation microbatches: of the mean model, [texts, 1]; [texts, R]."""
        mean = self._slow_weights().mean(dim=0, keepdim=True)
        mean_model, replicas = (
            torch.stack([self._validation_losses(weights, text) for text in self.validation])
            for weights in (mean, self.weights)
        )
        return mean_model, replicas

    def _validation_losses(self, weights: Tensor, samples: Tensor) -> Tensor:
        """Return each row's mean loss over the microbatches of a text, shape [rows]."""
        batches = samples.expand(len(weights), -1, -1, -1).unbind(1)
        return torch.stack([self.model.losses(weights, batch) for batch in batches]).mean(dim=0)


def _refusals(config: RunConfig) -> Iterator[str]:
    """Yield what is not simulated."""
    noloco, data, replicas = config.noloco, config.data, config.parallel.replicas
    if not isinstance(replicas, int) or config.world_size != replicas:
        yield "parallel: give a number of replicas, and no other parallel size: one process has them all"
    if config.optimizer.type not in ("AdamW", "Muon") or config.precision != "fp32":
        yield "optimizer.type must be AdamW or Muon, and the precision fp32, in a simulation"
    if noloco.most_waiting is not None or noloco.overlap_steps == "auto":
        yield 'noloco.local_steps or overlap_steps "auto" measures time: give a number in a simulation'
    if not config.evaluation.iters:
        yield "evaluation.iters 0: a simulation has no other result; give at least 1"
    refused = {"training.pretrained": config.training.pretrained is not None}
    for name in ("z_loss_coeff", "hidden_dropout", "attention_dropout"):
        refused[f"model.{name}"] = bool(getattr(config.model, name))
    for name in ("reset_attention_mask", "eod_mask_loss", "sft_data_path"):
        refused[f"data.{name}"] = bool(getattr(data, name))
    yield from (f"{name} is not simulated" for name, given in refused.items() if given)


def _check_compiler() -> None:
    """Raise ValueError where `torch.compile` finds no compiler for this machine's CPU."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ValueError(
            f"--compiled needs a C++ compiler: there is no {compiler}; install g++, or set CXX to another one, "
            "or leave --compiled out"
        )


def _after_local_step(step: int, outer: Rounds) -> Sequence[RoundReport]:
    return outer.after_local_step(step)


def _validation_samples(config: RunConfig, datasets: Data) -> Tensor:
    """Return the validation microbatches, shape [microbatches, micro_batch_size, seq_length + 1]."""
    assert datasets.validation is not None
    (samples,) = datasets.validation.parts
    source = ValidationSource(samples, config.micro_batch_size, config.evaluation.iters)
    return torch.stack([_whole_samples(source.microbatch(index)) for index in range(len(source))])


def _whole_samples(microbatch: Microbatch) -> Tensor:
    """Return tokens and the last label, shape [samples, seq_length + 1]."""
    return torch.cat([microbatch.tokens, microbatch.labels[:, -1:]], dim=1)
