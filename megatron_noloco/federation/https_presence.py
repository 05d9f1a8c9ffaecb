"""Who is there, as one member sees it, and who asks whom.

A member is there while anybody has seen it within the lease. Who holds its status stream sees it directly. Each
member tells the others whom it has seen, and how long ago.

Of two members that can dial each other, the lower one is *active*: it brings what it offers, and asks for what it
wants. The other one waits. A member without addresses is *hidden*: it cannot be dialled, and is always active.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from megatron_noloco.federation.keys import Identity
from megatron_noloco.federation.mesh import GRACE_SECONDS, Fetch, Member, Status
from megatron_noloco.federation.statuses import SignedStatus, Statuses, addresses_in, slots_in

LEASE_SECONDS = 10.0  # whom nobody has seen for so long is absent
TICK_SECONDS = 0.5
HIDDEN_GRACE_SECONDS = 1.5
_SUSPENDED_SECONDS = 2.0  # a tick that is later than that: this process was suspended
_PULSE_SECONDS, _FAST_PULSE_SECONDS = 4.0, 2.0  # between two tellings; where news take several steps
_RELAY_SECONDS = 0.5  # by which a relayed sight counts as older, so that no two keep a dead member alive
_DIRECT_SECONDS = 7.0  # a member that was silent for longer is relayed by others, before its lease ends
_UNDIALABLE_SECONDS = 3.0
_ALL, _DRAWN, _DRAWN_ABSENT = 64, 16, 4  # members whose streams are held
_FIRST_PAUSE, _LAST_PAUSE = 2.0, 16.0  # seconds between two changes of the lists
_MOST_LISTED = 256  # slots in a list of a status
_MOST_GIVEN, _MOST_TAKEN = 8, 4  # pieces of bulk at a time, with one member


class Clock:
    """Seconds that do not pass while this process is suspended."""

    def __init__(self) -> None:
        self._tick_at, self._suspended = time.monotonic(), 0.0

    def __call__(self) -> float:
        return time.monotonic() - self._suspended - self._gap()

    def tick(self) -> None:
        """Note that this process runs; to be called every `TICK_SECONDS`."""
        self._suspended += self._gap()
        self._tick_at = time.monotonic()

    def _gap(self) -> float:
        gap = time.monotonic() - self._tick_at - TICK_SECONDS
        return gap if gap > _SUSPENDED_SECONDS else 0.0


class Stream:
    """A status stream that another member holds here.

    Attributes:
        own: the own status that was sent last.
        sent: the statuses of others that were sent last, by slot.
        wishes: that were sent last.
        wake: set when there may be something to send.
    """

    def __init__(self, member: Member) -> None:
        self.member, self.is_over = member, False
        self.own: SignedStatus | None = None
        self.sent = dict[int, SignedStatus]()
        self.wishes: list[Fetch] = []
        self.wake = asyncio.Event()


class Peer:
    """Another member.

    Attributes:
        seen: when anybody has seen it last.
        heard: when this process has.
        ends: Unix time after which its certificate is not good.
        lost: when it seems to have ended; inf: it does not.
        grace: seconds after `lost` in which it may be seen again.
        failing: since when it cannot be dialled; None: it can, or this was not tried.
        address: that has answered last; "": none has.
        seed: an address of the rendezvous at which it has answered.
        following: the task that holds its stream.
        is_followed: whether its stream is open.
        stream: that it holds here.
        told: the own status that it has got.
        own_changed: set when there is a later own status.
        giving, taking: places for bulk that others ask for, and bring; of all processes of the slot.
        granting: pieces that are brought to it because it has wished for them.
    """

    def __init__(self, signed: SignedStatus, earlier: "Peer | None" = None) -> None:
        self.member, self.slot = signed.member, signed.member.slot
        self.seen = self.heard = -math.inf
        self.lost, self.grace, self.ends = math.inf, GRACE_SECONDS, math.inf
        self.failing: float | None = None
        self.address = self.seed = ""
        self.following: asyncio.Task[None] | None = None
        self.is_followed = False
        self.stream: Stream | None = None
        self.told: SignedStatus | None = None
        self.own_changed = asyncio.Event()
        self.giving: asyncio.Semaphore = asyncio.Semaphore(_MOST_GIVEN) if earlier is None else earlier.giving
        self.taking: asyncio.Semaphore = asyncio.Semaphore(_MOST_TAKEN) if earlier is None else earlier.taking
        self.granting = 0
        self.update(signed)

    def update(self, signed: SignedStatus) -> None:
        """Take a later status of this member."""
        self.signed, self.status = signed, signed.status
        self.advertised = addresses_in(self.status)
        self.direct, self.undialable = slots_in(self.status, "direct"), slots_in(self.status, "undialable")
        self.has_left = self.status.get("phase") == "left"

    @property
    def addresses(self) -> list[str]:
        """Where to dial it, the best first."""
        return [address for address in dict.fromkeys([self.address, *self.advertised, self.seed]) if address]

    def stop_following(self) -> None:
        if self.following is not None:
            self.following.cancel()
            self.following = None


class Presence:
    """All that one member knows of the others; used by one thread, but for the snapshots.

    Attributes:
        present, known, reachable: snapshots for other threads: each change replaces them.
        has_news: whether `refresh` is due.
        streams: that others hold here, by slot.
    """

    def __init__(self, run: int, me: Member, identity: Identity | None) -> None:
        self.me, self.clock, self.statuses = me, Clock(), Statuses(run, me, identity)
        self.peers, self.streams = dict[int, Peer](), dict[int, Stream]()
        self.present: Mapping[Member, Status] = {}
        self.known: Mapping[Member, Status] = {}
        self.reachable = frozenset[Member]()
        self._shown = dict[Member, SignedStatus]()
        self.has_news = False
        self._status: Status = {}
        self._lists: dict[str, list[int]] = {"direct": [], "undialable": []}
        self._published, self._pause = -math.inf, _FIRST_PAUSE

    # Statuses

    def publish(self, status: Status) -> None:
        """Make this the own status, with lists of whom this member hears, and whom it fails to dial."""
        self._status, self._lists, self.has_news = status, self._lists_now(), True
        self._published = self.clock()
        self.statuses.sign({**status, **self._lists})
        for peer in self.peers.values():
            peer.own_changed.set()
        for stream in self.streams.values():
            stream.wake.set()

    def publish_lists(self) -> None:
        """Publish the status anew if its lists have changed, not too often; additions to those heard may wait."""
        lists, passed = self._lists_now(), self.clock() - self._published
        if self.statuses.own is None or lists == self._lists:
            return
        is_urgent = lists["undialable"] != self._lists["undialable"]
        is_urgent |= not set(self._lists["direct"]) <= set(lists["direct"])
        if passed >= (_FIRST_PAUSE if is_urgent else self._pause):
            is_calm = passed > 2 * _LAST_PAUSE
            self._pause = _FIRST_PAUSE if is_calm else min(2 * self._pause, _LAST_PAUSE)
            self.publish(self._status)

    def take(self, signed: SignedStatus) -> None:
        """Keep a status if it is new; raises ValueError for one that is not in order."""
        if not self.statuses.take(signed):
            return
        known = self.peers.get(signed.member.slot)
        if known is not None and known.member == signed.member:
            known.update(signed)
        else:
            if known is not None:
                known.stop_following()
            self.peers[signed.member.slot] = Peer(signed, known)
        if self.statuses.identity is not None:
            self.peers[signed.member.slot].ends = self.statuses.identity.ends_of(signed.certificate)
        self.has_news = True
        if (stream := self.streams.get(signed.member.slot)) is not None:
            stream.wake.set()

    def take_line(self, line: Mapping[str, object]) -> None:
        """Take a line of a status stream; a status that is not in order is left out."""
        if isinstance(seen := line.get("seen"), dict):
            self._take_sights(seen)
        elif not self._is_known(line):
            with suppress(ValueError):
                self.take(SignedStatus.parse(line))

    def _is_known(self, line: Mapping[str, object]) -> bool:
        """Return whether a status came before, as most do, without the work of reading it."""
        slot = str(line.get("member")).partition(".")[0][:5]
        known = self.statuses.newest.get(int(slot)) if slot.isascii() and slot.isdecimal() else None
        return known is not None and (str(known.member), known.number) == (
            line.get("member"),
            line.get("number"),
        )

    def _lists_now(self) -> dict[str, list[int]]:
        now = self.clock()
        there = [peer for _, peer in sorted(self.peers.items()) if self.is_there(peer)]
        failing = [peer for peer in there if peer.failing is not None]
        return {
            "direct": [peer.slot for peer in there if now - peer.heard < _DIRECT_SECONDS][:_MOST_LISTED],
            "undialable": [
                peer.slot for peer in failing if now - (peer.failing or 0.0) >= _UNDIALABLE_SECONDS
            ][:_MOST_LISTED],
        }

    # Presence

    def peer_of(self, member: Member) -> Peer | None:
        """Return a member that is or was there, unless a later process has its slot."""
        peer = self.peers.get(member.slot)
        return peer if peer is not None and peer.member == member else None

    def is_there(self, peer: Peer) -> bool:
        """Return whether a member is there."""
        now, last = self.clock(), peer.lost + peer.grace
        is_lost = last < now and peer.seen <= last
        has_ended = is_lost or peer.has_left or time.time() > peer.ends
        return now - peer.seen < LEASE_SECONDS and not has_ended

    def hear(self, peer: Peer) -> None:
        """Note a sign of life."""
        peer.seen = peer.heard = self.clock()
        peer.lost = math.inf
        self.has_news |= peer.member not in self._shown

    def lose(self, peer: Peer, since: float, grace: float = GRACE_SECONDS) -> None:
        """Note that a member seems to have ended: it is absent after the grace, unless it is seen later."""
        peer.lost, peer.grace = min(peer.lost, since), grace

    def _take_sights(self, seen: Mapping[str, object]) -> None:
        """Note how many seconds ago another member has seen others."""
        now = self.clock()
        for name, age in seen.items():
            try:
                peer = self.peer_of(Member.parse(name))
            except ValueError:
                continue
            if peer is not None and isinstance(age, int | float) and 0 <= age < LEASE_SECONDS:
                peer.seen = max(peer.seen, now - age - _RELAY_SECONDS)
                self.has_news |= peer.member not in self._shown

    def can_dial(self, peer: Peer) -> bool:
        """Return whether this member dials another, as far as both say."""
        return bool(peer.advertised) and peer.slot not in self._lists["undialable"]

    def is_dialled_by(self, peer: Peer) -> bool:
        """Return whether another member dials this one, as far as both say."""
        return bool(addresses_in(self._status)) and self.me.slot not in peer.undialable

    def is_active(self, peer: Peer) -> bool:
        """Return whether this member acts in the pair."""
        return self.can_dial(peer) and (not self.is_dialled_by(peer) or self.me < peer.member)

    def refresh(self) -> bool:
        """Take the snapshots anew; return whether there are news."""
        there = [peer for peer in self.peers.values() if self.is_there(peer)]
        shown = {peer.member: peer.signed for peer in there}
        reachable = frozenset(
            peer.member for peer in there if self.can_dial(peer) or self.is_dialled_by(peer)
        )
        if not self.has_news and shown == self._shown and reachable == self.reachable:
            return False
        self.has_news, self._shown, self.reachable = False, shown, reachable
        self.present = {peer.member: peer.status for peer in there}
        self.known = {peer.member: peer.status for peer in self.peers.values()}
        return True

    def wanted(self, busy: Iterable[Member]) -> set[int]:
        """Return the slots whose streams this member holds: of many members some drawn ones, and the busy ones."""
        dialable = [peer for peer in self.peers.values() if peer.addresses and not peer.has_left]
        if len(dialable) <= _ALL:
            return {peer.slot for peer in dialable}
        dialable.sort(key=lambda peer: hashlib.sha256(f"{self.me} {peer.member}".encode()).digest())
        near = [peer.slot for peer in dialable if self.is_there(peer)]
        far = [peer.slot for peer in dialable if not self.is_there(peer)]
        asked = {member.slot for member in busy} & {peer.slot for peer in dialable}
        return asked.union(near[:_DRAWN], far[:_DRAWN_ABSENT])

    # What others are told

    @property
    def pulse(self) -> float:
        """Seconds between two tellings of who was seen."""
        return _PULSE_SECONDS if len(self._shown) <= _ALL else _FAST_PULSE_SECONDS

    def news_for(self, stream: Stream, of_others: bool) -> list[SignedStatus]:
        """Return the statuses that a stream lacks; those that its member hears itself are not among them.

        Args:
            of_others: whether it is the time for those of others: each would else travel once for each pair.
        """
        news, own, peer = list[SignedStatus](), self.statuses.own, self.peer_of(stream.member)
        direct = frozenset[int]() if peer is None else peer.direct
        if own is not None and stream.own is not own:
            stream.own = own
            news.append(own)
        for slot, signed in self.statuses.newest.items() if of_others else ():
            if slot not in direct and signed.member != stream.member and stream.sent.get(slot) is not signed:
                stream.sent[slot] = signed
                news.append(signed)
        return news

    def sights_for(self, stream: Stream) -> dict[str, float]:
        """Return how many seconds ago members were seen that the other side does not hear itself."""
        now, peer = self.clock(), self.peer_of(stream.member)
        direct = frozenset[int]() if peer is None else peer.direct
        return {
            str(member): round(max(0.0, now - self.peers[member.slot].seen), 1)
            for member in self._shown
            if member.slot not in direct and member != stream.member and member.slot in self.peers
        }
