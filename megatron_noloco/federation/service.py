"""The thread of a replica that moves messages while the replica computes."""

import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_noloco.federation.control import Address, Member
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.peers import Peers
from megatron_noloco.federation.wires import Wires

_TICK_SECONDS = 0.5


class ServiceFailedError(RuntimeError):
    """The thread has ended with an error, which is the cause: no message moves any more."""


class Service:
    """Connects to the other replicas, and runs the protocol in a thread, from construction to `close`.

    Args:
        member, own: see `Peers`.
        listener: takes the connections of others; None: no other process can connect to this one.

    Attributes:
        peers: its methods are work for `do`.
    """

    def __init__(
        self, member: Member, own: Address, listener: socket.socket | None, keys: Keys | None
    ) -> None:
        self.peers = Peers(member, own, keys)
        self._wires = self.peers.wires = Wires(listener, self.peers.visited)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="federation", daemon=True)
        self._thread.start()

    def do(self, work: Callable[..., None], *arguments: Any) -> None:
        """Have the thread of the service call `work`, soon and in the order of these calls. From any thread.

        Raises ServiceFailedError as `check` does.
        """
        self.check()
        self._work.put(partial(work, *arguments))
        self._wires.wake()

    def check(self) -> None:
        """Raise ServiceFailedError if the thread has ended with an error: nobody can be reached any more."""
        if self._failure is not None:
            raise ServiceFailedError(
                f"the thread that exchanges with other replicas has failed: {self._failure!r}; started again, "
                "this job continues from its newest checkpoint"
            ) from self._failure

    def close(self) -> None:
        """Stop; what was posted before is still sent, for two seconds at most."""
        if self._thread.is_alive() and self._failure is None:
            self.do(setattr, self, "_closing", True)
        self._thread.join()

    def _run(self) -> None:
        peers, wires = self.peers, self._wires
        try:
            next_tick, followed = 0.0, peers.directory.addresses
            while not self._closing:
                if (now := time.monotonic()) >= next_tick:
                    wires.end_late()
                    peers.tick()
                    next_tick = now + _TICK_SECONDS
                wires.turn(max(0.0, next_tick - now))
                while not self._work.empty():
                    self._work.get()()
                if peers.directory.addresses is not followed:
                    followed = peers.directory.addresses
                    peers.follow_directory()
        except Exception as error:
            self._failure = error
            sys.stderr.write(f"replica {peers.member.slot}: the federation's thread has failed\n")
            traceback.print_exc()
        finally:
            wires.close(linger=self._closing)
            peers.end_all("cannot be reached: this replica's messages have stopped")
