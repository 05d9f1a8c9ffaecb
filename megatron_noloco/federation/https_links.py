"""Who is there, as one member sees it, and the link between two members: lines of JSON, both ways in one request.

Each pair of members has one link, whoever can dial the other. Of two that both can, the one that was started later
dials at once, since it knows of the other first; the other one waits for some seconds. A member without addresses
is *hidden*: it cannot be dialled, so it opens all of its links.

| line of a link | says |
|---|---|
| a signed status | of the writing member; or of another member to which the reading one has no link |
| {"known": {SLOT: [INCARNATION, NUMBER]}} | at first: which statuses the writing member has |
| {"linked": {MEMBER: BOOLEAN}} | to whom it has links: at first all, then what has changed |
| {} | that it lives |
| other lines | on pieces: see `https_transfers` |

A member is there while this one has a link to it, or another one says that it has. An end of a link is a hint:
both sides open it again at once. It counts after a second where nobody listens at the address of the other, or it
has none, and else after the lease.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Set
from contextlib import suppress
from itertools import islice
from typing import Any

from megatron_noloco.federation.https_transfers import Transfers, json_line
from megatron_noloco.federation.mesh import Member, Mesh
from megatron_noloco.federation.statuses import SignedStatus
from megatron_noloco.settings import MOST_SLOTS

LEASE_SECONDS = 10.0  # without a line, after which a link has ended
PULSE_SECONDS = 2.0
_GRACE_SECONDS = 1.2  # for a link to be opened again by a member that is hidden, or seems to have ended
_TURN_SECONDS = 3.0  # for a member that was started later to open the link
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 2.0  # between two tries
RARE_SECONDS = 30.0  # between two tries to open a link to a member that was absent for longer than
_LONG_SECONDS = 300.0


class Link:
    """A link to another member.

    Args:
        is_own: whether this member has opened it.
        task: that holds it, and is to end with it; None: it ends when nothing more is written.

    Attributes:
        peer: None: it has not answered yet.
        heard: when the last line has come.
        own: the own status that was sent last.
        known: the statuses that the other side has, by slot; None: it has not said so yet.
        others: slots whose newest statuses it may lack; they are sent with the next sign of life.
        told: members of whose links it was told; None: of none yet.
        has_told: whether it has told of its links.
        transfers: the pieces that pass over it; only where there is a peer.
        streams: tasks that carry large pieces; they end with it.
        wake: set when there may be something to send.
    """

    def __init__(self, is_own: bool, task: "asyncio.Task[Any] | None" = None) -> None:
        self.is_own, self.task = is_own, task
        self.peer: Neighbour | None = None
        self.is_over = False
        self.heard = time.monotonic()
        self.own: SignedStatus | None = None
        self.known: dict[int, tuple[int, int]] | None = None
        self.others = set[int]()
        self.told: frozenset[Member] | None = None
        self.has_told = False
        self.transfers: Transfers
        self.streams = set[asyncio.Task[Any]]()
        self.wake = asyncio.Event()

    def end(self) -> None:
        self.is_over = True
        self.wake.set()
        if self.peer is not None:
            self.transfers.end()
        for task in (*self.streams, self.task):
            if task is not None:
                task.cancel()


class Neighbour:
    """Another member, as its links show it.

    Attributes:
        ends: Unix time after which its certificate is not good.
        link: None: there is none.
        unlinked: since when there is no link; when it became known, if there was none.
        grace: seconds after that in which it counts as linked.
        linked: members to which it has links.
        address: that has answered last; "": none has.
        dialling: the task that opens a link, or holds it.
        dial_at: when to open a link.
        tries: to open a link, since the last one.
    """

    def __init__(self, signed: SignedStatus, ends: float, dial_at: float) -> None:
        self.member, self.slot, self.ends = signed.member, signed.member.slot, ends
        self.link: Link | None = None
        self.unlinked, self.grace = time.monotonic(), 0.0
        self.linked = set[Member]()
        self.address = ""
        self.dialling: asyncio.Task[None] | None = None
        self.dial_at, self.tries = dial_at, 0
        self.signed = signed

    @property
    def addresses(self) -> list[str]:
        """Where to dial it, the best first."""
        addresses = [self.address, *self.signed.status.addresses]
        return [address for address in dict.fromkeys(addresses) if address]

    @property
    def has_ended(self) -> bool:
        """Whether it has left, or its certificate has ended."""
        return self.signed.status.has_left or time.time() > self.ends

    @property
    def is_linked(self) -> bool:
        """Whether there is a link, or was until now."""
        return self.link is not None or time.monotonic() - self.unlinked < self.grace

    def refuse(self) -> None:
        """Note that nobody listens at an address."""
        self.grace = min(self.grace, _GRACE_SECONDS)

    def is_due(self) -> bool:
        """Return whether to open a link."""
        is_dialling = (
            self.dialling is not None and not self.dialling.done()
        )  # it may have ended before it began
        is_open = self.link is not None or is_dialling or self.has_ended
        return not is_open and time.monotonic() >= self.dial_at and bool(self.addresses)

    def put_off(self) -> None:
        """Put the next try to open a link off, once all addresses were tried."""
        self.tries += 1
        absent = time.monotonic() - self.unlinked
        seconds = RARE_SECONDS if absent > _LONG_SECONDS else min(max(absent, _FIRST_PAUSE), _LAST_PAUSE)
        if self.tries % max(1, len(self.addresses)):
            seconds = 0.0
        self.dial_at = time.monotonic() + seconds * random.uniform(0.8, 1.2)


class Links:
    """The members as one of them meets them; used by one thread.

    Args:
        see: is told who is there, and with whom pieces pass.

    Attributes:
        peers: the latest process of each other slot.
    """

    def __init__(self, mesh: Mesh, see: Callable[[Set[Member], Set[Member]], object]) -> None:
        self.mesh, self.statuses, self._see = mesh, mesh.statuses, see
        self.peers = dict[int, Neighbour]()
        self._linked = frozenset[Member]()

    # Statuses

    def publish(self) -> None:
        """Have the own status told."""
        for peer in self.peers.values():
            if peer.link is not None:
                peer.link.wake.set()

    def take(self, signed: SignedStatus) -> None:
        """Keep a status if it is new; raises ValueError for a status that is not in order."""
        self.mesh.take(signed)
        self._update(signed.member.slot)

    def take_line(self, line: Mapping[str, Any]) -> None:
        """Keep a status if it is new, and in order."""
        with suppress(ValueError):
            self.take(SignedStatus.parse(line))

    def _update(self, slot: int) -> None:
        """Have the peer of a slot follow its newest status, which may have come otherwise."""
        known, signed = self.peers.get(slot), self.statuses.of(slot)
        if signed is None or (known is not None and known.signed is signed):
            return
        if known is not None and known.member == signed.member:
            known.signed = signed
        else:
            if known is not None and known.dialling is not None:
                known.dialling.cancel()
            if known is not None and known.link is not None:
                known.link.end()
            _, ends = self.statuses.identity.owner_of(signed.certificate)
            own = self.statuses.own
            waits = own is not None and bool(own.status.addresses) and _is_later(signed.member, self.mesh.me)
            self.peers[slot] = Neighbour(signed, ends, time.monotonic() + _TURN_SECONDS * waits)
        for peer in self.peers.values():
            if peer.link is not None and peer.slot != slot:
                peer.link.others.add(slot)

    # Links

    def peer_of(self, member: Member) -> Neighbour | None:
        """Return a member that is or was there, unless a later process has its slot."""
        peer = self.peers.get(member.slot)
        return peer if peer is not None and peer.member == member else None

    def open(self, peer: Neighbour, link: Link) -> bool:
        """Take a link, maybe in the place of an earlier one; return whether it is taken, and its member reached.

        Of two that are opened at once both sides keep that of the member that was started later.
        """
        is_first = link.is_own == _is_later(self.mesh.me, peer.member)
        if peer.link is not None and not is_first and peer.link.is_own != link.is_own:
            return False
        if peer.link is not None:
            peer.link.end()
        if is_first and not link.is_own and peer.dialling is not None:
            peer.dialling.cancel()
        peer.link, link.peer = link, peer
        link.transfers = Transfers(self.mesh, peer.member, link.wake)
        peer.tries = 0
        link.others.update(self.peers)
        link.wake.set()
        self.refresh()
        return True

    def close(self, link: Link) -> None:
        """Note that a link has ended."""
        link.end()
        peer = link.peer
        if peer is not None and peer.link is link:
            peer.link, peer.unlinked = None, time.monotonic()
            left = LEASE_SECONDS - (peer.unlinked - link.heard)
            peer.grace = max(0.0, left if peer.addresses else min(left, _GRACE_SECONDS))
            peer.dial_at = peer.unlinked
            self.refresh()

    def refresh(self) -> None:
        """Say who is there by now."""
        for signed in self.statuses.newest():
            self._update(signed.member.slot)
        peers = [peer for peer in self.peers.values() if not peer.has_ended]
        told = set[Member]().union(*(peer.linked for peer in peers if peer.is_linked))
        reachable = frozenset(peer.member for peer in peers if peer.is_linked)
        present = reachable | {peer.member for peer in peers if peer.member in told}
        linked = frozenset(peer.member for peer in peers if peer.link is not None)
        has_lost, self._linked = bool(self._linked - linked), linked
        if has_lost:
            self.publish()
        self._see(present, reachable)

    # Lines

    async def texts(self, link: Link) -> AsyncIterator[bytes]:
        """Yield what to write to a link, until it ends: what is about third members seldom, losses at once."""
        due = -math.inf
        while not link.is_over:
            link.wake.clear()
            text = b"".join(self._lines_for(link))
            if time.monotonic() >= due:
                text += b"".join(self._lines_on_others(link)) or json_line({})
                due = time.monotonic() + PULSE_SECONDS
            if text:
                yield text
                await asyncio.sleep(0)  # as `Transfers.texts`
            with suppress(TimeoutError):
                async with asyncio.timeout(due - time.monotonic()):
                    await link.wake.wait()

    def _lines_for(self, link: Link) -> Iterator[bytes]:
        own, peer = self.statuses.own, link.peer
        assert own is not None
        if own is not link.own:
            link.own = own
            yield own.line
        if peer is None:
            return
        if link.told is None:
            peers = self.peers.values()
            yield json_line(
                {"known": {one.slot: [one.member.incarnation, one.signed.number] for one in peers}}
            )
        if link.told is None or not self._linked >= link.told:
            yield self._line_on_links(link)
        yield from link.transfers.lines()

    def _lines_on_others(self, link: Link) -> Iterator[bytes]:
        peer = link.peer
        if peer is None or link.known is None:
            return
        if link.told != self._linked:
            yield self._line_on_links(link)
        for slot in link.others - {peer.slot}:
            signed = self.peers[slot].signed
            number = signed.member.incarnation, signed.number
            if signed.member not in peer.linked and link.known.get(slot, (0, 0)) < number:
                link.known[slot] = number
                yield signed.line
        link.others.clear()

    def _line_on_links(self, link: Link) -> bytes:
        changed, link.told = self._linked ^ (link.told or frozenset()), self._linked
        return json_line({"linked": {str(member): member in self._linked for member in changed}})

    def hear(self, link: Link, line: Mapping[str, Any]) -> None:
        """Take a line on statuses and links. Raises `MALFORMED`."""
        peer = link.peer
        assert peer is not None
        if isinstance(known := line.get("known"), dict):
            link.known = {
                int(slot): (int(incarnation), int(number))
                for slot, (incarnation, number) in islice(known.items(), MOST_SLOTS)
            }
        elif isinstance(linked := line.get("linked"), dict):
            if not link.has_told:
                link.has_told, peer.linked = True, set()
            for name, is_linked in islice(linked.items(), 2 * MOST_SLOTS):
                member = Member.parse(name)
                if is_linked is True and len(peer.linked) < 2 * MOST_SLOTS:
                    peer.linked.add(member)
                elif is_linked is not True:
                    peer.linked.discard(member)
                    link.others.update({member.slot} & self.peers.keys())
        elif "member" in line:
            self.take_line(line)


def _is_later(one: Member, other: Member) -> bool:
    """Return whether a member was started later than another."""
    return (one.incarnation, one.slot) > (other.incarnation, other.slot)
