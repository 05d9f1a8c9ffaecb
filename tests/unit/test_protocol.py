"""What one rank does with each frame of another; the frames are made by hand."""

from typing import Any

import numpy as np
import pytest
import torch
import zmq

from megatron_noloco.federation.frames import (
    DTYPE_CODES,
    LARGEST,
    VERSION,
    Frame,
    Kind,
    Member,
    Receive,
    Send,
    checksum_of,
    read,
)
from megatron_noloco.federation.likeness import Alike, digests_of, run_number
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.protocol import FederationProtocol
from megatron_noloco.federation.rendezvous import Address
from megatron_noloco.transport.chunks import ReportedTransfers, cut
from megatron_noloco.transport.interface import EXCHANGE_TAGS, Message, RankLostError

RUN, OWN, THEIRS, TAG, CHUNK = 5, 10, 20, 4, 8


class Sent(Link):
    """A connection that is up, with the frames that were sent over it."""

    def __init__(self) -> None:
        self.endpoint, self.up = "", True
        self.frames: list[Frame] = []
        self.data: list[bytes] = []  # of the frames that have any

    def send(self, *parts: Any) -> bool:
        frame = read(bytes(parts[0]))
        assert frame is not None
        self.frames.append(frame)
        self.data += map(bytes, parts[1:])
        return self.up

    def last(self, kind: Kind) -> Frame:
        return [frame for frame in self.frames if frame.kind == kind][-1]


class Rank:
    """Rank 0 of three, connected to the others, which has posted a receive of two chunks from rank 1."""

    def __init__(self) -> None:
        self.protocol = FederationProtocol(Member(0, RUN, OWN, 3), [1, 2])
        self.protocol.directory.announce(Address("tcp://h:1", OWN))
        self.link = Sent()
        for sender in (2, 1):
            self.take(self.link, Frame(Kind.HELLO, RUN, sender, 0, THEIRS, length=2))
        self.buffer = torch.zeros(2 * CHUNK, dtype=torch.uint8)
        message = Message(1, self.buffer)
        chunks = cut([message], CHUNK)
        self.transfers = ReportedTransfers(chunks, TAG)
        self.protocol.receive(Receive(TAG, message, chunks, self.transfers))
        self.want = self.link.last(Kind.WANT)

    def take(self, link: Link, frame: Frame, data: np.ndarray | None = None) -> None:
        parts = [zmq.Frame(frame.pack())] + ([] if data is None else [zmq.Frame(data.tobytes())])
        self.protocol.take(link, parts)

    def chunk(self, index: int, **changes: Any) -> None:
        """Take a chunk of what was asked for, with some fields that are wrong."""
        data = np.full(CHUNK, index + 1, np.uint8)
        right = Frame(
            Kind.DATA, RUN, 1, 0, THEIRS, OWN, TAG, self.want.number, index * CHUNK, CHUNK,
            DTYPE_CODES[torch.uint8], checksum_of(data),
        )  # fmt: skip
        self.take(self.link, right._replace(**changes), data)

    def failure(self) -> str:
        with pytest.raises(ConnectionError) as error:
            self.transfers.completed()
        return str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sender": 2},
        {"tag": TAG + 1},
        {"offset": 0},
        {"offset": 2 * CHUNK},
        {"length": CHUNK - 1},
        {"dtype": DTYPE_CODES[torch.int8]},
        {"checksum": 7},
        {"number": 10**6},
        {"epoch": THEIRS - 1},
        {"to_epoch": OWN - 1},
    ],
    ids=str,
)
def test_a_chunk_is_taken_only_if_it_is_the_next_of_what_was_asked_for(wrong: dict[str, int]) -> None:
    rank = Rank()
    rank.chunk(0)
    rank.chunk(1, **wrong)
    assert rank.protocol.dropped.total() == 1
    assert rank.buffer.tolist() == [1] * CHUNK + [0] * CHUNK
    rank.chunk(1)
    assert rank.buffer.tolist() == [1] * CHUNK + [2] * CHUNK


def silence(rank: Rank, ticks: int) -> None:
    for _ in range(ticks):
        rank.protocol.tick()
        assert rank.transfers.completed() == []


def test_nothing_is_waited_for_from_a_rank_that_has_fallen_silent() -> None:
    """It may be stopped, or a wall may have swallowed its connection: no socket says so."""
    rank = Rank()
    silence(rank, 20)
    rank.chunk(0)  # a sign of life
    assert len(rank.transfers.completed()) == 1
    silence(rank, 20)
    rank.take(rank.link, Frame(Kind.HELLO, RUN, 1, 0, THEIRS))
    silence(rank, 40)  # twice as long as it was silent before: a chunk may take longer than a HELLO
    rank.protocol.tick()
    assert rank.failure() == "rank 1 has fallen silent"


def test_a_job_that_is_to_stop_waits_for_nobody() -> None:
    rank = Rank()
    rank.protocol.stopped = lambda: True
    silence(rank, 1)  # a round that is almost over may end
    rank.protocol.tick()
    assert rank.failure() == "rank 1 is not waited for: this job was asked to stop"


def test_a_rank_that_was_started_anew_has_nothing_of_its_earlier_process() -> None:
    """Its new connection is used at once, though the old one seems to stand."""
    rank, link, reports = Rank(), Sent(), list[RankLostError | None]()
    rank.protocol.send(1, Send(TAG, 1, 0, lambda: iter(()), reports.append))
    rank.take(link, Frame(Kind.HELLO, RUN, 1, 0, THEIRS + 1, length=1))
    assert rank.failure() == "rank 1 was started anew"
    assert rank.protocol.counterparts[1].its_connections == 1
    assert [str(one) for one in reports] == ["rank 1 was started anew"]
    assert rank.protocol.counterparts[1].outbox.link is link
    assert link.last(Kind.ADDRESSES).receiver == 1
    rank.chunk(0)
    assert not rank.buffer.any()


def test_addresses_are_sent_again_over_a_new_connection() -> None:
    """What waited to be sent over the last one may be lost. Not again with each HELLO."""
    rank, link = Rank(), Sent()
    rank.link.up = False
    rank.protocol.leave_broken_links()
    rank.take(link, Frame(Kind.HELLO, RUN, 1, 0, THEIRS, length=3))
    rank.protocol.send_hello()
    assert [frame.kind for frame in link.frames].count(Kind.ADDRESSES) == 1


def test_what_was_asked_for_before_the_other_side_took_a_new_connection_is_void() -> None:
    """It has noticed that the connection was lost, and this rank has not."""
    rank = Rank()
    rank.take(rank.link, Frame(Kind.HELLO, RUN, 1, 0, THEIRS, length=3))
    assert rank.failure() == "rank 1 has gone: the connection was lost"
    both = rank.protocol.counterparts[1].connections_of_both
    want = Frame(Kind.WANT, RUN, 1, 0, THEIRS, tag=TAG, number=1, length=1)
    for offset in (both - 1, both):
        rank.take(rank.link, want._replace(offset=offset))
    assert rank.protocol.dropped == {"earlier connection": 1}
    assert rank.protocol.counterparts[1].wants_waiting() == 1


def test_what_is_asked_for_an_exchange_that_is_over_is_void() -> None:
    rank = Rank()
    rank.protocol.leave_out(0)
    want = Frame(
        Kind.WANT, RUN, 1, 0, THEIRS, offset=rank.protocol.counterparts[1].connections_of_both, length=1
    )
    for tag in (EXCHANGE_TAGS - 1, EXCHANGE_TAGS):
        rank.take(rank.link, want._replace(tag=tag))
    assert rank.protocol.dropped == {"void": 1}
    assert list(rank.protocol.counterparts[1].wants) == [EXCHANGE_TAGS]


def test_a_process_whose_clock_is_behind_that_of_an_earlier_one_is_told() -> None:
    rank, link = Rank(), Sent()
    rank.take(link, Frame(Kind.HELLO, RUN, 1, 0, THEIRS - 1))
    assert rank.protocol.dropped == {"earlier process": 1}
    assert link.last(Kind.ADDRESSES).receiver == 1
    assert rank.protocol.directory.unpack(link.data[-1]) == {1: Address("", THEIRS)}


def test_a_process_counts_as_later_than_one_that_has_ended_but_not_than_one_that_runs() -> None:
    """Of two that run each becomes the later one once, so the one that is later first stays it."""
    rank, claimed = Rank(), 100 + 1 + OWN
    rank.protocol.claim_rank()
    assert rank.protocol.member.epoch == OWN
    for later, claims in ((100, True), (200, False)):
        rank.protocol.directory.merge({0: Address("tcp://h:2", later)})
        rank.protocol.claim_rank()
        assert rank.protocol.member.epoch == claimed
        assert (rank.protocol.directory.rival is None) == claims
    assert rank.failure() == "rank 1 took this process for an earlier one"
    assert rank.link.last(Kind.HELLO).epoch == claimed
    assert rank.protocol.directory.addresses[0] == Address("tcp://h:2", 200)


def test_no_process_is_later_than_the_last_number() -> None:
    rank = Rank()
    rank.protocol.directory.merge({0: Address("tcp://h:2", LARGEST)})
    rank.protocol.claim_rank()
    assert rank.protocol.member.epoch == OWN


@pytest.mark.parametrize(
    ("frame", "answers"),
    [
        (Frame(Kind.HELLO, RUN + 1, 1, 0, THEIRS), 1),
        (Frame(Kind.ADDRESSES, RUN + 1, 1, 0, THEIRS, number=1), 1),
        (Frame(Kind.ADDRESSES, RUN + 1, 1, 0, THEIRS), 0),
    ],
)
def test_a_rank_of_another_run_learns_what_is_compared_and_nothing_else(frame: Frame, answers: int) -> None:
    rank, link = Rank(), Sent()
    rank.take(link, frame)
    assert [(answer.kind, answer.run, answer.number) for answer in link.frames] == (
        [(Kind.REFUSAL, 0, 1)] * answers
    )
    assert link.data == [b"{}"] * answers


class Between(Link):
    """A connection to another protocol, which takes what is sent at once."""

    def __init__(self) -> None:
        self.endpoint, self.up = "", True
        self.sent = 0
        self.back: tuple[FederationProtocol, Link] | None = None

    def send(self, *parts: Any) -> bool:
        assert self.back is not None
        self.sent += 1
        protocol, link = self.back
        protocol.take(link, [zmq.Frame(bytes(part)) for part in parts])
        return True


def connected(*protocols: FederationProtocol) -> list[Between]:
    """Return the links of two protocols to each other."""
    links = [Between(), Between()]
    for link, back, protocol in zip(links, links[::-1], protocols[::-1], strict=True):
        link.back = protocol, back
    return links


def test_two_jobs_that_differ_both_say_in_what(capfd: pytest.CaptureFixture[str]) -> None:
    alike = [{"model": {"num_layers": layers, "hidden_size": 8}, "seed": 1} for layers in (2, 3)]
    protocols = [
        FederationProtocol(Member(rank, run_number(values), OWN, 2, digests_of(values)), [1 - rank])
        for rank, values in enumerate(alike)
    ]
    links = connected(*protocols)
    links[0].send(protocols[0].member.frame(Kind.HELLO, 1).pack())
    assert capfd.readouterr().err.splitlines() == [
        f"rank {rank}: rank {1 - rank} is refused: its job differs from this one in model.num_layers"
        for rank in range(2)
    ]
    assert [link.sent for link in links] == [2, 1], "the answer to an answer is not answered"


@pytest.mark.parametrize(("kinds", "named"), [(("train", "train"), "tokenizer"), (("train", "attach"), "")])
def test_what_one_kind_of_job_knows_is_compared_by_jobs_of_this_kind(
    kinds: tuple[str, str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    protocols = []
    for rank, kind in enumerate(kinds):
        alike = Alike({"seed": 1}, kind, {"tokenizer": f"of {rank}", f"of {kind}": rank})
        member = Member(rank, run_number(alike.shared), OWN, 2, alike.digests, alike.kind_number)
        protocols.append(FederationProtocol(member, [1 - rank]))
    links = connected(*protocols)
    protocols[0].use(1, links[0])
    names = named and f"of train, {named}"
    line = "rank {}: rank {} is refused: its job differs from this one in " + names
    assert capfd.readouterr().err.splitlines() == [line.format(rank, 1 - rank) for rank in (0, 1) if named]
    assert bool(protocols[1].counterparts[0].seen.heard > 0) == (not named)


def test_a_job_that_speaks_another_version_is_named_on_both_sides(capfd: pytest.CaptureFixture[str]) -> None:
    """Its header may have any length. The answer to it is not answered."""
    rank, link = Rank(), Sent()
    before, ours, after, later = (b"nlco" + bytes([VERSION + more]) for more in (-1, 0, 1, 3))
    for header in (after + b"\x00", Frame(Kind.HELLO, RUN, 1, 0, THEIRS).pack().replace(ours, before)):
        rank.protocol.take(link, [zmq.Frame(header)])
    assert [frame.kind for frame in link.frames] == [Kind.REFUSAL] * 2
    answer = link.frames[0].pack()
    rank.protocol.take(link, [zmq.Frame(answer.replace(ours, later)), zmq.Frame(b"{}")])
    assert len(link.frames) == 2
    found = capfd.readouterr().err.splitlines()
    for version in (VERSION - 1, VERSION + 1, VERSION + 3):
        assert (
            f"rank 0: another job speaks version {version} of the protocol, this job version {VERSION}: install "
            "the same megatron_noloco for both"
        ) in found


def test_a_rank_of_a_job_with_more_slots_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    rank, other, link = Rank(), FederationProtocol(Member(5, RUN, THEIRS, 6), [0]), Sent()
    rank.take(link, Frame(Kind.HELLO, RUN, 5, 0, THEIRS))
    other.take(link, [zmq.Frame(link.last(Kind.ADDRESSES).pack()), zmq.Frame(link.data[0])])
    line = "rank 5: rank 0 does not exchange with this one: its job has fewer slots; give it as many"
    assert line in capfd.readouterr().err.splitlines()
