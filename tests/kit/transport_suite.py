"""What every transport must do, as plain functions that all ranks of a world of three run together.

Run by test_transports.py over every transport. `mpirun -n 3 python -m tests.kit.transport_suite` runs
it over MPI, each rank printing one JSON line.
"""

import time
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_noloco.outer import Exchange
from megatron_noloco.plans.topology import Place
from megatron_noloco.transport.interface import ExchangeTimeoutError, Flight, Message, Transport
from tests.kit.ranks import say

WORLD_SIZE = 3
DEADLINE_SECONDS = 20.0
BIG_ELEMENTS = 1_000_000  # beyond what MPI sends eagerly, so that a receiver that is missing is noticed


def pattern(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that tell ranks and places apart and fit even int8."""
    return ((torch.arange(count) * 7 + rank * 31) % 101).to(dtype)


def complete(flight: Flight) -> None:
    flight.wait(DEADLINE_SECONDS)
    assert flight.done()


def swap(
    transport: Transport, partner: int, count: int, tag: int, dtype: torch.dtype = torch.float32
) -> None:
    """Exchange patterns with one partner and look at what came."""
    incoming = torch.full((count,), 127).to(dtype)
    outgoing = pattern(transport.rank, count, dtype)
    complete(transport.post([Message(partner, outgoing)], [Message(partner, incoming)], tag))
    assert torch.equal(incoming, pattern(partner, count, dtype))


def swaps_any_length(transport: Transport) -> None:
    """One element, many, none."""
    if transport.rank < 2:
        for tag, count in enumerate((1, 100_001, 0), start=1):
            swap(transport, 1 - transport.rank, count, tag=tag)


def an_empty_message_goes_one_way(transport: Transport) -> None:
    """It opens a connection; see `outer.channels.Contacts`."""
    empty = torch.empty(0)
    if transport.rank == 0:
        complete(transport.post([Message(1, empty)], [], tag=91))
    elif transport.rank == 1:
        complete(transport.post([], [Message(0, empty)], tag=91))


def swaps_every_dtype(transport: Transport) -> None:
    if transport.rank < 2:
        dtypes = (torch.bfloat16, torch.int8, torch.float16, torch.float32, torch.float64)
        for tag, dtype in enumerate(dtypes, start=10):
            swap(transport, 1 - transport.rank, 333, tag=tag, dtype=dtype)


def tags_may_be_huge(transport: Transport) -> None:
    if transport.rank < 2:
        swap(transport, 1 - transport.rank, 50, tag=2**40 + 5)


def everyone_to_everyone(transport: Transport) -> None:
    others = [rank for rank in range(WORLD_SIZE) if rank != transport.rank]
    mine = pattern(transport.rank, 100)
    theirs = [torch.zeros(100) for _ in others]
    receives = [Message(rank, buffer) for rank, buffer in zip(others, theirs, strict=True)]
    complete(transport.post([Message(rank, mine) for rank in others], receives, tag=20))
    assert all(torch.equal(buffer, pattern(rank, 100)) for rank, buffer in zip(others, theirs, strict=True))


def two_flights_complete_in_reverse(transport: Transport) -> None:
    """The flight posted first is collected last, and neither takes what is the other's."""
    if transport.rank == 2:
        return
    partner = 1 - transport.rank
    incoming = [torch.zeros(200), torch.zeros(300)]
    outgoing = [pattern(transport.rank, 200), pattern(transport.rank + 5, 300)]
    order = (0, 1) if transport.rank == 0 else (1, 0)  # the two sides do not even post in the same order
    flights = {
        which: transport.post(
            [Message(partner, outgoing[which])], [Message(partner, incoming[which])], tag=30 + which
        )
        for which in order
    }
    complete(flights[1])
    assert torch.equal(incoming[1], pattern(partner + 5, 300))
    complete(flights[0])
    assert torch.equal(incoming[0], pattern(partner, 200))


def same_tag_is_first_in_first_out(transport: Transport) -> None:
    flights, buffers = [], [torch.zeros(90) for _ in range(5)]
    for turn, buffer in enumerate(buffers):
        if transport.rank == 0:
            flights.append(transport.post([Message(1, pattern(turn, 90))], [], tag=40))
        elif transport.rank == 1:
            flights.append(transport.post([], [Message(0, buffer)], tag=40))
    for flight in flights:
        complete(flight)
    if transport.rank == 1:
        assert all(torch.equal(buffer, pattern(turn, 90)) for turn, buffer in enumerate(buffers))


def a_flight_that_is_done_frees_its_send_buffers(transport: Transport) -> None:
    """Overwriting after `wait` does not change what the receiver sees, however late it looks."""
    if transport.rank == 0:
        outgoing = pattern(0, 500)
        flight = transport.post([Message(1, outgoing)], [], tag=50)
        flight.wait(DEADLINE_SECONDS)
        outgoing.zero_()
    elif transport.rank == 1:
        time.sleep(0.05)
        incoming = torch.zeros(500)
        complete(transport.post([], [Message(0, incoming)], tag=50))
        assert torch.equal(incoming, pattern(0, 500))


def a_flight_is_done_when_all_has_come(transport: Transport) -> None:
    """Of two partners one is late: the deadline names it."""
    if transport.rank == 0:
        buffers = [torch.zeros(100), torch.zeros(100)]
        flight = transport.post([], [Message(1, buffers[0]), Message(2, buffers[1])], tag=60)
        swap(transport, 2, 1, tag=61)  # after its message of tag 60
        assert_times_out(lambda: flight.wait(0.3), rank=1, tag=60, seconds=0.3)
        assert not flight.done()
        swap(transport, 1, 1, tag=62)  # only now does rank 1 send
        complete(flight)
        assert torch.equal(buffers[0], pattern(1, 100))
        assert torch.equal(buffers[1], pattern(2, 100))
    elif transport.rank == 1:
        swap(transport, 0, 1, tag=62)
        complete(transport.post([Message(0, pattern(1, 100))], [], tag=60))
    else:
        complete(transport.post([Message(0, pattern(2, 100))], [], tag=60))
        swap(transport, 0, 1, tag=61)


def a_missed_deadline_names_the_rank(transport: Transport) -> None:
    """Rank 1 is late. Rank 0 learns it in time, goes on with rank 2, then with rank 1 under a new tag."""
    if transport.rank == 0:
        missing = torch.zeros(BIG_ELEMENTS)
        flight = transport.post([], [Message(1, missing)], tag=70)
        assert_times_out(lambda: flight.wait(0.3), rank=1, tag=70, seconds=0.3)
        swap(transport, 2, 400, tag=71)
        swap(transport, 1, 400, tag=72)
        swap(transport, 1, 400, tag=73)
    elif transport.rank == 1:
        swap(transport, 0, 400, tag=72)
        late = transport.post([Message(0, pattern(1, BIG_ELEMENTS))], [], tag=70)  # into the abandoned buffer
        swap(transport, 0, 400, tag=73)
        late.wait(DEADLINE_SECONDS)
    else:
        swap(transport, 0, 400, tag=71)
    everyone_to_everyone(transport)  # keeps rank 0 polling until the late message is through


def an_unwanted_message_times_out(transport: Transport) -> None:
    """A big message that nobody receives: the sender learns that too (loopback copies, so it never waits)."""
    if transport.rank == 0:
        flight = transport.post([Message(1, pattern(0, BIG_ELEMENTS))], [], tag=80)
        if transport.name != "loopback":
            assert_times_out(lambda: flight.wait(0.3), rank=1, tag=80, seconds=0.3)
        swap(transport, 1, 400, tag=81)
        swap(transport, 1, 400, tag=82)
    elif transport.rank == 1:
        swap(transport, 0, 400, tag=81)
        incoming = torch.zeros(BIG_ELEMENTS)
        flight = transport.post([], [Message(0, incoming)], tag=80)
        swap(transport, 0, 400, tag=82)
        if transport.name != "mpi":  # rank 0 need not be inside MPI any more, and then nothing moves
            complete(flight)
            assert torch.equal(incoming, pattern(0, BIG_ELEMENTS))


def two_exchanges_are_under_way_at_once(transport: Transport) -> None:
    """One among all, one of a pair, with the same number; finished in another order on every rank."""
    place = Place(transport.rank, WORLD_SIZE)
    all_three, pair = (Exchange(transport, place, channel, DEADLINE_SECONDS) for channel in (62, 63))
    mine, ours = pattern(transport.rank, 100_001), pattern(transport.rank, 50_000)
    group = (0, 1) if transport.rank < 2 else (2,)
    all_three.begin(mine, (0, 1, 2), 0, "the exchange of all")
    pair.begin(ours, group, 0, "the exchange of two")
    means = [torch.zeros(100_001), torch.zeros(50_000)]
    for which in (1, 0) if transport.rank else (0, 1):
        for start, stop, mean in (all_three, pair)[which].finish():
            means[which][start:stop] = mean
    for found, members in zip(means, (range(WORLD_SIZE), group), strict=True):
        expected = torch.stack([pattern(rank, len(found)) for rank in members]).mean(dim=0)
        torch.testing.assert_close(found, expected)


def asking_does_not_wait(transport: Transport) -> None:
    """Nothing has arrived before rank 1 is told to send; then asking alone brings everything."""
    if transport.rank == 0:
        incoming = torch.zeros(100_001)
        flight = transport.post([], [Message(1, incoming)], tag=75)
        assert not flight.done()
        swap(transport, 1, 1, tag=76)  # only now does rank 1 send
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not flight.done() and time.monotonic() < deadline:
            pass
        assert torch.equal(incoming, pattern(1, 100_001))
    elif transport.rank == 1:
        swap(transport, 0, 1, tag=76)
        complete(transport.post([Message(0, pattern(1, 100_001))], [], tag=75))


def an_exchange_of_three_completes_without_waiting(transport: Transport) -> None:
    exchange = Exchange(transport, Place(transport.rank, WORLD_SIZE), 61, DEADLINE_SECONDS)
    exchange.bucket = 10_000  # more than are under way at a time
    exchange.begin(pattern(transport.rank, 100_001), (0, 1, 2), 0, "a test")
    mean, seen = torch.zeros(100_001), 0
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not exchange.done and time.monotonic() < deadline:
        for start, stop, piece in exchange.progress():
            mean[start:stop], seen = piece, seen + stop - start
    assert list(exchange.finish()) == []
    assert seen == 100_001
    expected = torch.stack([pattern(rank, 100_001) for rank in range(WORLD_SIZE)]).mean(dim=0)
    torch.testing.assert_close(mean, expected)


def assert_times_out(wait: Callable[[], object], rank: int, tag: int, seconds: float) -> None:
    with pytest.raises(ExchangeTimeoutError, match=f"rank {rank}") as caught:
        wait()
    assert (caught.value.rank, caught.value.tag) == (rank, tag)
    assert caught.value.waited_seconds >= seconds


def refuses_what_it_cannot_carry(transport: Transport) -> None:
    other = (transport.rank + 1) % WORLD_SIZE
    for message in (
        Message(transport.rank, torch.zeros(2)),
        Message(WORLD_SIZE, torch.zeros(2)),
        Message(other, torch.zeros(2, 2)),
        Message(other, torch.zeros(4)[::2]),
        Message(other, torch.zeros(2, requires_grad=True)),
    ):
        with pytest.raises(ValueError):
            transport.post([message], [], tag=90)


CASES: list[Callable[[Transport], None]] = [
    swaps_any_length,
    an_empty_message_goes_one_way,
    swaps_every_dtype,
    tags_may_be_huge,
    everyone_to_everyone,
    two_flights_complete_in_reverse,
    same_tag_is_first_in_first_out,
    a_flight_that_is_done_frees_its_send_buffers,
    a_flight_is_done_when_all_has_come,
    a_missed_deadline_names_the_rank,
    an_unwanted_message_times_out,
    two_exchanges_are_under_way_at_once,
    asking_does_not_wait,
    an_exchange_of_three_completes_without_waiting,
    refuses_what_it_cannot_carry,
]


def run_suite(transport: Transport) -> dict[str, str]:
    """Run every case as one rank: "passed" or a traceback, by name of the case."""
    outcomes = {}
    for case in CASES:
        try:
            case(transport)
            outcomes[case.__name__] = "passed"
        except Exception:
            outcomes[case.__name__] = f"rank {transport.rank}: {traceback.format_exc()}"
    return outcomes


if __name__ == "__main__":
    from megatron_noloco.transport.mpi import MpiTransport

    torch.set_num_threads(1)
    mpi = MpiTransport()
    say({"rank": mpi.rank, "outcomes": run_suite(mpi)})
