"""What `attach` makes sure of before the first step."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.attach.trained import Trained
from megatron_noloco.outer import Weights
from megatron_noloco.plans.topology import Topology

_AT_ONCE = 1 << 24  # weights that a digest reads at a time
_SAVED = ("slow_weights", "local_steps_done", "first_weights")


def check_reach(trained: Trained, topology: Topology, rank: int) -> None:
    """Raises ValueError where gradients are not reduced over the ranks of this rank's replica, and no other."""
    if trained.reduced_over is None:
        if not topology.slots:
            raise ValueError(
                "attach: with Megatron-core's optimizer each replica is a job of its own; give federation"
            )
        return
    own = topology.grid[topology.position(rank).replica - topology.slot].ravel().tolist()
    if sorted(trained.reduced_over) != own:
        remedy = trained.remedy[bool(topology.slots)].format(replicas=topology.replicas)
        raise ValueError(
            f"rank {rank}: the gradient all-reduce of this model spans ranks {sorted(trained.reduced_over)}, its "
            f"replica is {own}; {remedy}"
        )


@dataclass(frozen=True)
class Statement:
    """What a rank tells the others of its job before the first step.

    Attributes:
        problem: why this rank cannot begin; empty where it can.
        state: whether it continues from a state.
        alike: what all ranks have to have alike, by name.
        lengths: of the parts of its weights.
        first_weights: a digest of the weights with which its training began.
    """

    problem: str
    state: bool
    alike: dict[str, Any]
    lengths: list[int]
    first_weights: bytes


def statement_of(
    trained: Trained,
    topology: Topology,
    rank: int,
    alike: dict[str, Any],
    state: Mapping[str, Tensor] | None,
    problem: str,
) -> Statement:
    """Return the statement of this rank.

    Args:
        alike: what all ranks must have alike, besides the local steps done in their states.
        problem: with the settings; empty where there is none.
    """
    digest = digest_of(trained.weights)
    try:
        if problem:
            raise ValueError(f"attach: {problem}")
        check_reach(trained, topology, rank)
        if state is not None:
            _check_state(state, trained.weights, digest)
            alike = alike | {"local_steps_done": int(state["local_steps_done"])}
            digest = _bytes_of(state["first_weights"])
    except ValueError as error:
        problem = str(error)
    lengths = [part.numel() for part in trained.weights.parts()]
    return Statement(problem, state is not None, alike, lengths, digest)


def digest_of(weights: Weights) -> bytes:
    """Of the bits of this rank's weights in fp32."""
    digest, memory = hashlib.sha256(), torch.empty(min(weights.length, _AT_ONCE))
    for start in range(0, weights.length, _AT_ONCE):
        piece = memory[: weights.length - start]
        weights.read_into(piece, start)
        digest.update(piece.numpy().data)
    return digest.digest()


def tensor_of(digest: bytes) -> Tensor:
    """As a state holds it."""
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _bytes_of(digest: Tensor) -> bytes:
    return digest.cpu().numpy().tobytes()


def _check_state(state: Mapping[str, Tensor], weights: Weights, digest: bytes) -> None:
    """Raises ValueError for a state that was not saved together with the weights that are here now."""
    if missing := [name for name in _SAVED if name not in state]:
        raise ValueError(
            f"attach: state has no {missing[0]}; it must be what Attached.state_dict returned, or None"
        )
    if (length := len(state["slow_weights"])) != weights.length:
        raise ValueError(
            f"attach: the state is of {length} weights, this rank has {weights.length}; each rank needs the one "
            "that it saved itself"
        )
    if "weights" in state and _bytes_of(state["weights"]) != digest:  # 0.1.0 did not save it
        raise ValueError(
            "attach: the model is not the one this state was saved with: load its checkpoint first, with the "
            "optimizer's state, and give each rank the state that it saved itself"
        )


def check_statements(ranks: Sequence[Statement], rank: int, topology: Topology) -> None:
    """Raises ValueError, on all ranks, where one of them cannot begin, or not together with the others."""
    if problems := [one.problem for one in ranks if one.problem]:
        raise ValueError(ranks[rank].problem or problems[0])
    for other, one in enumerate(ranks):
        if one.state != ranks[0].state:
            has, lacks = (0, other) if ranks[0].state else (other, 0)
            raise ValueError(
                f"attach: rank {lacks} has no state, rank {has} has; give each rank its own, or none"
            )
    for name, value in ranks[0].alike.items():
        for other, one in enumerate(ranks):
            if one.alike[name] != value:
                raise ValueError(
                    f"attach: {name} is {value!r} on rank 0 and {one.alike[name]!r} on rank {other}; it must be "
                    "the same on all ranks"
                )
    if not topology.slots:
        _check_counterparts(ranks, topology.replica_size)


def _check_counterparts(ranks: Sequence[Statement], replica_size: int) -> None:
    """That the replicas of one job began with equal weights."""
    for rank, one in enumerate(ranks):
        first = ranks[rank % replica_size]
        replica, length, expected = rank // replica_size, sum(one.lengths), sum(first.lengths)
        if length != expected:
            raise ValueError(
                f"attach: rank {rank} of replica {replica} has {length} weights, rank {rank % replica_size} of "
                f"replica 0 has {expected}; all replicas must train the same parameters of the same model"
            )
        if one.first_weights != first.first_weights:
            remedy = (
                "their states are of different runs"
                if one.state
                else "seed all replicas alike, or load the same checkpoint, before the model is wrapped "
                "(DistributedDataParallel, deepspeed.initialize)"
            )
            raise ValueError(f"the weights of replica {replica} differ from those of replica 0; {remedy}")
