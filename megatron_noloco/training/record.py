"""What is written down about a run, and how it reads as a line."""

import math
from dataclasses import dataclass, field

_NOTABLE_DATA_WAIT = 0.01  # of the step's time; less is left out of the line


@dataclass(frozen=True)
class RoundRecord:
    """The last round before a logged step, over the ranks of one replica."""

    index: int
    partners: list[int]  # empty: a bye
    exchange_seconds: float  # the slowest rank's
    wait_seconds: float
    sent_bytes: int  # by all ranks of the replica
    spread: float
    poisoned_elements: int


@dataclass(frozen=True)
class StepRecord:
    """One replica over the steps since its last record."""

    replica: int
    step: int  # steps done
    total_steps: int
    consumed_samples: int  # by all replicas
    seconds_per_step: float
    tokens_per_second: float  # of this replica
    learning_rate: float
    loss: float  # mean over the interval of what this replica's last stage computed, nats per token
    origin_losses: dict[int, tuple[float, int]]  # mean and number of microbatches, by whose data it was
    grad_norm: float
    loss_scale: float
    skipped_steps: int  # fp16 overflows in the interval
    hop_wait_seconds: float  # per step and rank, waiting for activations and gradients
    data_wait_seconds: float  # per step, waiting for microbatches to be read; the slowest rank's
    routed_share: float  # of this replica's microbatches, those that came from another replica
    sent_bytes: int  # in exchanges, by all ranks of the replica, since the start
    hop_bytes: int  # routed activations and gradients to other replicas, likewise
    exchange_seconds: float  # since the start, slowest rank of each round
    round: RoundRecord | None

    def line(self) -> str:
        """Megatron's log line, continued by the round's figures."""
        width = len(str(self.total_steps))
        parts = [
            f" iteration {self.step:{width}d}/{self.total_steps}",
            f"consumed samples: {self.consumed_samples}",
            f"elapsed time per iteration (ms): {1000 * self.seconds_per_step:.1f}",
            f"tokens per second: {self.tokens_per_second:.0f}",
            f"learning rate: {self.learning_rate:.3E}",
            f"lm loss: {self.loss:.4f}",
            f"grad norm: {self.grad_norm:.3f}",
        ]
        if self.loss_scale != 1.0:
            parts += [f"loss scale: {self.loss_scale:g}", f"skipped iterations: {self.skipped_steps}"]
        if self.routed_share:
            parts.append(
                f"routed: {100 * self.routed_share:.0f} % hop wait (ms): {1000 * self.hop_wait_seconds:.1f}"
            )
        if self.data_wait_seconds > _NOTABLE_DATA_WAIT * self.seconds_per_step:
            parts.append(f"data wait (ms): {1000 * self.data_wait_seconds:.1f}")
        if self.round is not None:
            parts += round_parts(self.round)
        return " | ".join(parts) + " |"


def round_parts(round_: RoundRecord) -> list[str]:
    parts = [
        f"round {round_.index} {partner_text(round_.partners)}",
        f"exchange (ms): {1000 * round_.exchange_seconds:.1f} wait (ms): {1000 * round_.wait_seconds:.1f} "
        f"sent (MB): {round_.sent_bytes / 1e6:.2f}",
    ]
    if not math.isnan(round_.spread):
        parts.append(f"spread: {round_.spread:.3E}")
    if round_.poisoned_elements:
        parts.append(f"poisoned elements: {round_.poisoned_elements}")
    return parts


def partner_text(partners: list[int]) -> str:
    if not partners:
        return "bye"
    return ("partner " if len(partners) == 1 else "partners ") + ",".join(map(str, partners))


@dataclass(frozen=True)
class DatasetLosses:
    """Validation losses on one dataset of a blend, nats per token."""

    name: str
    replica_losses: list[float]
    mean_model_loss: float


@dataclass(frozen=True)
class Evaluation:
    """Validation losses, nats per token; of a blend, in its proportions."""

    replica_losses: list[float]
    mean_model_loss: float  # nan where it is not evaluated
    spread: float  # standard deviation over all replicas of this rank's slow weights; nan where not compared
    datasets: list[DatasetLosses] = field(default_factory=list)  # of a blend; empty for a single dataset


@dataclass(frozen=True)
class SaveReport:
    """How a save went on this rank; `error` is None when the files are safe (or still being written)."""

    step: int
    pause_seconds: float  # training stood still
    error: str | None
