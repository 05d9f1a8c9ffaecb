"""What a config asks for between replicas; the trainer and the simulator build it here."""

from collections.abc import Callable
from dataclasses import fields

from megatron_noloco.config import RunConfig
from megatron_noloco.federation.commit import committing
from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.outer import (
    Channel,
    Exchange,
    ExchangeReport,
    NoRounds,
    OuterOptimizer,
    OuterSettings,
    Rounds,
    Weights,
)
from megatron_noloco.plans.grouping import averaging_cycle
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.protocol import Transport

FinalAverage = Callable[[int], list[ExchangeReport]]
"""final_average(done): called after the last local step on all ranks; all replicas are then their mean."""


def build_outer(config: RunConfig, weights: Weights, transport: Transport, place: Place) -> Rounds:
    """The outer optimizer of this rank, or what stands in for it where there are no rounds."""
    noloco = config.noloco
    if not noloco.enabled:
        return NoRounds(weights)
    grouping = config.grouping(place.replicas)
    numbers = {field.name: getattr(noloco, field.name) for field in fields(OuterSettings)}
    commit = None
    if isinstance(transport, FederationTransport):
        commit = committing(transport.partners, grouping, place.replica, noloco.fragments)
    return OuterOptimizer(weights, transport, place, grouping, OuterSettings(**numbers), commit)


def build_final_average(
    config: RunConfig, outer: Rounds, transport: Transport, place: Place
) -> FinalAverage | None:
    """None where the config wants none, and where there are no rounds."""
    if not config.noloco.final_average or isinstance(outer, NoRounds):
        return None
    groups = averaging_cycle(place.replica, place.replicas, config.training.seed)
    exchange = Exchange(transport, place, Channel.FINAL, config.noloco.deadline_seconds)
    return lambda done: outer.settle(exchange, groups, done * len(groups))
