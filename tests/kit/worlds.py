"""Replicas of one rank in a `World`, with everything that a leader has."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.members import Members
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.movement import Movement, alone
from megatron_noloco.federation.pairing import Pairing
from megatron_noloco.federation.partners import Partners
from megatron_noloco.federation.rounds import Replica
from megatron_noloco.federation.statuses import PeerStatus
from megatron_noloco.outer import ExchangeReport
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import NolocoSettings
from tests.kit.fleet import noise
from tests.kit.memory_mesh import World

DEADLINE = 15.0
LENGTH, BUCKET = 400, 100


class Used(NamedTuple):
    """What a replica uses after a round."""

    vector: Tensor
    report: ExchangeReport

    @property
    def counts(self) -> bool:
        return len(self.report.group) == 2


def members_of(world: World, slot: int, incarnation: int = 1, **status: Any) -> Members:
    """Add a replica."""
    hidden = status.get("hidden", False)
    return Members(world.join(slot, incarnation, hidden), PeerStatus(**status))


def replica_of(
    members: Members,
    movement: Movement | None = None,
    payload: str = "fp32",
    deadline: float = DEADLINE,
    shortest: float | None = None,
) -> Replica:
    """Return a replica of one rank."""
    partners = Partners(members, shortest or deadline, deadline, 1000)
    noloco = NolocoSettings(payload=payload, deadline_seconds=deadline)
    movement = movement or alone(LENGTH, bucket=BUCKET)
    return Replica(Gather(movement), Place(members.slot, None), Pairing(noloco, 1), partners)


def take_part(replica: Replica, vector: Tensor, number: int, phase: float = 0.0) -> Used:
    """Take part in a round, in which this replica computes local steps for so many seconds."""
    assert replica.partners is not None
    mesh = replica.partners.members.mesh
    exchange = replica.exchange()
    exchange.begin(vector.clone(), (), number, "a test")
    pause(mesh, phase)
    (piece,) = exchange.finish()
    return Used(piece.mean.clone(), exchange.report)


def pause(mesh: Any, seconds: float) -> None:
    if seconds:
        mesh.wait(lambda: False, mesh.clock() + seconds)


def vectors(seed: int = 0, length: int = LENGTH) -> list[Tensor]:
    base = noise(length, seed=seed)
    return [base + 0.01 * noise(length, seed=seed + 1 + slot) for slot in range(2)]


def run_all(world: World, bodies: Sequence[tuple[Members, Callable[[], Any]]]) -> list[Any]:
    """Run a function of each replica beside the others; return what they return, None for those that were
    killed.
    """
    futures = [world.spawn(members.mesh.me, body) for members, body in bodies]
    world.run()
    ends = zip(futures, bodies, strict=True)
    return [None if members.mesh.me in world.dead else future.result(0) for future, (members, _) in ends]


def mean_of(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).mean(0)


FIRST, SECOND = Member(0, 1), Member(1, 1)
