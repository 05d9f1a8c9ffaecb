"""The model of the network lab, on a clock of its own, and what its command line refuses."""

import random
import statistics

import pytest

from tests.netlab.network import COHERENCE_SECONDS, Link, Network
from tests.netlab.relay import obey

MTU = 1500
RATE = 8 * MTU * 100.0  # a hundred packets a second


def arrivals(network: Network, until: float = 1e6) -> list[tuple[float, int, bytes]]:
    """(when, host, packet) of all that arrives, in order."""
    found = []
    while (now := network.next_event()) <= until:
        found += [(now, host, packet) for host, packet in network.received(now)]
    return found


def burst(network: Network, count: int, source: int = 0, destination: int = 1) -> None:
    for index in range(count):
        network.send(0.0, source, destination, MTU, b"%d" % index)


def test_packets_leave_at_the_rate_and_travel_for_the_delay() -> None:
    network = Network([Link(RATE, 0.5, queue_seconds=10.0)] * 2)
    burst(network, 20)
    found = arrivals(network)
    assert [packet for _, _, packet in found] == [b"%d" % index for index in range(20)]
    assert [when for when, _, _ in found] == pytest.approx([0.5 + (index + 1) / 100 for index in range(20)])


def test_senders_share_the_rate_of_the_receiver() -> None:
    network = Network([Link(RATE, 0.5, queue_seconds=10.0)] * 3)
    for source in (0, 2):
        burst(network, 10, source)
    assert arrivals(network)[-1][0] == pytest.approx(0.5 + 20 / 100)


def test_each_host_has_its_own_link() -> None:
    network = Network([Link(RATE, 0.1), Link(2 * RATE, 0.2)])
    network.send(0.0, 0, 1, MTU, b"")
    network.send(0.0, 1, 0, MTU, b"")
    times = {host: when for when, host, _ in arrivals(network)}
    assert times == pytest.approx({1: 0.1 + 0.01, 0: 0.2 + 0.005})


def test_a_full_queue_drops() -> None:
    network = Network([Link(RATE, queue_seconds=0.1)] * 2)
    burst(network, 50)
    assert len(arrivals(network)) == 11


def test_a_cut_link_loses_all_of_its_host_and_of_no_other() -> None:
    network = Network([Link(RATE, 0.1)] * 4)
    obey(network, b"cut 1\ncut 3\nheal 3\n")
    for source, destination in ((0, 1), (1, 2), (0, 2), (3, 0)):
        network.send(0.0, source, destination, MTU, b"")
    assert sorted(host for _, host, _ in arrivals(network)) == [0, 2]
    obey(network, b"heal 1\n")
    network.send(1.0, 0, 1, MTU, b"")
    assert [host for _, host, _ in arrivals(network)] == [1]


def test_loss_is_a_share_of_the_packets() -> None:
    network = Network([Link(RATE, loss=0.2, queue_seconds=1e3)] * 2, seed=3)
    burst(network, 5000)
    assert len(arrivals(network)) == pytest.approx(4000, rel=0.05)


def test_jitter_has_its_mean_and_deviation() -> None:
    draws, link = random.Random(1), Link(delay=0.02, jitter=1.0)
    delays = [link.draw_delay(draws) for _ in range(100_000)]
    assert statistics.mean(delays) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(delays) == pytest.approx(0.02, rel=0.1)


def test_jitter_does_not_reorder_packets() -> None:
    network = Network([Link(1e9, 0.2, jitter=2.5)] * 2, seed=2)
    for index in range(500):
        network.send(index / 100, 0, 1, MTU, b"%d" % index)
    found = arrivals(network)
    assert [packet for _, _, packet in found] == [b"%d" % index for index in range(500)]
    delays = {round(when - index / 100, 3) for index, (when, _, _) in enumerate(found)}
    assert len(delays) >= 5 / COHERENCE_SECONDS
