"""Replicas find each other, and open conversations with each other."""

import asyncio
import math
from itertools import pairwise
from typing import Any

import pytest

from megatron_noloco.errors import UserError
from megatron_noloco.federation.links import NO_PART, ROUND, Link
from megatron_noloco.federation.messages import Address, Hello, Member, say
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.streams import Stream, StreamEndedError
from megatron_noloco.settings import MOST_SLOTS
from tests.unit.memory_streams import MemoryCarrier
from tests.unit.nodes import MEMBER, Nodes, address_of, until


def linked(*nodes: Node) -> bool:
    return all(set(one.present()) == {other.slot for other in nodes} - {one.slot} for one in nodes)


@pytest.mark.parametrize("first", [0, 1])
async def test_two_replicas_are_linked_when_one_knows_the_other(first: int) -> None:
    async with Nodes() as nodes:
        one = await nodes.add(first)
        other = await nodes.add(1 - first, address_of(first))
        await until(lambda: linked(one, other))
        await until(lambda: one.directory.addresses == other.directory.addresses)


async def test_addresses_spread_between_neighbours() -> None:
    async with Nodes() as nodes:
        chain = [await nodes.add(0)]
        for before, slot in pairwise(range(9)):
            chain.append(await nodes.add(slot, address_of(before)))
        await until(lambda: linked(*chain))
        await until(lambda: len({node.directory.checksum for node in chain}) == 1)


@pytest.mark.parametrize("replicas", [6, 20])
async def test_a_change_is_told_in_few_messages(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of R replicas: at most 2 R log R messages, of one address each but for those to a new process."""
    told = list[int]()
    tell = Node._tell_addresses

    def count(node: Node, link: Link) -> None:
        told.append(len(node.directory.since(link.told.directory)))
        tell(node, link)

    monkeypatch.setattr(Node, "_tell_addresses", count)
    most = 2 * replicas * math.log2(replicas)

    async with Nodes() as nodes:

        async def quiet() -> None:
            await until(lambda: linked(*nodes.nodes))
            await asyncio.sleep(3)
            assert len({node.directory.checksum for node in nodes.nodes}) == 1

        for slot in range(replicas):
            await nodes.add(slot, address_of(0))
        await quiet()
        for slot, incarnation in ((replicas, 1), (1, 2)):
            told.clear()
            if slot < replicas:
                await nodes.nodes.pop(slot).close()
                assert not told, "who leaves keeps its address"
            await nodes.add(slot, address_of(0), incarnation)
            await quiet()
            assert len(told) <= most
            assert sum(told) <= most + 2 * replicas


async def test_hidden_replicas_know_each_other_by_way_of_a_third() -> None:
    async with Nodes() as nodes:
        middle = await nodes.add(0)
        hidden = [await nodes.add(slot, address_of(0), hidden=True) for slot in (1, 2)]
        await until(lambda: all(node.hidden() == {1, 2} for node in (middle, *hidden)))
        await until(lambda: hidden[0].directory.addresses[0].linked == [1, 2])
        assert set(hidden[0].present()) == {0}


async def test_replicas_at_their_end_know_who_has_links_to_whom() -> None:
    async with Nodes() as nodes:
        ends = [await nodes.add(slot, address_of(2), hidden=slot != 2) for slot in (2, 1, 3)]
        edges = {1: {2}, 2: {1, 3}, 3: {2}}
        await until(lambda: all(set(node.present()) == edges[node.slot] for node in ends))
        for node in ends[::-1]:
            node.go_on(5, "ended")
        await until(lambda: ends[0].present()[1].phase == "ended")
        assert ends[0].links_of_ended()[1] == edges[1], "known with the end itself"
        await until(lambda: all(node.links_of_ended() == edges for node in ends))


async def _echo(link: Link, stream: Stream) -> None:
    await stream.send(await stream.receive(5))


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("opener", [0, 1])
async def test_a_conversation_is_opened_by_either_side(opener: int, hidden: bool) -> None:
    async with Nodes() as nodes:
        pair = [await nodes.add(0), await nodes.add(1, address_of(0), hidden=hidden)]
        await until(lambda: linked(*pair))
        pair[1 - opener].serves["echo"] = _echo
        async with pair[opener].links[1 - opener].open("echo") as stream:
            await stream.send(b"hello")
            assert await stream.receive(5) == b"hello"


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("hidden", [None, 0, 1])
async def test_both_sides_of_a_round_meet_whoever_begins_first(late: int, hidden: int | None) -> None:
    async def side(node: Node, other: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with node.links[other].meet(3) as stream:
            await stream.send(bytes([node.slot]))
            assert await stream.receive(1) == bytes([other])

    async with Nodes() as nodes:
        at = 0 if hidden != 0 else 1
        pair = {at: await nodes.add(at)}
        pair[1 - at] = await nodes.add(1 - at, address_of(at), hidden=hidden is not None)
        await until(lambda: linked(*pair.values()))
        await asyncio.gather(*(side(pair[slot], 1 - slot, 5.0 * (slot == late)) for slot in (0, 1)))


async def test_a_stream_that_comes_as_its_wait_ends_is_refused() -> None:
    async with Nodes() as nodes:
        pair = [await nodes.add(0), await nodes.add(1, address_of(0))]
        await until(lambda: linked(*pair))
        near, far = pair[0].links[1], pair[1].links[0]
        waiting = asyncio.ensure_future(near._wait(ROUND, 3))
        hand_over = near._hand_over

        def late(*arguments: Any) -> bool:
            waiting.cancel()
            return hand_over(*arguments)

        near._hand_over = late  # type: ignore[method-assign]
        async with far.meet(3) as stream:
            with pytest.raises(StreamEndedError, match="not waited for"):
                await stream.receive(1)
        assert waiting.cancelled()


async def test_absent_replica_tells_waiting_partner() -> None:
    async with Nodes() as nodes:
        pair = [await nodes.add(0), await nodes.add(1, address_of(0))]
        await until(lambda: linked(*pair))

        async def waits(node: Node, other: int) -> None:
            with pytest.raises(StreamEndedError, match=NO_PART):
                async with node.links[other].meet(7) as stream:
                    await stream.receive(1)

        for waiting, leaving in (pair, pair[::-1]):
            task = asyncio.create_task(waits(waiting, leaving.slot))
            await asyncio.sleep(1.0)
            leaving.begun = 7
            leaving.tell()
            await task
            leaving.begun = -1
            leaving.tell()
            await asyncio.sleep(1.0)


async def test_later_process_replaces_earlier() -> None:
    async with Nodes() as nodes:
        other = await nodes.add(0)
        earlier = await nodes.add(1, address_of(0))
        await until(lambda: linked(other, earlier))
        later = await nodes.add(1, address_of(0), incarnation=2)
        await until(lambda: earlier.failure is not None)
        assert isinstance(earlier.failure, UserError)
        assert other.links[1].seen.incarnation == 2
        earlier.failure = None
        await until(lambda: 0 in later.present())


async def test_a_process_whose_place_was_taken_ends() -> None:
    async with Nodes() as nodes:
        node = await nodes.add(0)
        node._carriers.network.is_replaced = True
        await until(lambda: node.failure is not None)
        assert "the same --replica" in str(node.failure)
        node.failure = None
        await node.close()


@pytest.mark.parametrize("hidden", [False, True])
async def test_late_clock_takes_a_later_incarnation(hidden: bool) -> None:
    async with Nodes() as nodes:
        others = [await nodes.add(0), await nodes.add(2, address_of(0))]
        dead = await nodes.add(1, address_of(0), incarnation=7)
        await until(lambda: linked(*others, dead))
        await dead.close()
        process = await nodes.add(1, address_of(0), incarnation=3, hidden=hidden)
        await until(lambda: linked(*others, process))
        assert {other.links[1].seen.incarnation for other in others} == {8}
        process.serves["echo"] = _echo
        async with others[0].links[1].open("echo") as stream:
            await stream.send(b"hello")
            assert await stream.receive(5) == b"hello"


async def test_a_process_that_dials_itself_stays(capsys: pytest.CaptureFixture[str]) -> None:
    async with Nodes() as nodes:
        node = await nodes.add(0)
        await node.dialling.visit(node.directory.own.endpoint)
        assert not node.dialling.has_answers
        assert not node.dialling.unanswered
        assert not node.links
    assert capsys.readouterr().err == ""


async def test_jobs_that_differ_name_the_difference_on_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    async with Nodes() as nodes:
        await nodes.add(0, member=Member(1, {"model.num_layers": "a", "seed": "x"}))
        await nodes.add(1, address_of(0), member=Member(2, {"model.num_layers": "b", "seed": "x"}))
        await asyncio.sleep(5)
        assert not nodes.nodes[0].present()
        for node in nodes.nodes:
            node.directory.merge(address_of(1 - node.slot))  # it may stand in a folder, too
            assert node.directory.addresses.keys() == {node.slot}
        assert "in model.num_layers" in nodes.nodes[1].dialling.refusal
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line[:9] for line in lines) == ["replica 0", "replica 1"]
    assert all("differs" in line and line.endswith("in model.num_layers") for line in lines)


@pytest.mark.parametrize(("slot", "endpoint"), [(1, "tcp://no port"), (MOST_SLOTS, "tcp://memory:9")])
async def test_a_replica_with_an_address_that_can_be_none_gets_no_link(slot: int, endpoint: str) -> None:
    async with Nodes() as nodes:
        node, other = await nodes.add(0), await nodes.add(2, address_of(0))
        liar = MemoryCarrier(nodes.places, "tcp://memory:9999")
        async with await liar.dial(address_of(0)[0].endpoint) as stream:
            await say(stream, Hello(slot, Address(endpoint, 1), MEMBER))
            with pytest.raises(StreamEndedError, match="is no address of a replica"):
                await stream.receive(1)
        await until(lambda: linked(node, other))
        assert node.links.keys() == {2}


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [("tcp://gone:5", "tcp://gone:5"), (f"folder://00005-{'0' * 16}", 'set federation.listen to "off"')],
)
async def test_an_address_that_nobody_answers_at_is_named_once(
    endpoint: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Nodes() as nodes:
        await nodes.add(0, {5: Address(endpoint, 1)})
        await asyncio.sleep(600)
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert "replica 5" in line


async def test_a_change_is_told_to_all_at_once() -> None:
    async with Nodes() as nodes:
        for slot in range(5):
            await nodes.add(slot, address_of(0))
        await until(lambda: linked(*nodes.nodes))
        nodes.nodes[0].begin_round(40, 1)
        nodes.nodes[0].end_round(40)
        await asyncio.sleep(0.1)
        assert [node.present()[0].begun for node in nodes.nodes[1:]] == 4 * [40]


@pytest.mark.parametrize(("others", "seconds"), [(1, 2.0), (128, 2.0), (640, 10.0)])
async def test_statuses_per_second_at_rest_are_bounded(others: int, seconds: float) -> None:
    async with Nodes() as nodes:
        node = await nodes.add(0)
        node.links = {slot: Link(node, slot) for slot in range(1, 1 + others)}
        assert node.pulse_seconds == seconds


async def test_silent_replica_is_lost_with_conversations() -> None:
    async with Nodes() as nodes:
        pair = [await nodes.add(0), await nodes.add(1, address_of(0))]
        await until(lambda: linked(*pair))
        pair[1].serves["echo"] = _echo
        async with pair[0].links[1].open("echo") as stream:
            await pair[1].links[0]._sending.acquire()  # it says nothing from now on
            with pytest.raises(StreamEndedError, match="silent"):
                await stream.receive(1)
        assert not pair[0].present()


@pytest.mark.parametrize(
    ("arrives", "seconds", "is_alive", "is_named"),
    [
        (8, 20.0, True, True),  # the length of a vector, and nothing of its first bucket
        (0, 20.0, True, False),  # as where a giver has not come to its next step
        (2000, 20.0, True, False),  # slow, but large packets arrive
        (8, 5.0, True, False),
        (8, 20.0, False, False),
    ],
)
@pytest.mark.parametrize("opener", [0, 1])
async def test_lost_large_packets_are_named_where_small_ones_arrive(
    opener: int,
    arrives: int,
    seconds: float,
    is_alive: bool,
    is_named: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def serve(link: Link, stream: Stream) -> None:
        await stream.send(bytes(arrives))
        await asyncio.sleep(60)

    async with Nodes() as nodes:
        pair = [await nodes.add(0), await nodes.add(1, address_of(0))]
        await until(lambda: linked(*pair))
        pair[1 - opener].serves["buckets"] = serve
        if not is_alive:
            await pair[1 - opener].links[opener]._sending.acquire()  # it says nothing from now on
        with pytest.raises((TimeoutError, StreamEndedError)):
            async with asyncio.timeout(seconds), pair[opener].links[1 - opener].open("buckets") as stream:
                await stream.receive(10_000)
    line = f"replica {opener}: small messages of replica {1 - opener} arrive, large ones do not: is the MTU "
    assert [text.startswith(line) for text in capsys.readouterr().err.splitlines()] == [True] * is_named


@pytest.mark.parametrize("leaves", [0, 1])
async def test_leaving_replica_waits_for_end_to_be_read(leaves: int) -> None:
    """Whoever has opened it; what was not read when a stream is aborted may be lost."""
    ended = list[float]()

    async with Nodes() as nodes:
        pair = [await nodes.add(0), await nodes.add(1, address_of(0))]
        await until(lambda: linked(*pair))

        async def act(stream: Stream, slot: int) -> None:
            if slot == leaves:
                await stream.send(b"end")
            else:
                await asyncio.sleep(1.0)
                assert await stream.receive(3) == b"end"

        async def serve(link: Link, stream: Stream) -> None:
            await act(stream, 1)

        async def use() -> None:
            async with pair[0].links[1].open("end") as stream:
                await act(stream, 0)

        pair[1].serves["end"] = serve
        using = asyncio.ensure_future(use())
        await asyncio.sleep(0.5)
        nodes.nodes.remove(pair[leaves])
        began = asyncio.get_running_loop().time()
        await pair[leaves].close()
        ended.append(asyncio.get_running_loop().time() - began)
        await using
    assert 0.4 < ended[0] < 0.6, "by the clock of the loop"
