"""Who dials whom, when, and by what.

Of two replicas that can dial each other, the higher slot opens the link; if no link comes in three seconds, the
lower slot dials as well. A replica that does not answer is dialled again after pauses that double up to a minute.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megatron_noloco.federation.folder import is_folder_endpoint
from megatron_noloco.federation.links import Owner
from megatron_noloco.federation.messages import Hello, Later, hear, say
from megatron_noloco.federation.streams import Carrier, RefusedError, Serve, Stream, StreamEndedError, within

_OPEN_SECONDS = 10.0
_BACK_SECONDS = 3.0  # for the side that dials, before the other side tries
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # between two attempts to dial
_UNANSWERED_SECONDS = 5.0  # after which an address is named


class Carriers(NamedTuple):
    """What carries streams: between hosts, and where this process has no port, through a folder."""

    network: Carrier
    folder: Carrier | None = None

    async def listen(self, serve: Serve) -> None:
        """Accept streams of other processes from now on."""
        for carrier in filter(None, self):
            await carrier.listen(serve)

    async def close(self) -> None:
        """End all streams, and accept no more."""
        for carrier in filter(None, self):
            await carrier.close()

    @property
    def pulse_seconds(self) -> float:
        """See `Carrier`; the longest."""
        return max(carrier.pulse_seconds for carrier in filter(None, self))

    @property
    def is_replaced(self) -> bool:
        """See `Carrier`; of any."""
        return any(carrier.is_replaced for carrier in filter(None, self))

    def to(self, endpoint: str) -> Carrier | None:
        """Return what leads to an endpoint; None: nothing does."""
        if is_folder_endpoint(endpoint):
            return self.folder
        return self.network if endpoint else None


@dataclass
class _Attempts:
    """The attempts to dial an address. Times are those of the loop.

    Attributes:
        apart_since: when the address became known, or the link was lost.
        again: when the next attempt may begin.
        task: the attempt under way.
    """

    endpoint: str
    incarnation: int
    apart_since: float
    again: float = 0.0
    pause: float = _FIRST_PAUSE
    task: "asyncio.Task[None] | None" = None


class Dialling:
    """The attempts of a node to reach others.

    Attributes:
        refusal: why a process that was dialled cannot exchange with this one; "": all can.
        has_answers: whether another process has answered that was dialled as a seed.
        unanswered: why nobody has answered at a seed, by its endpoint.
    """

    def __init__(self, node: Owner, carriers: Carriers) -> None:
        self.refusal, self.has_answers = "", False
        self.unanswered: dict[str, str] = {}
        self._node, self._carriers = node, carriers
        self._attempts: dict[int, _Attempts] = {}
        self._answered = set[str]()  # endpoints

    async def dial(self, slot: int) -> Stream:
        """Open a stream to a replica. Raises ConnectionError."""
        address = self._node.directory.addresses.get(slot)
        endpoint = "" if address is None else address.endpoint
        if (carrier := self._carriers.to(endpoint)) is None:
            raise StreamEndedError("cannot be dialled from here")
        return await carrier.dial(endpoint)

    def is_dialled_by(self, slot: int) -> bool:
        """Return whether another replica can dial this one, as far as the addresses say."""
        own, theirs = self._node.directory.own.endpoint, self._node.directory.addresses[slot].endpoint
        return is_folder_endpoint(theirs) if is_folder_endpoint(own) else bool(own)

    def heard(self, slot: int) -> None:
        """Note that a replica lives."""
        if (attempts := self._attempts.get(slot)) is not None:
            attempts.pause = _FIRST_PAUSE
            self._answered.add(attempts.endpoint)

    def lost(self, slot: int) -> None:
        """Note that there is no link to a replica any more."""
        if (attempts := self._attempts.get(slot)) is not None:
            attempts.apart_since = attempts.again = asyncio.get_running_loop().time()

    def dial_all(self) -> None:
        """Dial whoever is due."""
        for slot, address in self._node.directory.addresses.items():
            if slot != self._node.slot and address.endpoint:
                self._dial_if_due(slot, address.endpoint, address.incarnation)

    async def visit(self, endpoint: str) -> None:
        """Open a link to the process at a seed, whatever its slot, and run it to its end."""
        refusal = ""
        try:
            refusal = await self._link_on(partial(self._carriers.network.dial, endpoint), is_seed=True)
        except RefusedError as error:
            self._node.warn(refusal := str(error))
        except (ConnectionError, TimeoutError) as error:
            self.unanswered[endpoint] = str(error)
        if refusal:
            self.refusal, self.has_answers = refusal, True

    def _dial_if_due(self, slot: int, endpoint: str, incarnation: int) -> None:
        now, link = asyncio.get_running_loop().time(), self._node.links.get(slot)
        attempts = self._attempts.get(slot)
        if attempts is None or (attempts.endpoint, attempts.incarnation) != (endpoint, incarnation):
            attempts = self._attempts[slot] = _Attempts(endpoint, incarnation, now)
        if link is not None and (link.is_linked or link.seen.status.phase == "left"):
            return
        if self._carriers.to(endpoint) is None:
            if self._is_unanswered(attempts):
                own = self._node.directory.own.endpoint or "no port"
                self._node.warn(
                    f"no link to replica {slot}, which exchanges through the folder only: if it cannot connect "
                    f'here ({own}), set federation.listen to "off"'
                )
            return
        is_theirs = self.is_dialled_by(slot) and slot > self._node.slot
        is_due = now >= attempts.again and (attempts.task is None or attempts.task.done())
        if is_due and not (is_theirs and now - attempts.apart_since < _BACK_SECONDS):
            attempts.again = now + attempts.pause * random.uniform(0.8, 1.2)
            attempts.pause = min(2 * attempts.pause, _LONGEST_PAUSE)
            attempts.task = self._node.spawn(self._link_to(slot, attempts))

    def _is_unanswered(self, attempts: _Attempts) -> bool:
        """Return whether nobody has ever answered at an endpoint, for so long that a line is due."""
        seconds = asyncio.get_running_loop().time() - attempts.apart_since
        return seconds > _UNANSWERED_SECONDS and attempts.endpoint not in self._answered

    async def _link_to(self, slot: int, attempts: _Attempts) -> None:
        try:
            if refusal := await self._link_on(partial(self.dial, slot)):
                self.refusal = refusal
        except RefusedError as error:
            self.refusal = str(error)
            self._node.warn(self.refusal)
            self._node.refuse(slot, attempts.incarnation)
        except (ConnectionError, TimeoutError) as error:
            if self._is_unanswered(attempts):
                where = "" if attempts.endpoint in str(error) else f" at {attempts.endpoint}"
                by_folder = is_folder_endpoint(attempts.endpoint)
                hint = "?" if by_folder else ", and its port open to this host?"
                if not by_folder and self._carriers.folder is not None:
                    hint += ' Or set its federation.listen to "off", for the folder'
                self._node.warn(f"no link to replica {slot}{where}: {error}; is its job there{hint}")

    async def _link_on(self, dial: Callable[[], Awaitable[Stream]], is_seed: bool = False) -> str:
        """Open a stream, and run a link on it to its end; returns why there can be no link."""
        node = self._node
        async with within(2 * _OPEN_SECONDS, "no answer"):  # a carrier that knows why says so earlier
            stream = await dial()
        async with stream:
            async with within(_OPEN_SECONDS, "the process there says nothing"):
                await say(stream, node.hello())
                hello: Hello | Later = await hear(stream, Hello, Later)
            self.has_answers |= is_seed and hello != node.hello()
            if isinstance(hello, Later):
                node.take_later(hello)
                return ""
            link = node.links.get(hello.slot)
            if is_seed and link is not None and link.is_linked:
                return ""
            return await node.run_link(stream, hello, dialled=True)
