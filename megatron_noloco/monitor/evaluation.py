"""The validation losses of a run, nats per token, as numbers of a row."""

import math
from dataclasses import dataclass, field
from typing import Any

_LARGEST_EXPONENT = 700.0  # exp overflows beyond


@dataclass(frozen=True)
class Losses:
    """Losses on one dataset of a blend.

    Attributes:
        replica_losses: of the replicas of this job, by their numbers.
        mean_model_loss: nan where it is not evaluated.
    """

    replica_losses: dict[int, float]
    mean_model_loss: float

    def numbers(self, replica: int, of: str = "") -> dict[str, Any]:
        """Return the numbers of the row of a replica."""
        return {
            f"validation/loss{of}": self.replica_losses[replica],
            f"validation/replica_losses{of}": [*self.replica_losses.values()],
            f"validation/mean_model_loss{of}": self.mean_model_loss,
        }


@dataclass(frozen=True)
class Evaluation(Losses):
    """Losses; for a blend of datasets, weighted by their proportions.

    Attributes:
        spread: of this rank's slow weights over the replicas of this job; nan where not compared.
        datasets: of a blend, by name; empty for a single dataset.
    """

    spread: float
    datasets: dict[str, Losses] = field(default_factory=dict)

    def numbers(self, replica: int, of: str = "") -> dict[str, Any]:
        row = super().numbers(replica, of) | {
            "validation/perplexity": math.exp(min(self.replica_losses[replica], _LARGEST_EXPONENT)),
            "validation/spread": self.spread,
        }
        for name, losses in self.datasets.items():
            row |= losses.numbers(replica, f" of {name}")
        return row

    @property
    def diverged(self) -> list[int]:
        """The replicas whose loss is not finite."""
        return [replica for replica, loss in self.replica_losses.items() if not math.isfinite(loss)]
