"""What it costs a federation that its machines are taken away, with a notice and without."""

from dataclasses import dataclass

from megatron_noloco.config import RunConfig
from megatron_noloco.config.round_memory import bytes_of_state
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of

_FP32 = 4


@dataclass(frozen=True)
class PreemptionCost:
    """What departures cost, all replicas together.

    Attributes:
        lost_steps: local steps of one departure that no other replica has, on average over the moments of a round.
        share_lost: of all local steps.
        state_bytes: that a replica takes over which comes back without its disk.
    """

    lost_steps: float
    share_lost: float
    state_bytes: int


def departures_of(
    config: RunConfig,
    architecture: Architecture,
    step_seconds: float,
    per_second: float,
    notice_seconds: float,
) -> PreemptionCost:
    """Return the costs of so many departures per second, of all replicas together."""
    noloco, replicas = config.noloco, max(2, config.federation.start_with)
    seconds = min(notice_seconds, config.federation.leave_seconds)
    lost = lost_steps(noloco.local_steps, step_seconds, seconds)
    kept = _FP32 * (1 + config.optimizer.moments) + sum(bytes_of_state(noloco, replicas).values())
    return PreemptionCost(
        lost, lost * per_second * step_seconds / replicas, round(table_of(architecture).exported_count * kept)
    )


def lost_steps(local_steps: int, step_seconds: float, notice_seconds: float) -> float:
    """Return the local steps since the last round that a replica takes with it, on average over its moments.

    A replica that leaves after j of k steps exchanges once more where its partner comes to the round in time,
    k - j local steps later.
    """
    late = (j for j in range(local_steps) if (local_steps - j) * step_seconds > notice_seconds)
    return sum(late) / local_steps
