"""The model of the network lab, on a clock of its own, and what its command line refuses."""

import random
import statistics

import pytest

from tools.netlab.__main__ import chosen_ways, host_numbers, main, quantity
from tools.netlab.network import COHERENCE_SECONDS, Link, Network
from tools.netlab.relay import obey

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


def test_the_delay_of_a_path_changes_but_packets_do_not_overtake_each_other() -> None:
    network = Network([Link(1e9, 0.2, jitter=2.5)] * 2, seed=2)
    for index in range(500):
        network.send(index / 100, 0, 1, MTU, b"%d" % index)
    found = arrivals(network)
    assert [packet for _, _, packet in found] == [b"%d" % index for index in range(500)]
    delays = {round(when - index / 100, 3) for index, (when, _, _) in enumerate(found)}
    assert len(delays) >= 5 / COHERENCE_SECONDS


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rate": 0.0}, "rate of a link must be above 0"),
        ({"delay": -1.0}, "delay of a link must be at least 0"),
        ({"jitter": -0.1}, "jitter of a link must be at least 0"),
        ({"loss": 1.0}, "loss of a link must be at least 0 and below 1"),
        ({"queue_seconds": 0.0}, "queue_seconds of a link must be above 0"),
    ],
)
def test_links_that_cannot_be(fields: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Link(**fields)


def test_quantities_have_units() -> None:
    assert quantity("rate", "10Mbit") == 1e7
    assert quantity("delay", "25ms") == 0.025
    assert quantity("delay", "2s") == 2.0
    assert quantity("bytes", "0.5MB") == 5e5
    for kind, text, units in (("rate", "10", "kbit, Mbit, Gbit"), ("delay", "xms", "us, ms, s")):
        with pytest.raises(ValueError, match=units):
            quantity(kind, text)


def test_hosts_and_ways_are_checked() -> None:
    assert host_numbers("2,16") == [2, 16]
    assert chosen_ways("round;MPI_Allreduce, ring") == ["round", "MPI_Allreduce, ring"]
    for hosts in ("1", "two", "", "2,300"):
        with pytest.raises(ValueError, match="from 2 to 250"):
            host_numbers(hosts)
    with pytest.raises(ValueError, match="must be some of round; "):
        chosen_ways("square")


def test_a_single_repeat_which_would_be_left_out_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["netlab", "rounds", "--repeats", "1"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert (
        capsys.readouterr().err == "netlab: --repeats 1 leaves nothing: the first is left out; at least 2\n"
    )
