"""What an evaluation reports."""

import math
from dataclasses import dataclass, field
from typing import Any

_LARGEST_EXPONENT = 700.0  # exp of more overflows


@dataclass(frozen=True)
class DatasetLosses:
    """Validation losses on one dataset of a blend, nats per token."""

    name: str
    replica_losses: list[float]
    mean_model_loss: float


@dataclass(frozen=True)
class Evaluation:
    """Validation losses, nats per token; of a blend, in its proportions."""

    replica_losses: list[float]  # of the replicas of this job
    mean_model_loss: float  # nan where it is not evaluated
    spread: float  # standard deviation over all replicas of this rank's slow weights; nan where not compared
    datasets: list[DatasetLosses] = field(default_factory=list)  # of a blend; empty for a single dataset

    def numbers(self, replica: int) -> dict[str, Any]:
        """The row that a replica writes, the `replica`-th of this job; what was not measured is left out."""
        own = self.replica_losses[replica]
        row = {
            "validation/loss": own,
            "validation/perplexity": math.exp(min(own, _LARGEST_EXPONENT)),
            "validation/replica_losses": self.replica_losses,
            "validation/mean_model_loss": self.mean_model_loss,
            "validation/spread": self.spread,
        }
        for dataset in self.datasets:
            row[f"validation/loss of {dataset.name}"] = dataset.replica_losses[replica]
            row[f"validation/replica_losses of {dataset.name}"] = dataset.replica_losses
            row[f"validation/mean_model_loss of {dataset.name}"] = dataset.mean_model_loss
        return row
