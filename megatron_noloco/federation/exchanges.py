"""What is under way with the other replicas: exchanges, and states that are handed over."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_noloco.federation.control import Address, Ask, Got, Offer, Row, Said, State, Want
from megatron_noloco.federation.session import HANDOVER_TAG, HANDOVERS, Receive, Send, Session
from megatron_noloco.federation.wires import Wire
from megatron_noloco.transport.interface import EXCHANGE_TAGS, RankLostError

_SILENCE_SECONDS = 10.0  # after which a replica counts as absent
_MOST_ROWS = 64  # of each replica; those before are thrown away
TAKES_OVER = "takes over a state"
FINAL = 2**52  # the number of the exchange at the end, after those of all rounds
AT_ITS_END = 2**51  # a replica that waits at its end says that it has begun this plus 1 and its last exchange
LEFT = FINAL + 1  # what a replica that has left says that it has begun


def is_at_end(exchange: int) -> bool:
    """Return whether the exchange that a replica began last says that it waits at its end."""
    return AT_ITS_END <= exchange < FINAL


class WithdrawnError(RankLostError):
    """The other replica takes no part in this exchange, or has skipped it."""


class Seen(NamedTuple):
    """Holds what is known of another replica. A change replaces it, so other threads read one moment of it.

    Attributes:
        epoch: of its process; 0: it was never heard of.
        state: what it has said last.
        heard: the time of its last message, on the monotonic clock; -inf: never.
        connected: whether our messages can reach it.
    """

    epoch: int = 0
    state: State = State()
    heard: float = float("-inf")
    connected: bool = False

    @property
    def present(self) -> bool:
        """Whether it is connected, and has said something in the last ten seconds."""
        return self.connected and time.monotonic() - self.heard <= _SILENCE_SECONDS


@dataclass
class Peer:
    """Another replica, as this one sees it.

    Attributes:
        seen: for other threads as well, as `offer` and `rows` are; the rest is used by one thread only.
        session: the connections to it; None: there are none.
        offer: its last answer to an `Ask`; None: none yet.
        rows: its newest rows of metrics that nobody has read.
        dialled: the last connection that this process has opened to it; None: none.
        proposed: the connection on which this process has said a `Go` that is not answered yet; None: none.
        attempts: how many it has opened in a row, without a session.
        again: when the next one may be opened, on the monotonic clock.
        apart_since: when its address became known or its connection was lost, likewise.
        told: the addresses that it was sent last; None: none.
        counted: the latest exchange with it that counts here; -1: none.
        silent_ticks: for how many ticks it has said nothing.
        longest_silence: of those that ended, in ticks.
    """

    slot: int
    seen: Seen = Seen()
    session: Session | None = None
    offer: Offer | None = None
    rows: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_ROWS))
    dialled: Wire | None = None
    proposed: Wire | None = None
    attempts: int = 0
    again: float = float("-inf")
    address: Address | None = None
    apart_since: float = float("-inf")
    told: Mapping[int, Address] | None = None
    counted: int = -1
    silent_ticks: int = 0
    longest_silence: int = 0

    @property
    def hidden(self) -> bool:
        """Whether its address says that nobody can connect to it."""
        return self.address is not None and not self.address.endpoint

    def update(self, **changes: Any) -> None:
        """Replace some of `seen`."""
        self.seen = self.seen._replace(**changes)


class Exchanges:
    """Begins and ends exchanges, and moves what belongs to them. Used by one thread.

    Args:
        others: the other replicas, by slot.
    """

    def __init__(self, others: Mapping[int, Peer]) -> None:
        self._others = others
        self._begun, self._step, self._takes_over = -1, 0, False
        self._under_way: dict[int, int | None] = {}  # the partner, by exchange

    # Messages that this replica posts

    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Send messages as soon as the others ask for them, and ask for others."""
        for receive in receives:
            peer = self._others[receive.message.rank]
            if peer.session is None:
                receive.transfers.report(_away(peer.slot))
            elif peer.seen.state.takes_over and receive.tag < HANDOVER_TAG:
                receive.transfers.report(WithdrawnError(peer.slot, TAKES_OVER))
            else:
                peer.session.receive(receive)
        for send in sends:
            slot = send.message.rank
            if (session := self._others[slot].session) is None:
                send.report(_away(slot))
            elif send.tag >= HANDOVER_TAG and send.tag != session.asked:
                send.report(RankLostError(slot, "has asked again"))
            else:
                session.send(send)

    def ask(self, slot: int, tag: int) -> None:
        """Ask a replica for its state, and tell all not to wait for this one until it goes on.

        The other gives its state between two local steps, and may before wait for a third replica: if that waited
        for this one, all three would wait.
        """
        self._takes_over = True
        self._cancel_void()
        if (session := self._others[slot].session) is not None:
            session.say(Ask(tag))

    def offer(self, slot: int, offer: Offer) -> None:
        """Answer an `Ask`, unless the replica has asked again."""
        session = self._others[slot].session
        if session is not None and session.asked == offer.tag:
            session.waits = False
            session.say(offer)

    def give(self, step: int) -> None:
        """Give states after so many local steps from now on; 0: none, and tell those that wait for it."""
        self._step = step
        for peer in self._others.values():
            self._refuse(peer)

    def tell_row(self, text: str) -> None:
        """Send a row of metrics to all."""
        for peer in self._others.values():
            if peer.session is not None:
                peer.session.say(Row(text))

    # Exchanges

    def begin(self, number: int, slot: int | None) -> None:
        """Tell all that this exchange has begun here, with `slot`; the others have no part in it."""
        self._under_way[number] = slot
        self.leave_out(number)

    def leave_out(self, number: int) -> None:
        """Tell all that the exchanges up to this one, except those under way, never begin here."""
        self._begun, self._takes_over = max(self._begun, number), False
        self._cancel_void()

    def end(self, number: int, counts: bool = False) -> None:
        """Tell all that this exchange is over here, and its messages void; and whether it counts."""
        partner = self._under_way.pop(number, None)
        if counts and partner is not None:
            self._others[partner].counted = number
        self._cancel_void()

    def _open_from(self, slot: int) -> int:
        """Return the first exchange that this replica may have with another: under way, or the next."""
        with_it = (number for number, partner in self._under_way.items() if partner == slot)
        return min(with_it, default=self._begun + 1)

    def _cancel_void(self) -> None:
        """Cancel what is under way for exchanges that are not open any more, and tell the others."""
        for peer in self._others.values():
            if peer.session is not None:
                peer.session.cancel(_before(self._open_from(peer.slot)))
                peer.session.say_state()

    def state(self, peer: Peer) -> State:
        """Return what another replica is to know of this one."""
        open_from = self._open_from(peer.slot)
        at_end = is_at_end(self._begun)
        others = (other for other in self._others.values() if other.seen.present)
        sees = [other.slot for other in others if at_end or (peer.hidden and other.hidden)]
        return State(self._begun, open_from, peer.counted, self._step, self._takes_over, sees)

    # What others say

    def take(self, peer: Peer, session: Session, said: Said) -> None:
        """Act on a message; raises RefusedError for one that no member would send."""
        match said:
            case State():
                self._take_state(peer, session, said)
            case Want() if said.tag not in _before(self._open_from(peer.slot)):  # else it is void
                session.wanted(said)
            case Got():
                session.got(said.number)
            case Row():
                peer.rows.append(said.text)
            case Ask():
                self._take_ask(peer, session, said)
            case Offer():
                peer.offer = said

    def _take_state(self, peer: Peer, session: Session, state: State) -> None:
        slot = peer.slot
        peer.update(state=state)
        counts = RankLostError(slot, "has used the mean, and this replica missed its token")
        session.cancel(_before(min(state.counted + 1, state.open_from)), counts)
        session.cancel(_before(state.open_from), WithdrawnError(slot, "has no part in this exchange"))
        if state.takes_over:
            session.cancel(_before(self._begun + 1), WithdrawnError(slot, TAKES_OVER))
        else:
            session.cancel_sends(HANDOVERS, RankLostError(slot, "trains"))

    def _take_ask(self, peer: Peer, session: Session, ask: Ask) -> None:
        session.asked, session.waits = ask.tag, True
        session.cancel_sends(HANDOVERS, RankLostError(peer.slot, "has asked again"))
        self._refuse(peer)

    def _refuse(self, peer: Peer) -> None:
        """Answer a replica that waits for a state where there is none to give."""
        if not self._step and peer.session is not None and peer.session.waits:
            self.offer(peer.slot, Offer(peer.session.asked))


def _before(number: int) -> range:
    """Return the tags of all exchanges before this one."""
    return range(number * EXCHANGE_TAGS)


def _away(slot: int) -> RankLostError:
    return RankLostError(slot, "is not connected")
