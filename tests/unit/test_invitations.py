"""Newcomers on the port of a job: what they get, once, and what strangers get."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_noloco import __version__
from megatron_noloco.errors import UserError
from megatron_noloco.federation import dialling, invitation, joining
from megatron_noloco.federation.dialling import Carriers
from megatron_noloco.federation.invitation import (
    BUNDLE,
    REQUIREMENTS,
    Invitations,
    JoinRequirements,
    Offer,
    Wish,
    ask_invitation,
)
from megatron_noloco.federation.joining import Admission, Ticket, join
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.messages import Address, Member
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.streams import Stream, StreamEndedError
from megatron_noloco.federation.tcp import TcpCarrier

MEMBER = Member(7)
OFFER = Offer(JoinRequirements(["text"], False), {"seed": 1}, "the key", {"tokenizer.json": "e30="})
SECONDS = 60.0  # for what takes milliseconds
pytestmark = pytest.mark.real_clock


class Job:
    """A job that answers, and what it tells."""

    def __init__(self, keys: Keys, path: Path) -> None:
        self.keys, self.path, self.told = keys, path, list[str]()
        self.offer: Callable[[], Offer] = lambda: OFFER
        self.endpoint = ""

    @asynccontextmanager
    async def runs(self, hidden: bool = False) -> AsyncIterator[Node]:
        """Run a process of the job, as its slot 1; slots 0 and 3 are in its directory."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        carrier = TcpCarrier(self.keys, listener)
        node = Node(1, Address("" if hidden else self.endpoint, 5), MEMBER, Carriers(carrier))
        node.directory.merge({0: Address("tcp://127.0.0.1:1", 5), 3: Address("", 5)})
        node.warn = self.told.append
        invitations = Invitations(lambda: self.offer(), node, self.path)
        node.strangers, node.invites = invitations.welcome, invitations.invite
        await node.start()
        try:
            async with asyncio.timeout(SECONDS):
                yield node
        finally:
            await node.close()

    async def ticket(self, seconds: float = 60.0, slot: int | None = None, **changes: Any) -> Ticket:
        carrier = TcpCarrier(self.keys)
        made = await ask_invitation(carrier, self.endpoint, MEMBER, Wish(seconds, slot))
        await carrier.close()
        return replace(Ticket(made.version, made.endpoint, self.keys.fingerprint, made.secret), **changes)

    async def stranger_says(self, *words: bytes) -> None:
        """Say this without the key, and listen until the job ends the stream. Raises ConnectionError."""
        carrier = TcpCarrier(Keys.of_newcomer(self.keys.fingerprint))
        async with await carrier.dial(self.endpoint) as stream:
            await stream.send(*words, bytes(100))
            await stream.receive(2**20)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(joining, "_LONG_ENOUGH_SECONDS", 1e-6)
    # Nobody listens at the address of slot 0, which a job names after five seconds: a busy machine needs longer.
    monkeypatch.setattr(dialling, "_UNANSWERED_SECONDS", SECONDS)
    return Job(Keys.make(tmp_path / "key"), tmp_path / "run" / "invitations.json")


async def admitted(ticket: Ticket, check: Callable[[JoinRequirements], None] = lambda _: None) -> Admission:
    return await join(ticket, check)


async def refused(ticket: Ticket, check: Callable[[JoinRequirements], None] = lambda _: None) -> str:
    with pytest.raises(UserError, match=r"^join: [^\n]*\Z") as error:
        await join(ticket, check)
    return str(error.value)


async def test_a_newcomer_gets_what_it_needs_once(job: Job) -> None:
    async with job.runs():
        ticket = await job.ticket()
        seen = list[JoinRequirements]()
        requirements, speed, bundle = await admitted(ticket, seen.append)
        assert seen == [requirements] == [OFFER.requirements]
        assert speed.rate > 0
        assert speed.latency > 0
        assert bundle.slot == 2, "0 and 3 are in the directory, 1 is the job"
        first, second = bundle.rendezvous.removeprefix("tcp://").split(",")
        assert f"tcp://{first}" == job.endpoint, "the hidden replica is not in it"
        assert second == "127.0.0.1:1"
        assert (bundle.config, bundle.key, bundle.tokenizer) == OFFER[1:]
        assert job.told == ["a machine joins with an invitation, and takes slot 2"]
        assert "used already" in await refused(ticket)
        assert (await admitted(await job.ticket())).bundle.slot == 4
        assert (await admitted(await job.ticket(slot=3))).bundle.slot == 3
        with pytest.raises(
            StreamEndedError, match="replica 1 is running: stop it first, or leave out --slot"
        ):
            await job.ticket(slot=1)


async def test_of_two_newcomers_at_once_one_gets_in(job: Job) -> None:
    async with job.runs():
        ticket = await job.ticket()
        both = await asyncio.gather(admitted(ticket), admitted(ticket), return_exceptions=True)
        assert sorted(type(one).__name__ for one in both) == ["Admission", "UserError"]
        assert len(job.told) == 1


async def test_invitations_outlive_a_restart_of_the_job(job: Job) -> None:
    async with job.runs():
        used, good, expiring = [await job.ticket() for _ in range(3)]
        short = await job.ticket(seconds=1e-9)
        await admitted(used)
    assert "nobody answers" in await refused(good)
    assert not any(ticket.secret in job.path.read_text() for ticket in (used, good, expiring))
    async with job.runs():
        again = {"endpoint": job.endpoint}
        assert "used already" in await refused(replace(used, **again))
        assert "has expired" in await refused(replace(short, **again))
        assert (await admitted(replace(good, **again))).bundle.slot == 4, "2 is given"
    job.path.write_text("{")
    async with job.runs():
        again = {"endpoint": job.endpoint}
        for ticket in (used, good, expiring):
            assert "does not know the invitation" in await refused(replace(ticket, **again))
        assert job.told[-1].endswith("cannot be read: invitations that this job made before are good no more")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"version": "0.0.1"}, f"the other side has megatron_noloco 0.0.1, this machine {__version__}"),
        ({"fingerprint": "00" * 32}, "has another key; an invitation is good while"),
        ({"secret": "00" * 16}, "this job does not know the invitation"),
        ({"seconds": 1e-9}, "this invitation has expired"),
        ({"endpoint": "tcp://127.0.0.1:1"}, r"nobody answers at tcp://127.0.0.1:1: "),
    ],
)
async def test_others_are_told_why_they_get_nothing(job: Job, changes: dict[str, Any], line: str) -> None:
    async with job.runs():
        assert line in await refused(await job.ticket(**changes))
        assert job.told == []


async def test_an_invitation_stays_good_until_it_is_used(job: Job) -> None:
    """Here the newcomer lacks data, then the job cannot read its tokenizer, then its disk takes no file."""

    def lacks(requirements: JoinRequirements) -> None:
        raise UserError("join: --data is missing")

    def broken() -> Offer:
        raise OSError("no tokenizer")

    async with job.runs():
        ticket = await job.ticket()
        assert await refused(ticket, lacks) == "join: --data is missing"
        job.offer = broken
        assert "the job that invites cannot let anybody in: no tokenizer" in await refused(ticket)
        assert job.told == ["a machine with an invitation gets nothing: no tokenizer"]
        job.offer = lambda: OFFER
        job.path.unlink()
        job.path.mkdir()
        assert "cannot let anybody in: [Errno 21] Is a directory" in await refused(ticket)
        job.path.rmdir()
        assert (await admitted(ticket)).bundle.slot == 2


@pytest.mark.parametrize("side", [invitation, joining])
async def test_large_packets_that_are_lost_are_named(
    job: Job, side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the way to the newcomer, or from it."""
    sends = side.send_bytes

    async def loses(stream: Stream, count: int) -> None:
        await sends(stream, min(count, 1))
        if count > 1:
            await asyncio.sleep(SECONDS)

    monkeypatch.setattr(joining, "_FIRST_PROBE_SECONDS", 0.2)
    async with job.runs():
        ticket = await job.ticket()
        monkeypatch.setattr(side, "send_bytes", loses)
        assert "is the MTU of the route smaller" in await refused(ticket)


async def test_a_job_that_nobody_can_dial_makes_no_invitation(job: Job) -> None:
    async with job.runs(hidden=True):
        with pytest.raises(ConnectionError, match="nobody can dial this job: ask another one"):
            await job.ticket()


async def test_a_stranger_gets_nothing_and_leaves_nothing(job: Job) -> None:
    """Whatever it says: drawn bytes, whole messages of others, or a length beyond the limit."""
    draws = random.Random(0)
    messages = [
        b'{"secret":"%s"}' % (b"0" * 32),
        b'{"slot":5,"address":{"endpoint":"tcp://a:1","incarnation":1},"member":{"run":7},"type":"hello"}',
        b'{"kind":"invite","member":{"run":7},"type":"visit"}',
        b'{"type":"ready"}',
        b"[" * 60_000,
    ]
    words = [len(message).to_bytes(4) + message for message in messages]
    words += [(2**16 + 1).to_bytes(4), (2**32 - 1).to_bytes(4)]
    words += [draws.randbytes(draws.randrange(4, 100)) for _ in range(50)]

    async with job.runs() as node:
        kept, addresses = (await job.ticket(), job.path.read_bytes())[1], node.directory.addresses
        for word in words:
            with pytest.raises(ConnectionError):
                await job.stranger_says(word)
        assert node.links == {}
        assert node.directory.addresses == addresses
        assert job.path.read_bytes() == kept
        assert job.told == []
        while node._carriers.network._connections:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)


async def test_newcomer_measures_with_bounded_bytes(job: Job) -> None:
    async with job.runs():
        ticket = await job.ticket()
        said = json.dumps({"secret": ticket.secret}), '{"type":"probe","up":0,"down":99999999}'
        with pytest.raises(ConnectionError):
            await job.stranger_says(*(len(text).to_bytes(4) + text.encode() for text in said))


@pytest.mark.parametrize(
    "changes",
    [
        {"slot": -1},
        {"slot": 4096},
        {"rendezvous": "file:///root/.ssh"},
        {"rendezvous": "tcp://a:1\x1b[2J"},
        {"key": "k" * 20_000},
        *(
            {"tokenizer": {name: ""}}
            for name in ("../escaped", "/etc/passwd", "a/../../b.json", "run.sh", "")
        ),
        {"tokenizer": {"additional_chat_templates/../../x.jinja": ""}},
        {"tokenizer": {"tokenizer.json": "\x1b"}},
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_a_bundle_that_names_a_place_outside_is_refused(changes: dict[str, Any]) -> None:
    right = {"slot": 1, "config": {}, "rendezvous": "tcp://a:1", "key": "", "tokenizer": {}}
    assert BUNDLE.validate_json(json.dumps(right)).slot == 1
    with pytest.raises(ValidationError):
        BUNDLE.validate_json(json.dumps(right | changes))
    with pytest.raises(ValidationError):
        REQUIREMENTS.validate_json(json.dumps({"data": ["tokenizer_model"], "pretrained": False}))
