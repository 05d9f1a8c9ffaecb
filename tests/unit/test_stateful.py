"""Ranks of a federation in one thread, in a network of their own, under any sequence of faults.

Protocol, transport, partners and exchanges are the real ones. The network, the clock and the order in which
ranks have their turn belong to a state machine. A wait ends at once: with what has arrived, or with a time-out.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations, permutations
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from megatron_noloco.federation import counterpart as known
from megatron_noloco.federation import outbox, protocol
from megatron_noloco.federation.frames import Frame, Kind, Member, read
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.network import FederationPartners, FederationTransport, Patience
from megatron_noloco.federation.pairing import Others
from megatron_noloco.federation.rendezvous import Address
from megatron_noloco.federation.service import Service
from megatron_noloco.outer import Channel
from megatron_noloco.outer.messages import tag_of
from megatron_noloco.transport.interface import Flight, Message
from tests.unit.federated import committed_with

RANKS = 3
RUN = 5
CHUNK_BYTES = 16
ELEMENTS = 24  # six chunks: more than may be under way at first
ROOM = 8  # messages that a connection holds each way
PATIENCE = Patience(-1.0, -1.0)  # nothing that has not arrived is waited for
CHANNELS = (20, 21)  # of messages beside those of the round
TOKENS = tag_of(0, Channel.COMMITS)


class End(Link):
    """One end of a connection, with the messages under way from there to the other end."""

    other: "End"

    def __init__(self, process: "Process", dialled: bool) -> None:
        self.endpoint, self.up = "", True
        self.process, self.dialled, self.broken = process, dialled, False
        self.queue: deque[list[zmq.Frame]] = deque()

    def send(self, *parts: Any) -> bool:
        self.up &= not self.broken
        if not self.up or len(self.queue) == ROOM:
            return False
        self.queue.append([zmq.Frame(bytes(part)) for part in parts])
        return True


def vector(rank: int, life: int, number: int) -> Tensor:
    """A vector that no other process or round has; sums and means of two are exact."""
    return torch.arange(ELEMENTS) + 4096.0 + 128 * rank + 512 * life + 16384 * number


def content(sender: int, life: int, tag: int) -> Tensor:
    return torch.tensor([sender, life, tag, sender + life, sender + tag])


class Posted(NamedTuple):
    flight: Flight
    partner: int
    tag: int
    buffer: Tensor


class Outcome(NamedTuple):
    """Of a round on one rank; `mean` is None where it does not count."""

    partner: int
    mean: Tensor | None
    in_doubt: bool


class Process(FederationTransport):
    """A rank, without the threads of its transport. `life` is the number of the process, from 1."""

    def __init__(self, rank: int, epoch: int, number: int, life: int = 1) -> None:
        self.rank, self.life, self.world_size = rank, life, RANKS
        self.chunk_bytes = CHUNK_BYTES
        self._others = [other for other in range(RANKS) if other != rank]
        member = Member(rank, RUN, epoch, RANKS)
        self._protocol = self.protocol = protocol.FederationProtocol(member, self._others)
        service = SimpleNamespace(
            protocol=self.protocol, check=lambda: None, do=lambda work, *arguments: work(*arguments)
        )
        self.service = cast(Service, service)
        self.partners = FederationPartners(self.service, PATIENCE)
        self.alive, self.number, self.partner, self.wanted = True, number, -1, -1
        self.committed = committed_with(self, self._choose, ELEMENTS, background=False)
        self.posted: list[Posted] = []
        self.dialled: list[End] = []
        self.protocol.directory.announce(Address(f"tcp://h:{life}", epoch))

    @property
    def epoch(self) -> int:
        return self.protocol.member.epoch

    def _choose(self, number: int, others: Others) -> int | None:
        return self.wanted if self.wanted in others.free else None

    def begin(self, number: int, wanted: int) -> None:
        self.number, self.wanted = number, wanted
        self.partner = wanted
        group = min(self.rank, wanted), max(self.rank, wanted)
        self.committed.begin(vector(self.rank, self.life, number), group, number, "a test")

    def finish(self) -> Outcome:
        (piece,) = self.committed.finish()
        report, partner, self.partner = self.committed.report, self.partner, -1
        return Outcome(partner, None if report.missed else piece.mean.clone(), report.in_doubt)

    def post_beside(self, channel: int, sends: bool) -> None:
        """Post a message of the round under way with the partner, if there is one, besides those of `begin`."""
        if self.protocol._under_way.get(self.number) != self.partner:
            return
        tag = tag_of(self.number, cast(Channel, channel))
        buffer = content(self.rank, self.life, tag) if sends else torch.zeros(5, dtype=torch.int64)
        messages = [Message(self.partner, buffer)]
        flight = self.post(messages, [], tag) if sends else self.post([], messages, tag)
        if not sends:
            self.posted.append(Posted(flight, self.partner, tag, buffer))

    def look(self, lives: Mapping[tuple[int, int], int]) -> None:
        """Check the messages that have arrived: they are those of the partner's process now.

        Args:
            lives: of processes, by rank and epoch.
        """
        for one in list(self.posted):
            try:
                one.flight.arrived()
                if not one.flight.done():
                    continue
                life = lives[one.partner, self.protocol.counterparts[one.partner].seen.epoch]
                assert torch.equal(one.buffer, content(one.partner, life, one.tag))
            except ConnectionError:
                pass
            self.posted.remove(one)

    def turn(self) -> None:
        """Do what the service does twice a second."""
        for end in self.dialled:
            if end.up and not end.broken:
                self.protocol.use(end.other.process.rank, end)
        self.protocol.claim_rank()
        for rank, counterpart in self.protocol.counterparts.items():
            address = self.protocol.directory.addresses.get(rank)
            if counterpart.address != address:
                counterpart.address, counterpart.apart_since = address, protocol.time.monotonic()
        self.protocol.leave_broken_links()
        self.protocol.send_hello()


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


ranks = st.integers(0, RANKS - 1)
pairs = st.sampled_from(list(permutations(range(RANKS), 2)))


class Faults(RuleBasedStateMachine):
    """Rounds under faults; `faithful` where connections that are up lose nothing, and keep the order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patches = [patch.object(module, "time", self.clock) for module in (known, outbox, protocol)]
        for one in self.patches:
            one.start()
        self.ends: list[End] = []
        self.faithful = False
        self.outcomes: dict[tuple[int, int, int], Outcome] = {}  # by number, rank, life
        self.processes: list[Process] = []
        self.epochs: dict[tuple[Process, int], int] = {}
        self.lives: dict[tuple[int, int], int] = {}  # by rank and epoch

    def teardown(self) -> None:
        try:
            if self.processes:
                self.mend()
        finally:
            for one in self.patches:
                one.stop()

    @initialize(faithful=st.booleans())
    def start(self, faithful: bool) -> None:
        self.faithful = faithful
        self.processes = [Process(rank, 10**6, -1) for rank in range(RANKS)]
        self.lives = {(rank, 10**6): 1 for rank in range(RANKS)}
        self._connect_all()
        self._settle(4)

    # Connections and messages

    def _connected(self, one: int, other: int) -> list[End]:
        return [
            end
            for end in self.ends
            if (end.process.rank, end.other.process.rank) == (one, other) and not end.broken
        ]

    def _connect(self, one: int, other: int) -> None:
        near, far = End(self.processes[one], True), End(self.processes[other], False)
        near.other, far.other = far, near
        self.ends += [near, far]
        near.process.dialled.append(near)
        near.process.protocol.use(other, near)

    def _connect_all(self) -> None:
        for one, other in combinations(range(RANKS), 2):
            if not self._connected(one, other):
                self._connect(other, one)

    def _break(self, end: End, loses: bool) -> None:
        """The side that has opened a connection learns at once that it is lost, the other one when it sends."""
        for side in (end, end.other):
            side.broken = True
            if loses:
                side.queue.clear()
            if side.dialled and side.process.alive:
                side.up = False
                side.process.protocol.leave_broken_links(side.other.process.rank)

    def _deliver(self, end: End) -> None:
        parts, to = end.queue.popleft(), end.other.process
        if not to.alive:
            return
        frame, dropped = _frame(parts), to.protocol.dropped.total()
        seen = to.protocol.counterparts[frame.sender].seen if frame.sender != to.rank else None
        to.protocol.take(end.other, parts)
        to.look(self.lives)
        if seen and frame.receiver == to.rank and frame.epoch < seen.epoch and frame.kind != Kind.ADDRESSES:
            assert to.protocol.counterparts[frame.sender].seen is seen, "a message of an earlier process"
            assert to.protocol.dropped.total() == dropped + 1

    def _waiting(self) -> list[End]:
        self.ends = [end for end in self.ends if end.queue or end.other.queue or not end.broken]
        return [end for end in self.ends if end.queue]

    def _settle(self, turns: int = 1) -> None:
        for _ in range(turns):
            for rank in range(RANKS):
                self.turn(rank)
            while waiting := self._waiting():
                for end in waiting:
                    self._deliver(end)

    @rule(pair=pairs, second=st.booleans())
    def connect(self, pair: tuple[int, int], second: bool) -> None:
        there = self._connected(*pair)
        if len(there) < 1 + (second and not self.faithful):
            self._connect(*pair)

    @rule(pair=pairs, loses=st.booleans())
    def cut(self, pair: tuple[int, int], loses: bool) -> None:
        """Break a connection; what is under way is lost, or still arrives."""
        for end in self._connected(*pair)[:1]:
            self._break(end, loses)

    @rule(at=st.integers(0, 11), count=st.integers(1, 6))
    def deliver(self, at: int, count: int) -> None:
        for _ in range(count):
            if waiting := self._waiting():
                self._deliver(waiting[at % len(waiting)])

    @rule(at=st.integers(0, 11), place=st.integers(0, ROOM - 1), twice=st.booleans())
    def disturb(self, at: int, place: int, twice: bool) -> None:
        """Delay or repeat a message of a connection that is up."""
        if (waiting := self._waiting()) and not self.faithful:
            queue = waiting[at % len(waiting)].queue
            message = queue[place % len(queue)]
            if not twice:
                queue.remove(message)
            queue.append(message)

    @rule()
    def settle(self) -> None:
        self._settle()
        self._everyone_progresses()

    @rule()
    def settle_long(self) -> None:
        """When all is quiet, each knows what the others have under way with it, if connections are faithful."""
        self._settle(4)
        if not self.faithful:
            return
        for one, other in permutations(self.processes, 2):
            known_there = other.protocol.counterparts[one.rank]
            wanted = {want.number for wants in known_there.wants.values() for want in wants}
            receives = one.protocol._receives.items()
            tickets = {ticket for ticket, receive in receives if receive.message.rank == other.rank}
            assert wanted | known_there.unconfirmed.keys() == tickets

    @rule(rank=ranks)
    def turn(self, rank: int) -> None:
        process = self.processes[rank]
        process.turn()
        assert self.lives.setdefault((rank, process.epoch), process.life) == process.life

    @rule(seconds=st.sampled_from([0.6, 1.1, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    # Ranks

    @rule(rank=ranks, back=st.integers(0, 2), loses=st.booleans(), earlier=st.booleans())
    def restart(self, rank: int, back: int, loses: bool, earlier: bool = False) -> None:
        """Kill a rank, and start it anew from a checkpoint, with a clock that may be behind the last one's."""
        old = self.processes[rank]
        old.alive = False
        for end in self.ends:
            if end.process is old and not end.broken:
                self._break(end, loses)
        number = max(-1, old.number - back)
        epoch = old.epoch + (-500 if earlier else 1000)
        while (rank, epoch) in self.lives:
            epoch += 1
        new = self.processes[rank] = Process(rank, epoch, number, old.life + 1)
        self.lives[rank, epoch] = new.life

    def _latest(self) -> int:
        return max(process.number for process in self.processes)

    @rule(pair=pairs)
    def begin(self, pair: tuple[int, int]) -> None:
        """Begin the next round on one rank; one that is behind takes the latest of the others."""
        process = self.processes[pair[0]]
        if process.partner < 0:
            process.begin(max(process.number + 1, self._latest()), pair[1])

    @rule(rank=ranks)
    def progress(self, rank: int) -> None:
        if self.processes[rank].partner >= 0:
            assert list(self.processes[rank].committed.progress()) == []

    def _begin_both(self, pair: tuple[int, int]) -> None:
        self.begin(pair)
        self.begin(pair[::-1])

    def _everyone_progresses(self) -> None:
        for rank in range(RANKS):
            self.progress(rank)

    @rule(pair=pairs, count=st.integers(0, 40), held=st.booleans())
    def run(self, pair: tuple[int, int], count: int, held: bool) -> None:
        """Begin a round where connections stand, and deliver its messages: some, or without one of the tokens."""
        self._connect_all()
        self._settle(3)
        self._begin_both(pair)
        while (count > 0 or held) and (waiting := self._waiting()):
            count -= 1
            ready = [end for end in waiting if not (held and self._is_token(end, pair[0]))]
            for end in ready:
                self._deliver(end)
            self._everyone_progresses()
            if not ready:
                break

    def _is_token(self, end: End, sender: int) -> bool:
        frame = _frame(end.queue[0])
        token = tag_of(self.processes[sender].number, Channel.COMMITS)
        return (frame.kind, frame.sender, frame.tag) == (Kind.DATA, sender, token)

    @rule(pair=pairs, count=st.integers(2, 12), loses=st.booleans())
    def run_into_a_cut(self, pair: tuple[int, int], count: int, loses: bool) -> None:
        """Lose the connection while chunks are under way."""
        self.run(pair, count, False)
        self.cut(pair, loses)
        self.cut(pair[::-1], loses)

    @rule(rank=ranks)
    def finish(self, rank: int) -> None:
        process = self.processes[rank]
        if process.partner >= 0:
            outcome = process.finish()
            self.outcomes[process.number, rank, process.life] = outcome
            self._check_outcomes(process.number)

    @rule(order=st.permutations(range(RANKS)), settles=st.booleans())
    def finish_all(self, order: list[int], settles: bool) -> None:
        for rank in order:
            self.finish(rank)
            if settles:
                self.settle()

    @rule(rank=ranks, channel=st.sampled_from(CHANNELS), sends=st.booleans())
    def post(self, rank: int, channel: int, sends: bool) -> None:
        if self.processes[rank].partner >= 0:
            self.processes[rank].post_beside(channel, sends)

    @rule(rank=ranks)
    def leave_out(self, rank: int) -> None:
        process = self.processes[rank]
        if process.partner < 0:
            process.number += 1
            process.partners.leave_out(process.number)

    # What must hold

    def _check_outcomes(self, number: int) -> None:
        """A round counts for both partners or for neither, or one is in doubt; the mean keeps the sum."""
        for (at, rank, life), outcome in self.outcomes.items():
            if at != number or outcome.mean is None:
                continue
            theirs = 2 * outcome.mean - vector(rank, life, number)
            found = [
                later
                for later in range(1, self.processes[outcome.partner].life + 1)
                if torch.equal(theirs, vector(outcome.partner, later, number))
            ]
            assert found, "no vector of the partner"
            partners = self.outcomes.get((number, outcome.partner, found[0]))
            if partners is None:  # it has not finished, or never will
                continue
            assert partners.partner == rank
            if partners.mean is None:
                assert partners.in_doubt, "it counts for one of the two"
            else:
                assert torch.equal(partners.mean, outcome.mean)

    @invariant()
    def chunks_under_way_are_few(self) -> None:
        for process in self.processes:
            for rank, counterpart in process.protocol.counterparts.items():
                box = counterpart.outbox
                assert len(box._under_way) <= box._most <= 32
                if isinstance(box.link, End) and self.faithful:
                    frames = [_frame(message) for message in box.link.queue]
                    sent = [one for one in frames if (one.kind, one.receiver) == (Kind.DATA, rank)]
                    own = [one for one in sent if one.sender == process.rank]
                    assert len(own) <= len(box._under_way)

    @invariant()
    def nothing_is_under_way_without_a_connection(self) -> None:
        for process in self.processes:
            for rank, counterpart in process.protocol.counterparts.items():
                if counterpart.outbox.link is None:
                    assert not counterpart.unconfirmed
                    assert not any(counterpart.posted.values())
                    assert all(one.message.rank != rank for one in process.protocol._receives.values())

    @invariant()
    def no_rank_goes_back_to_an_earlier_process(self) -> None:
        for process in self.processes:
            for rank, counterpart in process.protocol.counterparts.items():
                epoch = counterpart.seen.epoch
                assert self.epochs.get((process, rank), 0) <= epoch
                assert epoch == 0 or self.lives[rank, epoch] <= self.processes[rank].life
                self.epochs[process, rank] = epoch

    def mend(self) -> None:
        """After any faults all directories are alike, and every two ranks exchange."""
        for rank in range(RANKS):
            self.finish(rank)
        self._connect_all()
        if not self.faithful:  # confirmations may have got lost without a trace
            self.clock.now += 61.0
        self._settle(6)  # where all clocks went back, ranks become the later processes one after the other
        self._directories_are_alike()
        for one, other in combinations(range(RANKS), 2):
            self._exchanges((one, other))

    def _directories_are_alike(self) -> None:
        epochs = {process.rank: process.epoch for process in self.processes}
        for process in self.processes:
            addresses = process.protocol.directory.addresses
            assert {rank: address.epoch for rank, address in addresses.items()} == epochs

    def _exchanges(self, pair: tuple[int, int]) -> None:
        number = self._latest() + 2
        for process in self.processes:
            process.number = number - 1
            process.partners.leave_out(number - 1)
        self._settle(2)
        self._begin_both(pair)
        for _ in range(4):
            self._settle()
            self._everyone_progresses()
        self._settle()
        for rank in pair:
            self.finish(rank)
            outcome = self.outcomes[number, rank, self.processes[rank].life]
            assert outcome.mean is not None, self.processes[rank].committed.report.missed


def _frame(message: list[zmq.Frame]) -> Frame:
    frame = read(message[0].bytes)
    assert frame is not None
    return frame


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=400, stateful_step_count=40, deadline=None, print_blob=True)


# What was found


@contextmanager
def round_that_loses(lost: Callable[[Frame], bool]) -> Iterator[Faults]:
    """A round of ranks 0 and 1, in which some of the messages are lost though the connection stands."""
    machine = Faults()
    try:
        machine.start(faithful=False)
        machine._begin_both((0, 1))
        while waiting := machine._waiting():
            for end in waiting:
                if lost(_frame(end.queue[0])):
                    end.queue.popleft()
                else:
                    machine._deliver(end)
            machine._everyone_progresses()
        yield machine
    finally:
        machine.teardown()


def test_a_partner_that_has_used_the_mean_has_not_withdrawn() -> None:
    """Rank 0 ends the round although its token, which is lost, is not confirmed; rank 1 is in doubt."""
    with round_that_loses(lambda frame: frame[:3] == (Kind.DATA, RUN, 0) and frame.tag == TOKENS) as at:
        at.finish(0)
        at.settle()
        at.finish(1)
        first, second = at.outcomes[0, 0, 1], at.outcomes[0, 1, 1]
        assert (first.mean is None, second.mean is None, second.in_doubt) == (False, True, True)
