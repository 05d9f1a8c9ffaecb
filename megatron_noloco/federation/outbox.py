"""Keeps what waits to be sent to one rank, and sends it over a link."""

import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from megatron_noloco.federation.frames import Frame
from megatron_noloco.federation.links import Link

Chunks = Iterator[tuple[Frame, np.ndarray]]

_FEWEST_CHUNKS, _MOST_CHUNKS = 4, 32  # under way at a time
_SOON_SECONDS, _LATE_SECONDS = 0.5, 1.0  # for a confirmation
_LOST_SECONDS = 60.0  # without any confirmation, after which chunks under way count as lost
_MOST_CONTROL = 4096  # small frames that wait; a rank that reads none gets no more


class Outbox:
    """Sends frames to one rank. Never blocks: `flush` sends the rest.

    A chunk is under way until the receiver has confirmed it. 4 may be at a time at first, one more for each
    confirmation that took less than half a second, one less for each that took more than a second. So a fast
    connection is kept busy, and little waits in front of a slow one. Confirmations may be lost while the link
    stays up: where both ranks have opened a connection, they come over the other one. So after a minute without a
    confirmation further chunks are sent.

    Attributes:
        link: to the rank; None: there is none.
    """

    def __init__(self) -> None:
        self.link: Link | None = None
        self._hello: Frame | None = None
        self._control: deque[tuple[Frame, np.ndarray | None]] = deque()
        self._chunks: deque[tuple[int, Chunks]] = deque()
        self._next: tuple[Frame, np.ndarray] | None = None
        self._under_way: deque[float] = deque()  # when they were sent
        self._confirmed = 0.0  # when the last confirmation came, or the first chunk under way was sent
        self._most = _FEWEST_CHUNKS

    def use(self, link: Link | None) -> None:
        """Send over another link from now on; what waits is dropped."""
        self.link = link
        self._control.clear()
        self._chunks.clear()
        self._under_way.clear()
        self._hello = self._next = None

    def hello(self, frame: Frame) -> None:
        """Send a HELLO; it replaces one that is not sent yet."""
        self._hello = frame
        self.flush()

    def control(self, frame: Frame, data: np.ndarray | None = None) -> None:
        """Send a small frame, before all chunks."""
        if len(self._control) < _MOST_CONTROL:
            self._control.append((frame, data))
        self.flush()

    def chunks(self, ticket: int, frames: Chunks) -> None:
        """Send the chunks of a ticket, after those that wait already."""
        self._chunks.append((ticket, frames))
        self.flush()

    def confirm(self) -> None:
        """Note that the receiver has one chunk more."""
        if self._under_way:  # else it was sent over an earlier link
            self._confirmed = time.monotonic()
            seconds = self._confirmed - self._under_way.popleft()
            self._most += (seconds < _SOON_SECONDS) - (seconds > _LATE_SECONDS)
            self._most = min(max(_FEWEST_CHUNKS, self._most), _MOST_CHUNKS)
        self.flush()

    def drop(self, tickets: set[int]) -> None:
        """Send no more chunks of these tickets."""
        if self._chunks and self._chunks[0][0] in tickets:
            self._next = None
        self._chunks = deque(entry for entry in self._chunks if entry[0] not in tickets)

    def flush(self) -> None:
        """Send what can be sent now."""
        while self._control and self._send(*self._control[0]):
            self._control.popleft()
        if self._control:
            return
        if self._hello is not None and self._send(self._hello):  # after the frames that it may declare void
            self._hello = None
        now = time.monotonic()
        if now - self._confirmed > _LOST_SECONDS:
            self._under_way.clear()
        while len(self._under_way) < self._most and self._send_chunk():
            if not self._under_way:
                self._confirmed = now
            self._under_way.append(now)

    def _send_chunk(self) -> bool:
        while self._next is None:
            if not self._chunks:
                return False
            self._next = next(self._chunks[0][1], None)
            if self._next is None:
                self._chunks.popleft()
        if not self._send(*self._next):
            return False
        self._next = None
        return True

    def _send(self, frame: Frame, data: np.ndarray | None = None) -> bool:
        if self.link is None:
            return False
        return self.link.send(frame.pack(), *(() if data is None else (data,)))
