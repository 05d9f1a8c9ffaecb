"""Stands for the members of a federation, where only their statuses matter."""

from dataclasses import replace
from typing import Any

from megatron_noloco.federation.members import Peer
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.statuses import PeerStatus, Phase

ENDED, LEFT = -2, -3  # in place of the round that a replica has begun last


def peer_at(begun: int, present: bool = True, slot: int = 1, **status: Any) -> Peer:
    """A replica that has begun a round, is at its end or has left."""
    phase: Phase = {ENDED: "ended", LEFT: "left"}.get(begun, "training")  # type: ignore[assignment]
    status = {"phase": phase, "begun": max(begun, -1)} | status
    return Peer(Member(slot, 1), PeerStatus(**status), present, present)


class Others:
    """Stands for `Members`, where the others have begun these rounds."""

    def __init__(self, begun: list[int], slot: int = 0) -> None:
        self.numbers, self.at, self.mesh = begun, 0.0, self
        self.slot, self.me, self.status = slot, Member(slot, 1), PeerStatus()
        self.told: list[tuple[Any, ...]] = []

    def clock(self) -> float:
        return self.at

    def check(self) -> None: ...

    def known(self) -> dict[Member, PeerStatus]:
        return {peer.member: peer.status for peer in self.peers().values()} | {self.me: self.status}

    def publish_reached(self) -> None: ...

    def go_on(self, *told: Any) -> None:
        self.told.append(told)

    def change(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)

    def peers(self) -> dict[int, Peer]:
        return {slot: peer_at(begun, slot=slot) for slot, begun in enumerate(self.numbers, 1)}

    def peer(self, slot: int) -> Peer | None:
        return self.peers().get(slot)

    def present(self) -> dict[int, PeerStatus]:
        return {slot: peer.status for slot, peer in self.peers().items() if peer.present}
