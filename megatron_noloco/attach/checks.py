"""Checks of `attach` before the first step: its arguments, then whether the ranks of the job fit together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import Tensor

from megatron_noloco.attach.first_state import Fingerprint, digest_of_replica, fingerprints_of
from megatron_noloco.attach.job_state import check_state, hexadecimal
from megatron_noloco.attach.replica_groups import check_reduced_over
from megatron_noloco.attach.shards import Engine, held
from megatron_noloco.errors import UserError
from megatron_noloco.plans.canonical import Block
from megatron_noloco.plans.topology import Topology
from megatron_noloco.settings import (
    MOST_SLOTS,
    FederationSettings,
    NolocoSettings,
    federation_problems,
    groups_problem,
)

_HAS_STATE = "whether there is a state"


def check_arguments(
    settings: NolocoSettings,
    replicas: int | None,
    federation: FederationSettings | None,
    slot: int | None,
    seed: int,
    stopped: Callable[[], bool] | None,
) -> None:
    """Raise UserError for arguments of `attach` that do not fit together."""
    for name, value, kind in (
        ("settings", settings, NolocoSettings),
        ("federation", federation, FederationSettings),
    ):
        if not isinstance(value, kind | None):
            raise UserError(f"attach: {name} must be {kind.__name__}(...), not {value!r}")
    if (replicas is None) == (federation is None):
        raise UserError(
            "attach: give replicas, where this job holds all of them, or federation, where it is one of them"
        )
    if replicas is not None and not _is_integer(replicas):
        raise UserError(f"attach: replicas must be an integer, not {replicas!r}")
    if stopped is not None and not callable(stopped):
        raise UserError(
            f"attach: stopped must be a function, such as is_set of a threading.Event, not {stopped!r}"
        )
    if not _is_integer(seed) or seed < 0:
        raise UserError(f"attach: seed must be an integer >= 0, not {seed!r}")
    if settings.overlap_steps == "auto":
        raise UserError('attach: overlap_steps "auto" is for `train` only; give a number of local steps')
    if federation is None:
        for name, given in {"slot": slot, "stopped": stopped}.items():
            if given is not None:
                raise UserError(f"attach: {name} is for a federation; leave it out with replicas")
        return
    if problem := next(federation_problems(federation, settings), ""):
        raise UserError(f"attach: {problem}")
    if slot is None or not _is_integer(slot) or not 0 <= slot < MOST_SLOTS:
        raise UserError(f"attach: slot must be from 0 to {MOST_SLOTS - 1}, not {slot!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class StartReport:
    """Tells the other ranks of the job how one rank starts.

    Attributes:
        problem: why this rank cannot begin; empty where it can.
        alike: values that must be equal on all ranks, by name.
        lengths: of the parts of its weights.
        first: what its training began with, by name; a digest of the replica that was saved is a text alone.
        held: see `shards.held`.
    """

    problem: str
    alike: dict[str, Any]
    lengths: list[int]
    first: dict[str, Fingerprint]
    held: list[Block] | None


def start_report(
    engine: Engine,
    topology: Topology,
    rank: int,
    settings: NolocoSettings,
    seed: int,
    state: Mapping[str, Tensor] | None,
) -> StartReport:
    """Return the report of this rank."""
    problem, first = "", fingerprints_of(engine)
    alike = settings.model_dump() | {"seed": seed, "slot": topology.slot, _HAS_STATE: state is not None}
    try:
        if wrong := groups_problem(settings, topology.total_replicas):
            raise UserError(f"attach: {wrong}")
        check_reduced_over(engine, topology, rank)
        if state is not None:
            check_state(state, engine)
            alike |= {"local_steps_done": int(state["local_steps_done"])}
            for name in ("weights", "buffers"):  # which change
                first[name] = Fingerprint(hexadecimal(state[f"first_{name}"]), {})
    except UserError as error:
        problem = str(error)
    lengths = [shard.length for shard in engine.shards]
    return StartReport(problem, alike, lengths, first, held(engine))


def digests_of(replica: Sequence[StartReport]) -> dict[str, list[str]]:
    """Return digests of what a replica began with, by name: one, or one of each rank where `held` is None."""
    alike = [[one] for one in replica] if replica[0].held is None else [replica]
    return {
        name: [digest_of_replica([one.first[name] for one in ranks]) for ranks in alike]
        for name in replica[0].first
    }


def check_start(ranks: Sequence[StartReport], rank: int, topology: Topology) -> None:
    """Raise UserError on all ranks where one of them cannot begin, or not together with the others."""
    if problems := [one.problem for one in ranks if one.problem]:
        raise UserError(ranks[rank].problem or problems[0])
    for name, value in ranks[0].alike.items():
        for other, one in enumerate(ranks):
            if one.alike[name] != value:  # the first that differs: without a state there are no further ones
                raise UserError(
                    f"attach: {name} is {value!r} on rank 0 and {one.alike[name]!r} on rank {other}; it must be "
                    "the same on all ranks"
                )
    if not topology.separate_jobs:
        _check_equal_replicas(ranks, topology.replica_size)


def _check_equal_replicas(ranks: Sequence[StartReport], replica_size: int) -> None:
    """Raise UserError where the replicas of one job did not begin with equal weights."""
    for rank, one in enumerate(ranks):
        first = ranks[rank % replica_size]
        if differs := [name for name, digest in one.first.items() if digest != first.first[name]]:
            remedy = (
                "their states are of different runs"
                if one.alike[_HAS_STATE]
                else "seed all replicas alike, or load the same checkpoint, before the model is wrapped "
                "(DistributedDataParallel, deepspeed.initialize)"
            )
            what, replica = " and ".join(differs), rank // replica_size
            raise UserError(f"the {what} of replica {replica} differ from those of replica 0; {remedy}")
