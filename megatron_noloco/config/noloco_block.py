"""The block `noloco`: with whom replicas average, when, and what travels."""

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator

from megatron_noloco.config.blocks import Block, NonNegative, Positive
from megatron_noloco.config.method import ActiveMethod, Method, active_method
from megatron_noloco.plans.grouping import Pairing, prime_factors
from megatron_noloco.plans.stability import Gossip

_ROUNDED = {"fp16": "6 %", "bf16": "50 %"}  # tools/bench_payload.py


class RoutingConfig(Block):
    interval: Literal["round", "step", "microbatch", "off"] = Field(
        default="round",
        description="How often the pipelines of the replicas are reshuffled among each other.",
    )


class OverlapConfig(Block):
    mode: Literal["none", "delayed"] = Field(
        default="none",
        description='"none": training waits for the exchange of a round; "delayed": it goes on meanwhile, and the '
        "outcome is merged delay_steps local steps later.",
    )
    delay_steps: NonNegative | Literal["auto"] = Field(
        default="auto",
        description='d, at most local_steps (mode "delayed" only); "auto": the smallest d that hides the '
        "exchanges of the first rounds, in which training waits.",
    )


class NolocoConfig(Block):
    """The method: rounds between replicas, and routing."""

    enabled: bool = Field(
        default=True, description="Whether replicas average at all; false: each trains on its own."
    )
    method: Method = Field(
        default="noloco",
        description='With whom a replica averages: "noloco" a random group, "diloco" all replicas.',
    )
    local_steps: Positive = Field(default=50, description="k: inner optimizer steps between two rounds.")
    outer_momentum: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="alpha: the share of the outer momentum buffer kept from round to round.",
    )
    outer_lr: float = Field(
        default=0.7, gt=0, description="beta: the weight of the group's mean outer gradient."
    )
    consensus_weight: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="gamma: the pull towards the group's mean slow weights; null means outer_lr.",
    )
    group_size: Annotated[int, Field(ge=2)] = Field(
        default=2, description='n: replicas in a group; 2 is a pair (method "noloco" only).'
    )
    pairing: Pairing = Field(
        default="random",
        description='How groups are drawn: "random", or in a "cycle" that connects all replicas; its rounds '
        'have the prime factors of replicas as group sizes, none above n (method "noloco" only).',
    )
    final_average: bool = Field(
        default=False,
        description="Whether the last local step is followed by plain averages that make all replicas equal to "
        "their mean: one exchange for each prime factor of replicas.",
    )
    grouping: Literal["replica", "stage"] = Field(
        default="replica",
        description="Whether groups are drawn for whole replicas or for each stage on its own.",
    )
    transport: Literal["auto", "mpi", "torch"] = Field(
        default="auto",
        description='What carries the exchange; "auto" is MPI when the job was started by mpirun.',
    )
    deadline_seconds: float = Field(
        default=600.0,
        gt=0,
        description="How long a replica waits for its group before the round counts as failed.",
    )
    payload: Literal["fp32", "int16", "int8", "int4"] = Field(
        default="fp32",
        description="What an exchange sends per weight: fp32, or integers that tell the difference to the "
        "partner. docs/exchange.md has bytes and errors.",
    )
    slow_weights: Literal["host", "device"] = Field(
        default="host",
        description="Where slow weights and outer momentum live: host memory, or the accelerator's.",
    )
    fragments: Positive = Field(
        default=1,
        description="F, at most local_steps: the weights are exchanged in F parts, each at its own local step of "
        "the k; 1: all at once.",
    )
    overlap: OverlapConfig = Field(
        default=OverlapConfig(), description="Whether training goes on during an exchange."
    )
    routing: RoutingConfig = Field(
        default=RoutingConfig(), description="Which replicas a microbatch visits, stage by stage."
    )

    @field_validator("payload", mode="before")
    @classmethod
    def _not_rounded(cls, payload: object) -> object:
        if isinstance(payload, str) and payload in _ROUNDED:
            raise ValueError(
                f'"{payload}" rounds the weights themselves, so that its error grows with |weights| / |outer '
                f'gradient|: at 300 it is {_ROUNDED[payload]} of the pull; "int16" takes the same bytes and has '
                "0.05 % at any"
            )
        return payload

    @property
    def active_method(self) -> ActiveMethod:
        """The method in force; "none" where `enabled` is false."""
        return active_method(self.enabled, self.method)

    @property
    def gamma(self) -> float:
        """The consensus weight in force."""
        return self.outer_lr if self.consensus_weight is None else self.consensus_weight

    @property
    def delays(self) -> bool:
        """Whether rounds are, sooner or later, merged some local steps after they began."""
        return self.enabled and self.overlap.mode == "delayed" and self.overlap.delay_steps != 0

    @property
    def chooses_delay(self) -> bool:
        """Whether the run itself finds out by how many local steps."""
        return self.delays and self.overlap.delay_steps == "auto"

    @property
    def delay_steps(self) -> int:
        """d of the first rounds."""
        return self.overlap.delay_steps if self.delays and self.overlap.delay_steps != "auto" else 0

    def gossip(self, replicas: int | None) -> Gossip:
        """Among `replicas`, if their number is known."""
        everyone = self.active_method == "diloco"
        cycles = self.pairing == "cycle" and replicas is not None and not everyone
        return Gossip(
            self.outer_momentum,
            self.gamma,
            math.inf if everyone else self.group_size,
            prime_factors(replicas) if cycles and replicas else (),
            self.fragments,
            self.payload,
        )

    def group_size_among(self, replicas: int) -> int:
        """How many of `replicas` average together in a round; 1 is nobody."""
        if replicas == 1:
            return 1
        return {"noloco": self.group_size, "diloco": replicas, "none": 1}[self.active_method]
