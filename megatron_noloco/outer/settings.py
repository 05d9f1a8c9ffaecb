"""The numbers of the method."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_noloco.plans.grouping import Grouping, prime_factors
from megatron_noloco.plans.kinds import check_finite, check_integers
from megatron_noloco.plans.stability import Gossip

Payload = Literal["fp32", "int16", "int8", "int4"]


@dataclass(frozen=True)
class OuterSettings:
    """Raises ValueError for numbers out of range, or of the wrong kind.

    Attributes:
        local_steps: k, inner optimizer steps between two rounds.
        outer_momentum: alpha in [0, 1), the share of the outer momentum buffer kept from round to round.
        outer_lr: beta > 0, the weight of the group's mean outer gradient.
        consensus_weight: gamma >= 0, the pull towards the group's mean slow weights; None is `outer_lr`.
            Replicas stay together where `gossip_of(settings, grouping).rho` is below 1.
        deadline_seconds: how long to wait for a member of the group in a round.
        payload: how the combined vector travels: "fp32", or coded as integers of 16, 8 or 4 bits per element; see
            `payload`.
        delay_steps: d <= local_steps, from the beginning of a round to its merge (see `round`); 0: no delay.
        fragments: F <= local_steps, parts of the weights whose rounds are at different local steps (see
            `fragments`).
        slow_weights: "host" keeps slow weights and outer momentum in (pinned) host memory, "device" beside the
            weights.
    """

    local_steps: int = 50
    outer_momentum: float = 0.5
    outer_lr: float = 0.7
    consensus_weight: float | None = None
    deadline_seconds: float = 600.0
    payload: Payload = "fp32"
    delay_steps: int = 0
    fragments: int = 1
    slow_weights: Literal["host", "device"] = "host"

    def __post_init__(self) -> None:
        check_integers(local_steps=self.local_steps, delay_steps=self.delay_steps, fragments=self.fragments)
        check_finite(
            outer_momentum=self.outer_momentum,
            outer_lr=self.outer_lr,
            consensus_weight=self.gamma,
            deadline_seconds=self.deadline_seconds,
        )
        for name, sound, range_ in (
            ("local_steps", self.local_steps >= 1, "at least 1"),
            ("outer_momentum", 0 <= self.outer_momentum < 1, "at least 0 and below 1"),
            ("outer_lr", self.outer_lr > 0, "above 0"),
            ("consensus_weight", self.gamma >= 0, "None or at least 0"),
            ("deadline_seconds", self.deadline_seconds > 0, "above 0"),
            ("payload", self.payload in get_args(Payload), f"one of {get_args(Payload)}"),
            (
                "delay_steps",
                0 <= self.delay_steps <= self.local_steps,
                f"from 0 to local_steps {self.local_steps}",
            ),
            (
                "fragments",
                1 <= self.fragments <= self.local_steps,
                f"from 1 to local_steps {self.local_steps}",
            ),
            ("slow_weights", self.slow_weights in ("host", "device"), '"host" or "device"'),
        ):
            if not sound:
                raise ValueError(f"{name} must be {range_}, not {getattr(self, name)!r}")

    @property
    def payload_bits(self) -> int | None:
        """Of a code; None for fp32."""
        return None if self.payload == "fp32" else int(self.payload.removeprefix("int"))

    @property
    def gamma(self) -> float:
        """The consensus weight in force."""
        return self.outer_lr if self.consensus_weight is None else self.consensus_weight


def gossip_of(settings: OuterSettings, grouping: Grouping) -> Gossip:
    """What decides whether the replicas stay together."""
    cycle = prime_factors(grouping.replicas) if grouping.pairing == "cycle" else ()
    everyone = grouping.group_size == grouping.replicas and len(cycle) < 2
    return Gossip(
        settings.outer_momentum,
        settings.gamma,
        math.inf if everyone else grouping.group_size,
        cycle,
        settings.fragments,
        settings.payload,
    )
