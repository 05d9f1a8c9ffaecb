"""The block `federation`: replicas as separate jobs."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megatron_noloco.config.blocks import Block, Positive
from megatron_noloco.config.noloco_block import NolocoConfig
from megatron_noloco.config.parallel_block import ParallelConfig


class FederationConfig(Block):
    slots: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="Replicas that there may be; each is a job of its own, `train --replica I`, and may be "
        "absent. null: all replicas are one job.",
    )
    rendezvous: str | None = Field(
        default=None,
        description='How jobs find each other: "file://FOLDER", which all can write, or "tcp://HOST:PORT,...", '
        "addresses of one or more replicas, from any one of which the others are learned.",
    )
    listen: str | None = Field(
        default=None,
        description="Where the first rank of a replica listens, as ZeroMQ writes it, the others at the ports that "
        'follow; "*": every interface, port 0: any. null: "tcp://*:0" with a folder, with addresses the port that '
        "all have.",
    )
    advertise: str | None = Field(
        default=None,
        description='Where others reach the first rank of a replica, "tcp://HOST:PORT", and its others at the '
        "ports that follow, if that is not where it listens: behind a router that passes these ports on.",
    )
    encryption: Literal["curve", "none"] = Field(
        default="curve",
        description='"curve": ZeroMQ\'s CURVE, with the key in key_file; "none": in the open, for a network '
        "that is trusted, or a tunnel.",
    )
    key_file: str | None = Field(
        default=None, description="The key of all members, made by `megatron_noloco keys FILE`."
    )
    shortest_deadline_seconds: float = Field(
        default=5.0,
        gt=0,
        description="A partner is waited for so long at least, however quick exchanges are, and "
        "noloco.deadline_seconds at most.",
    )
    rounds_behind: Positive = Field(
        default=3,
        description="A replica that is so many rounds behind is not waited for, and goes on where half of the "
        "others are, whatever local_steps says; at its start it takes over a checkpoint that is further ahead of "
        "its own.",
    )
    local_steps: Literal["auto", "all"] = Field(
        default="auto",
        description='"auto": a replica that is slower than half of the others leaves out local steps before a '
        'round, so that its partners need not wait for it; "all": it takes all of noloco.local_steps.',
    )
    start_with: Positive = Field(
        default=1,
        description="Replicas, this one included, to wait for before the first local step; "
        "noloco.deadline_seconds at most.",
    )


def check_federation(
    federation: FederationConfig, noloco: NolocoConfig, parallel: ParallelConfig
) -> Iterator[str]:
    """What separate jobs cannot do, and what they need."""
    if federation.slots is None:
        if federation.rendezvous is not None:
            yield "federation.slots is missing, the number of replicas that there may be"
        return
    if federation.rendezvous is None:
        yield "federation.rendezvous is missing: how the jobs of a federation find each other"
    if federation.encryption == "curve" and federation.key_file is None:
        yield (
            "federation.key_file is missing: `megatron_noloco keys FILE` makes one; in a trusted network "
            'federation.encryption "none" does without'
        )
    if federation.start_with > federation.slots:
        yield f"federation.start_with {federation.start_with} is more than federation.slots {federation.slots}"
    if parallel.replicas not in ("auto", 1):
        yield f"parallel.replicas {parallel.replicas}: a job of a federation is one replica; leave it out"
    if noloco.active_method != "noloco" or noloco.group_size != 2:
        yield (
            'federation: a round is of two jobs; noloco.enabled must be true, noloco.method "noloco" and '
            "noloco.group_size 2"
        )
    if noloco.grouping == "stage":
        yield (
            'noloco.grouping "stage": in a federation all ranks of a replica decide together whether a round '
            'counts; use "replica"'
        )
    if noloco.final_average:
        yield "noloco.final_average needs all replicas at the same time, which a federation does not have"
    if noloco.transport != "auto":
        yield f'noloco.transport "{noloco.transport}": a federation has a transport of its own; leave it out'
    if noloco.routing.interval != "off" and parallel.pipeline_model_parallel_size > 1:
        yield (
            f'noloco.routing.interval "{noloco.routing.interval}": a local step would wait for replicas that are '
            'other jobs; set it to "off"'
        )
