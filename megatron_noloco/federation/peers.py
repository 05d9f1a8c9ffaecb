"""The other replicas: who is there, who connects to whom, and what they are told.

Of two replicas that both can be reached the one with the higher slot opens the connection; if it does not come in
three seconds, the other one does. Whoever connects says who it is, and the other side answers; so each side knows
why they do not exchange, where they do not. The higher slot then proposes the connection as their session (`Go`),
and the lower slot takes it with its first `State`. Two replicas that connect to each other at once so have one
session, and no connection that comes late replaces it: see `Peers._meet`.

The first five bytes of a connection, both ways, are alike in all versions: `_MAGIC` and the version.
"""

import secrets
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megatron_noloco.federation.control import (
    LARGEST,
    LONGEST_FIRST,
    VERSION,
    Address,
    Ask,
    Go,
    Got,
    Hello,
    Known,
    Member,
    Offer,
    RefusedError,
    Row,
    Said,
    State,
    Stream,
    Want,
    heard,
    say,
)
from megatron_noloco.federation.exchanges import LEFT, Exchanges, Peer, Seen
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.likeness import differences, fit
from megatron_noloco.federation.rendezvous import ADVERTISE, Directory, host_of, numeric
from megatron_noloco.federation.session import ALL_TAGS, Session
from megatron_noloco.federation.wires import Script, SocketAddress, Wire, Wires
from megatron_noloco.files import outside
from megatron_noloco.transport.interface import RankLostError

_MAGIC = b"nlco"
_OLD = b"\xff\0\0\0\0"  # the first bytes of ZeroMQ, up to version 7
_BACK_SECONDS = 3.0  # for the side that connects, before the other one tries
_PAUSE_SECONDS = 1.0  # between two attempts to connect
_UNANSWERED_SECONDS = 5.0  # after which an address is named
_SILENT_TICKS, _LONGEST_SILENCE = 20, 60  # ticks of half a second
_STOP_TICKS = 2  # a round that is almost over may end before
_RIVAL_SECONDS = 30.0  # between two questions to a later process of this slot
_MOST_WARNINGS = 1000  # others may cause them
_SAME_KEY = "both need the same key file, or encryption none"
CONNECTION_LOST = "has gone: the connection was lost"


def greeting(keys: Keys | None) -> bytes:
    """Return the first bytes of a connection."""
    return _MAGIC + bytes([VERSION, keys is not None])


class Peers:
    """Connects this replica to the others, and runs its part of the protocol. Used by one thread.

    Args:
        member: this process.
        own: where the others reach it.

    Attributes:
        wires: opens connections; to be set before the first `tick`.
        others: by slot; other threads may read `seen` and `offer`.
        exchanges: what is under way with them.
        directory: the addresses of all replicas.
        found: where the endpoints of `names` are; another thread looks that up.
        stopped: whether this job was asked to stop.
        refusal: why a process that was asked for addresses cannot be an other replica; "": none has answered so.
        leaves_at: until when, on the monotonic clock, what is under way is waited for all the same.
    """

    def __init__(self, member: Member, own: Address, keys: Keys | None = None) -> None:
        self.wires: Wires
        self.member = member
        self.directory = Directory(member.slot, member.slots, own)
        self.others: Mapping[int, Peer] = {
            slot: Peer(slot) for slot in range(member.slots) if slot != member.slot
        }
        self.exchanges = Exchanges(self.others)
        self.found: dict[str, list[SocketAddress]] = {}
        self.stopped: Callable[[], bool] = lambda: False
        self.refusal = ""
        self.leaves_at = float("-inf")
        self._keys = keys
        self._stopped_ticks = 0
        self._rival_again = float("-inf")
        self._warnings = set[str]()
        self._answered = set[str]()  # endpoints that were asked for addresses

    def warn(self, line: str) -> None:
        """Write a line, which may quote others, to stderr, once; no more after many."""
        line = outside(line)
        if line not in self._warnings and len(self._warnings) < _MOST_WARNINGS:
            self._warnings.add(line)
            sys.stderr.write(f"replica {self.member.slot}: {line}\n")

    def tick(self) -> None:
        """Do what is due twice a second.

        Silence is counted in these calls, not in seconds: a process that was stopped itself has heard from nobody
        meanwhile. A message may take long over a slow link, so one that has been silent before, and came back, is
        waited for twice as long.
        """
        self._claim_slot()
        self.follow_directory()
        leaving = time.monotonic() < self.leaves_at
        self._stopped_ticks = 0 if leaving else self._stopped_ticks + self.stopped()
        for slot, peer in self.others.items():
            if (session := peer.session) is None:
                continue
            peer.silent_ticks += 1
            if peer.silent_ticks > max(_SILENT_TICKS, 2 * peer.longest_silence):
                peer.longest_silence = min(_LONGEST_SILENCE, peer.silent_ticks)
                self._end(session, "has fallen silent")
                continue
            if self._stopped_ticks >= _STOP_TICKS:
                why = "is not waited for: this job was asked to stop"
                session.cancel(ALL_TAGS, RankLostError(slot, why))
            session.say_state()
            self._tell_addresses(peer, session)

    # Who connects to whom

    def follow_directory(self) -> None:
        """Connect to the others where they are now, as far as that is this side's task."""
        now = time.monotonic()
        for slot, peer in self.others.items():
            address = self.directory.addresses.get(slot)
            if address != peer.address:
                peer.address, peer.apart_since, peer.attempts, peer.again = address, now, 0, now
            if address is None:
                continue
            if peer.session is not None and address.epoch > peer.seen.epoch:
                self._end(peer.session, "was started anew")
            if endpoint := self._to_dial(peer):
                self._dial(peer, endpoint, now)
                self._name_unanswered(peer, endpoint, now)

    def names(self) -> list[str]:
        """Return the endpoints to connect to with the name of a host. From any thread."""
        rival = self.directory.rival
        endpoints = [*map(self._to_dial, self.others.values()), rival.endpoint if rival else ""]
        return [endpoint for endpoint in endpoints if endpoint and not numeric(endpoint)]

    def _to_dial(self, peer: Peer) -> str:
        """Return the endpoint to which this side is to connect now; "": to none."""
        late = time.monotonic() - peer.apart_since > _BACK_SECONDS
        ours = self.member.slot > peer.slot or not self.directory.own.endpoint or late
        return peer.address.endpoint if peer.address and peer.session is None and ours else ""

    def _places(self, endpoint: str) -> list[SocketAddress]:
        """Return where an endpoint is; nowhere as long as the name of its host is not looked up."""
        return numeric(endpoint) or self.found.get(endpoint, [])

    def _dial(self, peer: Peer, endpoint: str, now: float) -> None:
        places = self._places(endpoint)
        if not places or now < peer.again or (peer.dialled is not None and peer.dialled.error is None):
            return
        to = places[peer.attempts % len(places)]
        peer.again, peer.attempts = now + _PAUSE_SECONDS, peer.attempts + 1
        peer.dialled = self._connect(endpoint, to, partial(self._visit, peer.slot))

    def _name_unanswered(self, peer: Peer, endpoint: str, now: float) -> None:
        """Name an address at which nobody has answered for a while; not that of a replica which has left."""
        left = peer.seen.state.begun == LEFT and peer.address and peer.address.epoch == peer.seen.epoch
        tried = peer.attempts and now - peer.apart_since > _UNANSWERED_SECONDS
        if tried and not left and endpoint not in self._answered:
            self.warn(
                f"nobody answers at {endpoint} of replica {peer.slot}: is its job there, and that port open to "
                "this host?"
            )

    def ask_for_addresses(self, endpoint: str) -> None:
        """Ask the process at an endpoint, which has no name, for the addresses that it knows."""
        for to in numeric(endpoint):
            self._connect(endpoint, to, partial(self._visit, None))

    def name_silent(self, endpoints: Sequence[str]) -> None:
        """Say that nobody has ever answered at the endpoints that are asked for addresses, if that is so."""
        if endpoints and self._answered.isdisjoint(endpoints):
            self.warn(
                f"nobody answers at {', '.join(endpoints)} (federation.rendezvous): does a job listen there, and "
                "is the port open?"
            )

    def _connect(self, endpoint: str, to: SocketAddress, script: Callable[[Wire], Script]) -> Wire | None:
        try:
            return self.wires.dial(endpoint, to, script)
        except ConnectionError:  # nobody is there
            return None
        except OSError as error:
            self.warn(f"{endpoint} cannot be joined now: {error.strerror}")
            return None

    def _claim_slot(self) -> None:
        """Be the latest process of this slot for the others, or say which one is; see `Directory.claim`."""
        if (rival := self.directory.rival) is None:
            return
        runs, counts = self.directory.answers(rival), self.directory.claim()
        for peer in self.others.values() if counts else ():
            if peer.session is not None:
                self._end(peer.session, "took this process for an earlier one")
            peer.apart_since = float("-inf")  # it has refused this process, which connects to it at once
        if runs or not counts:
            which = "this process" if counts else "it"
            self.warn(
                f"another process of this replica is at {rival.endpoint or 'no address'}, and the others exchange "
                f"with {which}: does another job have the same --replica? End one of the two"
            )
        if not counts:
            self._ask_rival(rival)

    def _ask_rival(self, rival: Address) -> None:
        """Ask whether the later process of this slot is still there; if it is not, this one may claim the slot.

        A process to which nobody can connect cannot be asked: this one claims the slot after a pause, and the
        other, where it is still there, claims it again.
        """
        now, places = time.monotonic(), self._places(rival.endpoint)
        if now < self._rival_again or (rival.endpoint and not places):
            return
        first, self._rival_again = self._rival_again == float("-inf"), now + _RIVAL_SECONDS
        if not rival.endpoint and not first:
            self.directory.may_claim()
        for to in places[:1]:
            if self._connect(rival.endpoint, to, self._visit_rival) is None:
                self.directory.may_claim()

    def _visit_rival(self, wire: Wire) -> Script:
        hello = None
        try:
            yield from self._greet(wire)
            say(wire, self._hello(question=True))
            hello = yield from heard(Hello)
        except OSError:  # nobody answers, or somebody else
            pass
        slot, epoch = self.member.slot, self.directory.own.epoch
        if hello is None or hello.member.slot != slot or hello.address.epoch <= epoch:
            self.directory.may_claim()

    def name_namesakes(self) -> None:
        """Name the replicas that announce this host's address, where nobody answers, and were never heard of."""
        own = self.directory.own
        for peer in self.others.values():
            if peer.address and peer.session is None and not peer.seen.epoch:
                host = host_of(peer.address.endpoint)
                if host and host == host_of(own.endpoint):
                    self._name_namesake(peer, "does not answer there")

    def _name_namesake(self, peer: Peer, what: str) -> None:
        at = f", {peer.address.endpoint}" if peer.address else ""
        self.warn(
            f"replica {peer.slot} announces this host's address{at}, and {what}: if it is on another host, "
            f"{ADVERTISE}"
        )

    # Connections

    def visited(self, wire: Wire) -> Script:
        """Run a connection that another process has opened."""
        try:
            yield from self._greet(wire)
            first = yield from heard(Hello, Stream, longest=LONGEST_FIRST)
        except OSError as error:
            self._say_why(wire, error)
            return
        if isinstance(first, Hello):
            others = {at: one for at, one in self.directory.addresses.items() if at != self.member.slot}
            own = replace(self._hello(), others=others)
            say(wire, own)
            if self._fits(first) and not first.question:
                yield from self._meet(wire, own, first)
        elif isinstance(first, Stream):
            sessions = (peer.session for peer in self.others.values())
            for session in [one for one in sessions if one is not None and one.name == first.session]:
                say(wire, first)
                yield from self._carry(wire, session)

    def _visit(self, slot: int | None, wire: Wire) -> Script:
        """Run a connection to a slot, or, where it is not known, to one that is asked for addresses."""
        try:
            yield from self._greet(wire)
            own = self._hello(question=slot is None)
            say(wire, own)
            hello = yield from heard(Hello)
        except OSError as error:
            self._say_why(wire, error, asked=slot is None)
            return
        self._answered.add(wire.endpoint)
        if slot is not None and self._is_own(hello):
            self._name_namesake(self.others[slot], "this replica itself answers there")
        elif self._fits(hello, asked=slot is None) and hello.member.slot == slot:
            yield from self._meet(wire, own, hello)

    def _greet(self, wire: Wire) -> Script:
        """Begin a connection; raises OSError where the two sides cannot speak with each other."""
        own = greeting(self._keys)
        wire.write(own)
        theirs = bytearray(len(own))
        yield memoryview(theirs)
        version = theirs[4] if theirs.startswith(_MAGIC) else 7 if theirs.startswith(_OLD) else None
        if version is None:
            raise RefusedError("the other side is no replica")
        if version != VERSION:
            raise RefusedError(
                f"the other side speaks version {version} of the protocol, this job version {VERSION}: install "
                "the same megatron_noloco for both"
            )
        if theirs != own:
            raise RefusedError(f"only one of the two sides encrypts; {_SAME_KEY}")
        if self._keys is not None:
            wire.encrypt(self._keys.dials if wire.endpoint else self._keys.listens)

    def _say_why(self, wire: Wire, error: OSError, asked: bool = False) -> None:
        """Say why a connection has not begun; not where nobody answers.

        Args:
            asked: whether this process has connected to ask for addresses.
        """
        if isinstance(error, ssl.SSLError):
            why = _SAME_KEY
        elif isinstance(error, RefusedError):
            why = str(error)
        elif isinstance(error, ConnectionResetError):
            why = "the other side closed the connection at once: it has ended, or is no replica"
        else:
            return
        self._answered.add(wire.endpoint)
        at = f"{wire.endpoint} cannot be joined" if wire.endpoint else "a connection to this replica failed"
        self._refuse(f"{at}: {why}", asked)

    def _refuse(self, line: str, asked: bool) -> None:
        self.warn(line)
        if asked:
            self.refusal = outside(line)

    def _hello(self, question: bool = False) -> Hello:
        """Return what a connection begins with. It is short: a session tells the addresses of the others."""
        return Hello(self.member, self.directory.own, {}, question)

    def _is_own(self, hello: Hello) -> bool:
        """Whether this process itself has answered."""
        own = self.member.slot, self.directory.own.epoch
        return (hello.member.slot, hello.address.epoch) == own

    def _fits(self, hello: Hello, asked: bool = False) -> bool:
        """Whether a process can exchange with this one; says why not, as the other side does.

        Args:
            asked: whether this process has connected to ask for addresses.
        """
        member, theirs, slot = self.member, hello.member, hello.member.slot
        if not fit(member, theirs):
            names = differences(member.digests, theirs.digests)
            who = f"replica {slot}" if slot < LARGEST else "a program that invites"
            line = f"{who} is refused: its job differs from this one in {names or 'its run'}"
            self._refuse(line, asked)
            return False
        if self._is_own(hello):
            return False  # all addresses in the config are asked, this one's among them
        self.directory.merge({**hello.others, slot: hello.address})
        if not hello.question and (slot >= member.slots or member.slot >= theirs.slots):
            fewer = "its job has fewer slots; give it as many"
            more = "its job has more slots; give this one as many"
            self.warn(f"replica {slot} is not exchanged with: {more if slot >= member.slots else fewer}")
            return False
        return slot != member.slot

    def _meet(self, wire: Wire, own: Hello, hello: Hello) -> Script:
        """Make a connection the session with another replica, and run it.

        A session that stands on both sides is replaced by none. Three rules make sure of that:

        1. A side that has connected gives its connection up where it has a session by the time of the `Go`.
        2. A side that was connected to gives up no session that it has begun since its own Hello there.
        3. The higher slot begins with the lower slot's `State`, and says no `Go` before the last one is answered.

        By rule 3 both sides begin the same sessions in the same order. By rule 1, a `Go` on a connection of the
        higher slot means that its sessions before are over, and by rule 2 the `Go` was said after they began; so
        the lower slot may replace what it has. A `State` on a connection of the lower slot means likewise that the
        lower slot's sessions are over, so the higher slot may.
        """
        peer, session = self.others[hello.member.slot], None
        replaced = None if wire.endpoint else peer.session
        decides, name = self.member.slot > peer.slot, secrets.token_hex(16)
        try:
            if not decides:
                name = (yield from heard(Go)).session
            elif peer.proposed is not None and peer.proposed.error is None:
                return
            if peer.session not in (None, replaced) or self._is_late(peer, own, hello):
                return
            if decides:
                peer.proposed = wire
                say(wire, Go(name))
                said: Said = yield from heard(State)
                peer.proposed = None
                if self._is_late(peer, own, hello):
                    return
            session = self._begin(
                peer, hello, Session(peer.slot, name, wire, partial(self.exchanges.state, peer))
            )
            if not decides:
                said = yield from heard(State)  # so the other side has begun as well
            for _ in range(max(self.member.streams, hello.member.streams)):
                if wire.to is not None:
                    self.wires.dial(wire.endpoint, wire.to, partial(self._carry_to, session))
            while True:
                self._take(peer, session, said)
                said = yield from heard(State, Want, Got, Known, Ask, Offer, Row)
        except OSError as error:
            if session is not None:
                self._break(session, error)

    def _is_late(self, peer: Peer, own: Hello, hello: Hello) -> bool:
        """Whether there is a later process of either side than the two that have said Hello."""
        return own.address.epoch != self.directory.own.epoch or hello.address.epoch < peer.seen.epoch

    def _carry_to(self, session: Session, wire: Wire) -> Script:
        """Open a connection for the bulk data of a session."""
        try:
            yield from self._greet(wire)
            say(wire, Stream(session.name))
            yield from heard(Stream)
        except OSError as error:
            self._break(session, error)
            return
        yield from self._carry(wire, session)

    def _carry(self, wire: Wire, session: Session) -> Script:
        if session.why:
            return
        self.wires.welcome(wire)
        try:
            yield from session.stream(wire)
        except OSError as error:
            self._break(session, error)

    def _begin(self, peer: Peer, hello: Hello, session: Session) -> Session:
        epoch, before = hello.address.epoch, peer.seen.epoch
        if peer.session is not None:
            self._end(peer.session, CONNECTION_LOST if epoch == before else "was started anew")
        if epoch > before:
            peer.seen = Seen(epoch)  # and not present before its first `State`
        peer.session, peer.attempts, peer.told, peer.silent_ticks = session, 0, None, 0
        peer.update(connected=True)
        self.wires.welcome(session.control)
        session.say(self.exchanges.state(peer))
        self._tell_addresses(peer, session)
        return session

    def _break(self, session: Session, error: OSError) -> None:
        if isinstance(error, RefusedError):
            self.warn(f"the connection to replica {session.slot} was closed: {error}")
        self._end(session, CONNECTION_LOST)

    def _end(self, session: Session, why: str) -> None:
        """Void whatever is under way in a session, and close its connections."""
        session.end(why)
        peer = self.others[session.slot]
        if peer.session is session:
            peer.session, peer.apart_since = None, time.monotonic()
            peer.update(connected=False)

    def end_all(self, why: str) -> None:
        """Void whatever is under way."""
        for peer in self.others.values():
            if peer.session is not None:
                self._end(peer.session, why)

    def _take(self, peer: Peer, session: Session, said: Said) -> None:
        peer.longest_silence = min(_LONGEST_SILENCE, max(peer.longest_silence, peer.silent_ticks))
        peer.silent_ticks = 0
        if isinstance(said, Known):
            self.directory.merge(said.others)
        else:
            self.exchanges.take(peer, session, said)
        peer.update(heard=time.monotonic())

    def _tell_addresses(self, peer: Peer, session: Session) -> None:
        if peer.told is not self.directory.addresses:
            peer.told = self.directory.addresses
            session.say(Known(dict(peer.told)))
