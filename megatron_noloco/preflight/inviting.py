"""How a machine with the key writes an invitation: which slot it gives away, and where a newcomer finds others."""

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from megatron_noloco.config import RunConfig
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.federation.folder_carrier import FolderCarrier
from megatron_noloco.federation.keys import VISITOR, Identity, Keys
from megatron_noloco.federation.mesh import Member, Mesh
from megatron_noloco.federation.network import Network
from megatron_noloco.federation.statuses import PeerStatus, Statuses
from megatron_noloco.federation.store import Store
from megatron_noloco.federation.visit import visit
from megatron_noloco.files import outside
from megatron_noloco.preflight.invitation import MOST_ADDRESSES, Invitation, can_name, reserve
from megatron_noloco.preflight.newcomer import offered
from megatron_noloco.settings import MOST_SLOTS, TCP

_FIRST = 0  # slot of the machine that writes the config, which may not have started its job yet
_LOOK_SECONDS = 6.0  # in which the signs of life of those that are there move twice


def keys_of_inviter(config: RunConfig, path: str, slot: int | None, at: str | None) -> Keys:
    """Return the key of a federation. Raises UserError where this machine cannot invite.

    Args:
        slot, at: see `invite`.
    """
    federation = config.federation
    if not federation.exists or federation.key_file is None:
        raise UserError(f"{path}: invite needs a federation: federation.rendezvous and federation.key_file")
    if slot is not None and not 0 <= slot < MOST_SLOTS:
        raise UserError(f"invite: --slot {slot}: the slots are 0 to {MOST_SLOTS - 1}")
    rendezvous = str(federation.rendezvous)
    if not rendezvous.startswith(TCP) and not can_name(rendezvous):
        raise UserError(f"invite: an invitation cannot name {rendezvous}; copy config and key instead")
    if not rendezvous.startswith(TCP) and at is not None:
        raise UserError("invite: --at: the jobs of this federation meet in a folder; leave it out")
    keys = Keys.read(Path(federation.key_file))
    if not keys.can_invite:
        raise UserError(
            "invite: this machine joined by an invitation, which cannot invite: ask a machine that has the "
            "federation's key"
        )
    return keys


def invite(
    config: RunConfig,
    keys: Keys,
    network: Network,
    tokenizer: Tokenizer,
    *,
    slot: int | None,
    ends: float,
    at: str | None,
) -> Invitation:
    """Return an invitation, whose slot is given away until it ends. Raises UserError.

    Args:
        network: of the config.
        slot: that the newcomer takes; None: a free slot.
        ends: Unix time until which the newcomer can be a member.
        at: HOST:PORT of a running job; None: any that the rendezvous knows.
    """
    others: tuple[Mapping[Member, PeerStatus], Collection[Member]]
    folder, identity = network.folder, keys.identity(VISITOR)
    try:
        if folder is None:
            others = _of_network(identity, network.run, [at] if at else network.seeds)
        else:
            others = _of_folder(folder, network, identity)
        statuses, present = others
        if slot in {member.slot for member in present}:
            raise UserError(f"invite: replica {slot} is running: stop it first, or leave out --slot")
        key_file, known = Path(str(config.federation.key_file)), {member.slot for member in statuses}
        slot = reserve(key_file, slot, known | {_FIRST}, ends)
    except OSError as error:
        raise UserError(f"invite: {error}") from None
    needs, shared = offered(config)
    return Invitation(
        slot=slot,
        member_file=keys.member_file(slot, ends),
        folder="" if folder is None else folder.url,
        addresses=_addresses(statuses, present),
        config=shared,
        needs=needs,
        tokenizer=tokenizer.kept,
    )


def _addresses(statuses: Mapping[Member, PeerStatus], present: Collection[Member]) -> list[str]:
    """Return addresses of jobs that have not left: one of each before the second of any."""
    order = sorted(statuses, key=lambda member: member not in present)
    lists = [statuses[one].addresses for one in order if not statuses[one].has_left]
    places = [address for place in zip_longest(*lists) for address in place if address is not None]
    return list(dict.fromkeys(places))[:MOST_ADDRESSES]


def _of_network(
    identity: Identity, run: int, seeds: Sequence[str]
) -> tuple[Mapping[Member, PeerStatus], Collection[Member]]:
    """Return the jobs that one of them knows, and those of them that are there. Raises UserError."""
    try:
        statuses, present = visit(identity, run, seeds)
    except UserError as error:
        raise UserError(
            f"invite: no job answers ({outside(str(error))}); start one whose port others can reach, or name it "
            "with --at HOST:PORT"
        ) from None
    if not _addresses(statuses, present):
        raise UserError(
            "invite: no running job with a port is found; jobs without ports get copies of config and key instead"
        )
    return statuses, present


def _of_folder(
    folder: Store, network: Network, identity: Identity
) -> tuple[Mapping[Member, PeerStatus], Collection[Member]]:
    """Return the jobs that have files in a folder, and those of them that are there. Raises UserError."""
    me = Member(VISITOR, time.time_ns())
    mesh = Mesh(
        Statuses(network.run, me, identity), [FolderCarrier(folder, network.digests)], lambda line: None
    )
    try:
        mesh.wait(lambda: False, mesh.clock() + _LOOK_SECONDS)
        return {one: status for one, status in mesh.known().items() if one != me}, mesh.members()
    finally:
        mesh.close()
