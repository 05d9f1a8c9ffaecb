"""How a machine with the key writes an invitation: which slot it gives away, and where a newcomer finds others."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_noloco.config import RunConfig
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.federation.folder_carrier import FolderCarrier
from megatron_noloco.federation.keys import VISITOR, Identity, Keys
from megatron_noloco.federation.mesh import MOST_PIECE_BYTES, Member, Mesh, Status
from megatron_noloco.federation.network import Network
from megatron_noloco.federation.statuses import Statuses, addresses_in
from megatron_noloco.federation.store import Store
from megatron_noloco.federation.visit import Visit
from megatron_noloco.files import outside
from megatron_noloco.preflight.invitation import MOST_ADDRESSES, Invitation, can_name, reserve
from megatron_noloco.preflight.newcomer import digest_of_piece, file_of_piece, offered, tokenizer_piece
from megatron_noloco.settings import MOST_SLOTS, TCP

_LOOK_SECONDS = 6.0  # in which the signs of life of those that are there move twice


class InviteRequest(NamedTuple):
    """The wish for an invitation.

    Attributes:
        slot: that the newcomer takes; None: a free slot.
        ends: Unix time until which the newcomer can be a member.
        at: HOST:PORT of a running job; None: any that the rendezvous knows.
    """

    slot: int | None
    ends: float
    at: str | None = None


def keys_of_inviter(config: RunConfig, path: str, request: InviteRequest) -> Keys:
    """Return the key of a federation. Raises UserError where this machine cannot invite."""
    federation = config.federation
    if not federation.exists or federation.key_file is None or federation.encryption != "tls":
        raise UserError(
            f"{path}: invite needs a federation with a key: federation.rendezvous, federation.key_file, "
            'and federation.encryption "tls"'
        )
    if request.slot is not None and not 0 <= request.slot < MOST_SLOTS:
        raise UserError(f"invite: --slot {request.slot}: the slots are 0 to {MOST_SLOTS - 1}")
    rendezvous = str(federation.rendezvous)
    if not rendezvous.startswith(TCP) and not can_name(rendezvous):
        raise UserError(f"invite: an invitation cannot name {rendezvous}; copy config and key instead")
    if not rendezvous.startswith(TCP) and request.at is not None:
        raise UserError("invite: --at: the jobs of this federation meet in a folder; leave it out")
    keys = Keys.read(Path(federation.key_file))
    if not keys.can_invite:
        raise UserError(
            "invite: this machine joined by an invitation, which cannot invite: ask a machine that has the "
            "federation's key"
        )
    return keys


def invite(
    config: RunConfig, keys: Keys, network: Network, tokenizer: Tokenizer, request: InviteRequest
) -> Invitation:
    """Return an invitation, whose slot is given away until it ends. Raises UserError.

    Args:
        network: of the config.
    """
    piece, folder, identity = tokenizer_piece(tokenizer), network.folder, keys.identity(VISITOR)
    if len(piece) > MOST_PIECE_BYTES:
        raise UserError("invite: the tokenizer's files are too large to be sent: copy config and key instead")
    digest = digest_of_piece(piece)
    try:
        if folder is None:
            seeds = [request.at] if request.at else network.seeds
            others = _of_network(Visit(identity, network.run, seeds))
        else:
            others = _of_folder(folder, network, identity)
            folder.put(file_of_piece(digest), piece)
        if request.slot in {member.slot for member in others.present}:
            raise UserError(f"invite: replica {request.slot} is running: stop it first, or leave out --slot")
        key_file, known = Path(str(config.federation.key_file)), {member.slot for member in others.statuses}
        slot = reserve(key_file, request.slot, known, request.ends)
    except OSError as error:
        raise UserError(f"invite: {error}") from None
    requirements, shared = offered(config)
    return Invitation(
        run=network.run,
        slot=slot,
        member_file=keys.member_file(slot, request.ends),
        folder="" if folder is None else folder.url,
        addresses=others.addresses(),
        config=shared,
        requirements=requirements,
        tokenizer=digest,
    )


class _Others(NamedTuple):
    """The jobs that are or were there."""

    statuses: Mapping[Member, Status]
    present: Collection[Member]

    def addresses(self) -> list[str]:
        """Return addresses of jobs that have not left: one of each before the second of any."""
        order = sorted(self.statuses, key=lambda member: member not in self.present)
        lists = [
            addresses_in(self.statuses[member])
            for member in order
            if self.statuses[member].get("phase") != "left"
        ]
        most = max(map(len, lists), default=0)
        found = [address for place in range(most) for each in lists for address in each[place : place + 1]]
        return list(dict.fromkeys(found))[:MOST_ADDRESSES]


def _of_network(visit: Visit) -> _Others:
    """Return the jobs that one of them knows. Raises UserError."""
    try:
        others = _Others(visit.statuses(), visit.present)
    except UserError as error:
        raise UserError(
            f"invite: no job answers ({outside(str(error))}); start one whose port others can reach, or name it "
            "with --at HOST:PORT"
        ) from None
    if not others.addresses():
        raise UserError(
            "invite: no running job with a port is found; jobs without ports get copies of config and key instead"
        )
    return others


def _of_folder(folder: Store, network: Network, identity: Identity) -> _Others:
    """Return the jobs that have files in a folder. Raises UserError."""
    me = Member(VISITOR, time.time_ns())
    mesh = Mesh(Statuses(network.run, me, identity), [FolderCarrier(folder, network.digests)])
    try:
        mesh.wait(lambda: False, mesh.clock() + _LOOK_SECONDS)
        statuses = {member: status for member, status in mesh.known().items() if member != me}
        return _Others(statuses, mesh.members())
    finally:
        mesh.close()
