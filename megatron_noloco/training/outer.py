"""The outer optimizer that a config asks for; the trainer and the simulator build it here."""

from dataclasses import fields

from megatron_noloco.config import RunConfig
from megatron_noloco.outer import NoRounds, OuterOptimizer, OuterSettings, Rounds, Weights
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.protocol import Transport


def build_outer(config: RunConfig, weights: Weights, transport: Transport, place: Place) -> Rounds:
    """The outer optimizer of this rank, or what stands in for it where there are no rounds."""
    noloco = config.noloco
    if not noloco.enabled:
        return NoRounds(weights)
    grouping = config.grouping(place.replicas)
    numbers = {field.name: getattr(noloco, field.name) for field in fields(OuterSettings)}
    return OuterOptimizer(weights, transport, place, grouping, OuterSettings(**numbers))
