"""A state is taken over as a whole or not at all, and costs neither side more than the time it is given."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from megatron_noloco.federation.delivery import (
    COME_SECONDS,
    EVERYTHING,
    Taker,
    part_with,
    pass_on,
    receive_vector,
)
from megatron_noloco.federation.gather import Gather
from megatron_noloco.federation.links import Link
from megatron_noloco.federation.messages import send_json
from megatron_noloco.federation.movement import alone
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.states import NotTakenError, State
from megatron_noloco.federation.streams import Serve, Stream
from megatron_noloco.federation.takeover import _OFFER, STATE, Offer, TakeOver, Takeover, furthest
from tests.unit.fleet import noise
from tests.unit.memory_streams import Faults, MemoryCarrier
from tests.unit.nodes import NodeOfWorkers, Nodes, Worker, address_of, run, until
from tests.unit.test_layouts import Layout, two_layouts
from tests.unit.test_movement import MOST_RANKS, holdings_of, movements, scattered, size_of

LENGTH, BUCKET = 50, 16
LARGE = 60_000  # elements that fit into no window
REST = bytes(range(200))
FACTS = {"who": "a test"}
NAMES = ["fast_weights", "slow_weights"]
SECONDS = 30.0  # for a giver to come to its next boundary
PHASE = 2.0  # between two boundaries


def vector(name: str, done: int, length: int) -> Tensor:
    return noise(length, seed=len(name)) + done


class Kept:
    """The state of a job of one rank: vectors that follow from the local step."""

    def __init__(self, length: int = LENGTH, facts: Mapping[str, Any] = FACTS, wrong: float = 0.0) -> None:
        self.facts, self.wrong, self.length = dict(facts), wrong, length
        self.copied, self.used = list[int](), list[State]()

    def copy(self, done: int) -> State:
        self.copied.append(done)
        vectors = {name: vector(name, done, self.length) + self.wrong for name in NAMES}
        return State(done, self.facts, vectors, REST)

    def allocate(self, facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
        if facts != FACTS:
            raise NotTakenError("its facts are others")
        return {name: torch.zeros(self.length) for name in names}

    def load(self, state: State) -> None:
        assert (state.facts, state.rest) == (FACTS, REST)
        assert state.vectors.keys() == {*NAMES}
        for name, found in state.vectors.items():
            assert torch.equal(found, vector(name, state.step, self.length))
        self.used.append(state)


def states_of(node: Node, length: int = LENGTH) -> TakeOver:
    states = TakeOver(NodeOfWorkers(node))  # type: ignore[arg-type]
    states._sender, states.movement = Worker(), alone(length, bucket=max(BUCKET, length // 3))
    return states


def giving(node: Node, kept: Kept, since: int) -> TakeOver:
    """Have a replica train from a local step on."""
    states = states_of(node, kept.length)

    async def train() -> None:
        done = since
        while True:
            if states.wanted(done):
                states.give(kept, done)
            await asyncio.sleep(PHASE)
            done += 1

    states.trains_from(since)
    node.spawn(train())
    return states


class Outcome(NamedTuple):
    """What a replica has taken over, and the lines about states that it has not."""

    taken: Takeover | None
    used: list[State]
    lines: list[str]


async def take(node: Node, least: int = 1, kept: Kept | None = None) -> Outcome:
    kept, lines, worker = kept or Kept(), list[str](), Worker()
    states = states_of(node, kept.length)
    loop = asyncio.get_running_loop()
    taken = await loop.run_in_executor(worker, states.take_over, kept, least, SECONDS, lines.append)
    worker.shutdown()
    return Outcome(taken, kept.used, [line.removeprefix("the state of replica ") for line in lines])


async def among(nodes: Nodes, givers: int) -> tuple[list[Node], Node]:
    """Return some replicas, and the last one, which dials them all: its first streams are the links."""
    found = [await nodes.add(slot) for slot in range(givers)]
    known = {slot: address for one in range(givers) for slot, address in address_of(one).items()}
    last = await nodes.add(givers, known)
    await until(lambda: len(last.present()) == givers)
    return found, last


async def knows(node: Node, *steps: int) -> None:
    """Wait until a replica knows after how many local steps the others can give a state."""
    await until(lambda: all(node.present()[slot].step >= step for slot, step in enumerate(steps)))


def limits(after: int, cuts: Sequence[tuple[int | None, int | None]]) -> Faults:
    """Cut the streams that a carrier dials after so many."""
    return lambda number: cuts[number - after] if 0 <= number - after < len(cuts) else (None, None)


TALK_BYTES = 60  # at least what opens a conversation
STATE_BYTES = 2 * 4 * LENGTH + len(REST)  # at least what a giver sends
cuts = st.one_of(
    st.just((None, None)),
    st.tuples(st.integers(0, TALK_BYTES), st.none()),
    st.tuples(st.none(), st.integers(0, STATE_BYTES)),
)


@settings(max_examples=40)
@given(st.lists(cuts, min_size=6, max_size=6))
def test_cut_state_arrives_whole_or_from_another(drawn: list[tuple[int | None, int | None]]) -> None:
    """Each of three givers is asked twice at most, the furthest first."""

    async def main() -> None:
        async with Nodes(limits(3, drawn)) as nodes:
            givers, taker = await among(nodes, 3)
            for slot, node in enumerate(givers):
                giving(node, Kept(), 1000 * (3 - slot))
            await knows(taker, 3000, 2000, 1000)
            found = await take(taker)
            tries, expected = iter(drawn), None
            for slot in range(3):
                if next(tries) == (None, None) or next(tries) == (None, None):
                    expected = slot
                    break
            assert [line[0] for line in found.lines] == [str(slot) for slot in range(3)][:expected]
            assert all("was not taken over: the connection was lost" in line for line in found.lines)
            if expected is None:
                assert found[:2] == (None, [])
            else:
                (used,) = found.used
                assert found.taken is not None
                assert found.taken[:3] == (expected, used.step, 8 * LENGTH + len(REST))
                assert 1000 * (3 - expected) <= used.step < 1000 * (4 - expected)

    run(main())


@settings(max_examples=10)
@given(two_layouts(), st.sampled_from((700, 10**6)))
def test_takers_of_any_layout_get_the_vector_at_once(layouts: tuple[Layout, Layout], bucket: int) -> None:
    assume(all(layout.topology.replica_size <= MOST_RANKS for layout in layouts))
    replicas = [holdings_of(layouts[0]), holdings_of(layouts[1]), holdings_of(layouts[0])]
    length = max(holding.stop for holding in replicas[0])
    moved = [movements(holdings, [range(length)], bucket) for holdings in replicas]
    canonical = noise(length, seed=1)
    results = [[torch.zeros(size_of(holding)) for holding in holdings] for holdings in replicas]
    gives: list[Any] = [
        Gather(movement).whole(scattered(canonical, movement.own, range(length)), None)
        for movement in moved[0]
    ]
    gets: list[list[Any]] = [
        [Gather(movement).whole(None, results[at][movement.rank]) for movement in moved[at]] for at in (1, 2)
    ]

    async def conversations() -> None:
        places: dict[str, Serve] = {}
        takers = list[Taker]()

        async def serve(stream: Stream) -> None:
            takers.append(Taker(stream))
            if len(takers) == 2:
                await pass_on(takers, gives[0])
                assert await part_with(takers) == takers
            await takers[-1].over.wait()

        async def one(transfer: Any, carrier: MemoryCarrier) -> None:
            async with await carrier.dial("giver") as stream:
                await receive_vector(stream, transfer)
                await stream.send(EVERYTHING)

        carriers = [MemoryCarrier(places, name) for name in ("giver", "one", "other")]
        await carriers[0].listen(serve)
        await asyncio.gather(*(one(own[0], carrier) for own, carrier in zip(gets, carriers[1:], strict=True)))

    asyncio.run(conversations())
    for transfer in (*gives, *gets[0], *gets[1]):
        transfer.wait()
    for at in (1, 2):
        for holding, part in zip(replicas[at], results[at], strict=True):
            assert torch.equal(part, scattered(canonical, holding, range(length)))


async def test_replicas_that_ask_together_are_given_one_copy() -> None:
    async with Nodes() as nodes:
        givers, first = await among(nodes, 1)
        second, kept = await nodes.add(2, address_of(0)), Kept()
        giving(givers[0], kept, 7)
        await knows(first, 7)
        await until(lambda: second.present() and second.present()[0].step == 7)
        kept.copied.clear()
        found = await asyncio.gather(take(first), take(second))
        assert [one.used[0].step for one in found] == kept.copied * 2


async def test_stalled_taker_delays_others_by_one_bucket() -> None:
    async with Nodes() as nodes:
        givers, taker = await among(nodes, 1)
        sleeper, kept = await nodes.add(2, address_of(0)), Kept(LARGE)
        states = giving(givers[0], kept, 7)
        await knows(taker, 7)
        await until(lambda: sleeper.present())
        async with sleeper.links[0].open(STATE) as stream:
            began = asyncio.get_running_loop().time()
            found = await take(taker, kept=Kept(LARGE))
            assert found.used
            assert found.lines == []
            assert asyncio.get_running_loop().time() - began < COME_SECONDS / 2 + 3 * PHASE
            await until(lambda: states._giving is not None and states._giving.done(), COME_SECONDS)
            with pytest.raises(ConnectionError, match="has taken nothing for 60 s"):
                await stream.receive(8 * LARGE)


async def test_a_taker_that_is_killed_costs_nobody_anything() -> None:
    async with Nodes() as nodes:
        givers, taker = await among(nodes, 1)
        killed = await nodes.add(2, address_of(0))
        giving(givers[0], Kept(LARGE), 7)
        await knows(taker, 7)
        await until(lambda: killed.present())
        async with killed.links[0].open(STATE) as stream:
            began, taking = (
                asyncio.get_running_loop().time(),
                asyncio.create_task(take(taker, kept=Kept(LARGE))),
            )
            await stream.receive(100)
            stream.abort("was killed")
            assert (await taking).used
            assert asyncio.get_running_loop().time() - began < COME_SECONDS / 10


Answer = Callable[[Link, Stream], Awaitable[None]]


async def says_nothing(link: Link, stream: Stream) -> None:
    await asyncio.sleep(10 * COME_SECONDS)


async def begins(stream: Stream, step: int = 5000, names: Sequence[str] = NAMES, rest: int = 200) -> None:
    await send_json(stream, _OFFER, Offer(step, FACTS, list(names), rest))
    await stream.send(REST)


async def stops_in_the_middle(link: Link, stream: Stream) -> None:
    await begins(stream)
    await stream.send(bytes(100))
    await asyncio.sleep(10 * COME_SECONDS)


async def sends_too_little(link: Link, stream: Stream) -> None:
    await begins(stream)
    await stream.send(bytes(8 * LENGTH - 1))


async def has_too_long_a_rest(link: Link, stream: Stream) -> None:
    await begins(stream, rest=10**6)
    await stream.send(bytes(8 * LENGTH))


async def names_too_many_vectors(link: Link, stream: Stream) -> None:
    offer = {"step": 5000, "facts": FACTS, "vectors": ["weights"] * 65, "rest": 0}
    await send_json(stream, TypeAdapter(Any), offer)


async def began_anew(link: Link, stream: Stream) -> None:
    await begins(stream, step=3)
    await stream.receive(1)


async def talks_nonsense(link: Link, stream: Stream) -> None:
    await stream.send(b"\xff" * 100)


async def has_no_state(link: Link, stream: Stream) -> None:
    raise ConnectionError("has no state to give")


@pytest.mark.parametrize(
    ("answer", "why", "seconds"),
    [
        (says_nothing, "it has not answered for 30 s", SECONDS),
        (stops_in_the_middle, "nothing has come for 120 s", COME_SECONDS),
        (sends_too_little, "the other side closed the stream before its end", 0),
        (has_too_long_a_rest, "the other side closed the stream before its end", 0),
        (names_too_many_vectors, "a message is malformed", 0),
        (talks_nonsense, "a message has more than 2097152 bytes", 0),
        (began_anew, "it is at local step 3 by now, as it was started anew", 0),
        (has_no_state, "has no state to give", 0),
    ],
)
async def test_giver_without_state_is_named_next_is_asked(answer: Answer, why: str, seconds: float) -> None:
    async with Nodes() as nodes:
        (other, giver), taker = await among(nodes, 2)
        giving(giver, Kept(), 900)
        TakeOver(NodeOfWorkers(other)).trains_from(5000)  # type: ignore[arg-type]
        other.serves[STATE] = answer
        await knows(taker, 5000, 900)
        began = asyncio.get_running_loop().time()
        found = await take(taker, least=800)
        assert asyncio.get_running_loop().time() - began < seconds + 10.0
        (line,) = found.lines
        assert line.startswith(f"0 was not taken over: {why}")
        assert found.taken is not None
        assert found.taken.slot == 1
        assert found.used


async def test_a_state_that_does_not_fit_or_is_not_finite_is_not_used() -> None:
    """Nor is a state that turns out in its use not to fit."""

    class Picky(Kept):
        def load(self, state: State) -> None:
            if state.step < 2000:
                raise NotTakenError("it is\nno state")
            super().load(state)

    async with Nodes() as nodes:
        givers, taker = await among(nodes, 4)
        kinds = [Kept(wrong=float("inf")), Kept(facts={}), Kept(wrong=float("nan")), Kept()]
        for slot, (node, kept) in enumerate(zip(givers, kinds, strict=True)):
            giving(node, kept, 1000 * (4 - slot))
        await knows(taker, 4000, 3000, 2000, 1000)
        assert (await take(taker, kept=Picky())).lines == [
            "0 was not taken over: its numbers are not finite",
            "1 was not taken over: its facts are others",
            "2 was not taken over: its numbers are not finite",
            "3 was not taken over: it is no state",
        ]
        assert (await take(taker)).used


async def asked(nodes: Nodes, step: int, length: int = LENGTH) -> tuple[Node, TakeOver, Link]:
    """Return a giver that is at a boundary, and the link of a replica that is to ask it."""
    (giver,), taker = await among(nodes, 1)
    states = states_of(giver, length)
    states.trains_from(step)
    await knows(taker, step)
    return taker, states, taker.links[0]


async def test_leaving_giver_ends_and_refuses_states() -> None:
    async with Nodes() as nodes:
        taker, states, link = await asked(nodes, 20, LARGE)
        async with link.open(STATE) as stream:
            await until(lambda: states.wanted(20))
            assert states.give(Kept(LARGE), 20)
            await stream.receive(100)
            taking = asyncio.create_task(take(taker))
            await until(lambda: states._waiting)
            assert not states.wanted(20), "one copy at a time"
            with Worker() as worker:
                await asyncio.get_running_loop().run_in_executor(worker, states.close)
            with pytest.raises(ConnectionError, match="gives no state any more"):
                await stream.receive(8 * LARGE)
        assert await taking == (None, [], ["0 was not taken over: has no state to give"])


@pytest.mark.parametrize(
    ("wrong", "line"),
    [(None, "MemoryError: no memory"), (State(0, FACTS, {}), "ValidationError: 1 validation")],
)
async def test_a_state_that_cannot_be_copied_or_sent_stops_no_training(
    wrong: State | None, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    class Wrong(Kept):
        def copy(self, done: int) -> State:
            if wrong is None:
                raise MemoryError("no memory for a copy")
            return wrong

    async with Nodes() as nodes:
        _, states, link = await asked(nodes, 20)
        async with link.open(STATE) as stream:
            await until(lambda: states.wanted(20))
            assert states.give(Wrong(), 20) == (wrong is not None)
            with pytest.raises(ConnectionError, match="cannot give its state"):
                await stream.receive(1)
        async with link.open(STATE) as stream:
            await until(lambda: states.wanted(20))
            assert states.give(Kept(), 20)
            await stream.receive(100)
    assert f"this rank's state cannot be given: {line}" in capfd.readouterr().err


async def test_stopping_job_takes_no_state() -> None:
    async with Nodes() as nodes:
        (giver,), taker = await among(nodes, 1)
        TakeOver(NodeOfWorkers(giver)).trains_from(5)  # type: ignore[arg-type]
        giver.serves[STATE] = says_nothing
        await knows(taker, 5)
        at = asyncio.get_running_loop().time
        taking = asyncio.create_task(take(taker))
        await asyncio.sleep(1.0)
        taker._stopped = lambda: True
        began = at()
        assert await taking == (None, [], [])
        assert await take(taker) == (None, [], [])
        assert at() - began < 2.0


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 5)), st.integers(0, 9), st.integers(1, 5), st.data())
def test_the_furthest_is_chosen_and_of_equals_the_next_one(
    steps: dict[int, int], own: int, least: int, data: st.DataObject
) -> None:
    given_up = data.draw(st.sets(st.sampled_from(sorted(steps) or [0])))
    found = furthest(steps, own, least, given_up)
    candidates = {slot for slot, step in steps.items() if step >= least} - given_up
    if found is None:
        assert not candidates
        return
    assert found in candidates
    best = {slot for slot in candidates if steps[slot] == max(steps[one] for one in candidates)}
    assert (found - own) % 10 == min((slot - own) % 10 for slot in best)
