"""For tests of attach: jobs with a torch.distributed world of their own, and the rounds that they must have."""

import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

from megatron_noloco.attach import Attached, attach
from megatron_noloco.attach.inner import Inner, Stateful
from megatron_noloco.attach.job_state import JobState
from megatron_noloco.attach.shards import Engine
from megatron_noloco.federation import membership
from megatron_noloco.federation.federation_peers import FederationPeers
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.network import Network
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.settings import PAPER, FederationSettings, NolocoSettings
from tests.kit.ranks import LAUNCH_VARIABLES, key_file, run_ranks

SECONDS = 60.0
EXACT = {"rtol": 0, "atol": 1e-6}


def paper(**changes: Any) -> NolocoSettings:
    """Return the settings that `by_the_equations` has, with changes."""
    return NolocoSettings(**PAPER | {"deadline_seconds": SECONDS} | changes)


def by_the_equations(first: Tensor, before: Tensor, seed: int) -> Tensor:
    """Return the weights after each round, with alpha 0.5 and beta = gamma = 0.7 (see `outer.step`).

    Args:
        first: with which all replicas began, shape [elements].
        before: each round, shape [rounds, replicas, elements].
        seed: of the pairs.
    """
    replicas, after = before.shape[1], []
    phi, delta = first.repeat(replicas, 1), torch.zeros_like(before[0])
    for round_index, theta in enumerate(before):
        for group in map(list, Grouping(replicas, 2, seed).groups(round_index)):
            delta[group] = 0.5 * delta[group] + 0.7 * theta[group].mean(0) - 0.7 * phi[group]
        phi = phi + delta
        after.append(phi)
    return torch.stack(after)


def trained(
    noloco: Attached,
    step: Callable[[int], object],
    weights: Callable[[], Tensor],
    rounds: int,
    exchange: Callable[[], Sequence[object]] | None = None,
) -> dict[str, Tensor]:
    """Return the first weights, and those before and after each round, shape [rounds, elements].

    Args:
        step: takes a local step, or computes a microbatch; its number is given.
        exchange: in the place of `noloco.step`.
    """
    first, before, after, number = weights(), list[Tensor](), list[Tensor](), 0
    while len(after) < rounds:
        step(number)
        theta = weights()
        if (exchange or noloco.step)():
            before.append(theta)
            after.append(weights())
        number += 1
    return {"first": first, "before": torch.stack(before), "after": torch.stack(after)}


def assert_by_the_equations(
    found: Sequence[dict[str, Any]], size: int, seed: int, **tolerance: float
) -> None:
    """Compare what the ranks of replicas, of so many ranks each, have `trained`."""
    before = torch.stack([one["before"] for one in found[::size]], dim=1)
    assert not torch.equal(before[:, 0], before[:, 1]), "each replica has data of its own"
    expected = by_the_equations(found[0]["first"], before, seed)
    for rank, one in enumerate(found):
        torch.testing.assert_close(one["after"], expected[:, rank // size], **tolerance or EXACT)


def federation(folder: Path, slot: int, slots: int, **changes: Any) -> dict[str, Any]:
    """Return arguments of `attach` with which all jobs begin together, and wait for each other."""
    settings = {
        "rendezvous": f"file://{folder}/rendezvous",
        "key_file": key_file(folder),
        "skip_local_steps": False,
        "listen": "tcp://127.0.0.1:0",
        "start_with": slots,
        "rounds_behind": 1000,
        "shortest_deadline_seconds": SECONDS,
    }
    return {"federation": FederationSettings(**(settings | changes)), "slot": slot}


def run_jobs(
    folder: Path,
    slots: int,
    ranks: int | Sequence[int],
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    backend: str = "gloo",
) -> list[list[Any]]:
    """Return `function(slot, rank, *args)` by slot and rank; a job of one rank has no torch.distributed.

    Args:
        ranks: of each job, or of all.
        backend: of the default group.
    """
    sizes = [ranks] * slots if isinstance(ranks, int) else ranks
    starts = [*accumulate(sizes, initial=0)]

    def job(rank: int, world_size: int) -> Any:
        warnings.filterwarnings("error", "started, though fewer jobs than")
        warnings.filterwarnings("error", "the replicas had equal weights")
        slot = bisect_right(starts, rank) - 1
        rank -= starts[slot]
        if slots == 1:
            membership.FIRST_SECONDS = 0.0  # no other job comes
        dist.barrier()  # all have joined
        dist.destroy_process_group()
        if sizes[slot] > 1:
            store = dist.FileStore(str(folder / f"job_{slot}"), sizes[slot])
            dist.init_process_group(backend, store=store, rank=rank, world_size=sizes[slot])
        else:  # as a process that no launcher has started
            for name in LAUNCH_VARIABLES:
                del os.environ[name]
        return function(slot, rank, *args)

    found = run_ranks(starts[-1], job, timeout=timeout)
    return [found[start:stop] for start, stop in pairwise(starts)]


def refusal(call: Callable[[], object]) -> str:
    """Return the ValueError of a call; "taken" where it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "taken"


class Reached(Exception):
    """What a job would compare."""


def network_of_attach(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> Network:
    """Return what `attach` would compare with these arguments; nothing is opened."""

    def reached(network: Network, *_: object) -> NoReturn:
        raise Reached(network)

    monkeypatch.setattr(Network, "open", reached)
    with pytest.raises(Reached) as caught:
        attach(*arguments, **options)
    network: Network = caught.value.args[0]
    return network


def members_of(noloco: Attached) -> Members:
    """Return what a job's leader sees of the others."""
    assert isinstance(noloco._peers, FederationPeers)
    assert noloco._peers._membership.members is not None
    return noloco._peers._membership.members


def assert_inner_optimizer_is_handed_over(
    engine: Engine, optimizer: Stateful, step: Callable[[int], Tensor]
) -> None:
    """Compare a fourth step with the same step from the state after the third, and from that state's weights only.

    Args:
        step: takes the local step of this number, and returns the weights.
    """
    outer: Any = SimpleNamespace(
        state=lambda wait: {"slow_weights": engine.read()}, restore=lambda state: None
    )
    for number in range(3):
        step(number)
    inner = Inner(engine, [optimizer])
    states = [JobState(engine, outer, given, {}, {}).copy(3) for given in (inner, None)]
    expected, found = step(3), []
    for state in states:
        step(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the inner optimizer begins anew
            JobState(engine, outer, inner, {}, {}).load(state)
        found.append(step(3))
    assert [torch.equal(weights, expected) for weights in found] == [True, False]
