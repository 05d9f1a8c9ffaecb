"""The model of a network: when a packet that a host sends reaches another host, if it does."""

import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

COHERENCE_SECONDS = 0.1  # for so long a path keeps its delay


@dataclass(frozen=True)
class Link:
    """The connection of a host.

    What it sends waits for the link's rate and then travels for the delay; what it receives waits for the rate
    only. A packet that would wait longer than `queue_seconds` is dropped, as routers do.

    Attributes:
        rate: bits per second in each direction, headers of IP and TCP included.
        delay: mean seconds to another host.
        jitter: standard deviation of the delay over its mean. The delay is lognormal, drawn for each path (source
            and destination) every COHERENCE_SECONDS; packets of a path do not overtake each other.
        loss: share of the packets that are lost, each by itself.
        queue_seconds: the longest wait for the rate.
    """

    rate: float = 1e9
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    queue_seconds: float = 0.2

    def __post_init__(self) -> None:
        for name, sound, bounds in (
            ("rate", self.rate > 0, "above 0"),
            ("delay", self.delay >= 0, "at least 0"),
            ("jitter", self.jitter >= 0, "at least 0"),
            ("loss", 0 <= self.loss < 1, "at least 0 and below 1"),
            ("queue_seconds", self.queue_seconds > 0, "above 0"),
        ):
            if not sound:
                raise ValueError(f"{name} of a link must be {bounds}, not {getattr(self, name)}")

    def draw_delay(self, draws: random.Random) -> float:
        """Draw a delay in seconds, lognormal with this mean and standard deviation."""
        if not (self.delay and self.jitter):
            return self.delay
        variance = math.log1p(self.jitter**2)
        return draws.lognormvariate(math.log(self.delay) - variance / 2, math.sqrt(variance))


@dataclass
class _Path:
    """The path from one host to another: its present delay, and when the last packet arrives."""

    delay: float = 0.0
    drawn_until: float = -math.inf
    last_arrival: float = -math.inf


class Network:
    """Packets on their way between hosts. The caller gives the time, in seconds that do not decrease.

    Args:
        links: of each host.
        seed: of jitter and loss.

    Attributes:
        cut: hosts whose links are cut: what they send, or is sent to them, is lost.
    """

    def __init__(self, links: Sequence[Link], seed: int = 0) -> None:
        self.links = links
        self.cut: set[int] = set()
        self._draws = random.Random(seed)
        self._paths: defaultdict[tuple[int, int], _Path] = defaultdict(_Path)
        self._sending_until = [-math.inf] * len(links)
        self._receiving_until = [-math.inf] * len(links)
        self._order = itertools.count()  # packets of one instant stay in order
        self._travelling: list[tuple[float, int, int, int, bytes]] = []  # until they reach a host's link
        self._waiting: list[tuple[float, int, int, bytes]] = []  # until they have passed it

    def send(self, now: float, source: int, destination: int, size: int, packet: bytes) -> None:
        """Send a packet of `size` bytes on the wire from `source`."""
        if self.cut & {source, destination}:
            return
        link = self.links[source]
        free = max(now, self._sending_until[source])
        if free - now > link.queue_seconds:
            return
        self._sending_until[source] = sent = free + 8 * size / link.rate
        if link.loss and self._draws.random() < link.loss:
            return
        path = self._paths[source, destination]
        if sent >= path.drawn_until:
            path.delay, path.drawn_until = link.draw_delay(self._draws), sent + COHERENCE_SECONDS
        path.last_arrival = max(path.last_arrival, sent + path.delay)
        heapq.heappush(self._travelling, (path.last_arrival, next(self._order), destination, size, packet))

    def received(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Yield the packets that have reached a host by now, with the host, in order."""
        while self._travelling and self._travelling[0][0] <= now:
            arrival, order, host, size, packet = heapq.heappop(self._travelling)
            link = self.links[host]
            # The first packet needs no time here: it was spread out by the rate of the sender already.
            free = max(arrival, self._receiving_until[host] + 8 * size / link.rate)
            if free - arrival > link.queue_seconds:
                continue
            self._receiving_until[host] = free
            heapq.heappush(self._waiting, (free, order, host, packet))
        while self._waiting and self._waiting[0][0] <= now:
            _, _, host, packet = heapq.heappop(self._waiting)
            yield host, packet

    def next_event(self) -> float:
        """Return when `received` will have a packet to move; infinity if none is on its way."""
        return min(heap[0][0] if heap else math.inf for heap in (self._travelling, self._waiting))
