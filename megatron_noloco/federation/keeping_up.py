"""Has a job of a federation keep up with the others."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_noloco.federation.exchanges import AT_ITS_END, FINAL, LEFT, Seen, is_at_end
from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.federation.partners import is_far_behind
from megatron_noloco.plans.fragments import due_after, next_after
from megatron_noloco.plans.grouping import Group
from megatron_noloco.settings import FederationSettings, NolocoSettings

_TRAINED_ROUNDS = 10  # from here on, weights are not to be averaged with fresh ones
_SETTLED_SECONDS = 2.0  # without news of who is connected to whom


class UntrainedError(RuntimeError):
    """Raised where the others have trained, and this replica has no weights with which it could join them."""


@dataclass
class _Awaited:
    """Another replica, as one at its end sees it.

    Attributes:
        seen: of it, now.
        furthest: the latest exchange that it has begun.
        since: when it began that one; or when it was lost, or began again, for the first time after that.
    """

    seen: Seen
    furthest: int
    since: float
    spared: bool = False

    @property
    def at_end(self) -> bool:
        """Whether it is there, and waits at its end."""
        return self.seen.present and is_at_end(self.seen.state.begun)

    @property
    def last(self) -> int:
        """The last exchange before its end, if it is `at_end`."""
        return self.seen.state.begun - AT_ITS_END - 1

    def why_away(self, seconds: float) -> str:
        """Say why it was not waited for any longer."""
        if self.seen.state.begun == LEFT:
            return "has left"
        return f"began no round for {seconds:g} s" if self.seen.present else "is not there"

    def look(self, seen: Seen, at: float) -> None:
        before, self.seen = self.seen, seen
        if seen.state.begun > self.furthest:
            self.furthest, self.since, self.spared = seen.state.begun, at, False
        elif not self.spared and (seen.state.begun, seen.present) != (before.state.begun, before.present):
            self.since, self.spared = at, True  # once: one that comes and goes must not hold others up


class AtEnd(NamedTuple):
    """Who forms the mean at the end.

    Attributes:
        group: the slots that have come to their end, this one included; all get the mean.
        left_out: why slots are not in it, by slot. A slot of the group ended too far behind; others have not come.
        links: see `FederationTransport.links`.
    """

    group: Group
    left_out: dict[int, str]
    links: dict[int, set[int]]


class AtItsEnd:
    """Waits for the others at the end of this replica.

    A replica that trains is waited for until `seconds` after the last exchange that it began, and one whose
    connection is lost meanwhile until `seconds` after that, however often it comes and goes.

    Args:
        own: last exchange of this replica.
        left_out: returns why slots that have come are not in the mean, from the last exchange of each.
    """

    def __init__(
        self,
        transport: FederationTransport,
        own: int,
        seconds: float,
        left_out: Callable[[Mapping[int, int]], dict[int, str]],
    ) -> None:
        self._transport, self._own, self._seconds, self._why_not = transport, own, seconds, left_out
        self._awaited = dict[int, _Awaited]()
        self._links, self._since, self._first = dict[int, set[int]](), -math.inf, math.inf

    def look(self) -> AtEnd | None:
        """Look at the others; return who forms the mean, or None where others are still waited for."""
        at = time.monotonic()
        for slot, seen in self._transport.seen().items():
            if slot not in self._awaited:
                self._awaited[slot] = _Awaited(seen, seen.state.begun, at if seen.present else -math.inf)
            self._awaited[slot].look(seen, at)
        since = at - self._seconds
        if any(
            other.since > since and not other.at_end and other.seen.state.begun < FINAL
            for other in self._awaited.values()
        ):
            return None
        if not self._is_settled(at):
            return None
        own = self._transport.place.replica
        came = {own: self._own} | {slot: other.last for slot, other in self._awaited.items() if other.at_end}
        why = {
            slot: other.why_away(self._seconds) for slot, other in self._awaited.items() if slot not in came
        }
        return AtEnd(tuple(sorted(came)), why | self._why_not(came), self._links)

    def _is_settled(self, at: float) -> bool:
        """Return whether all are connected to each other, or who is has not changed for a while.

        Nor is it waited for any longer than for a replica.
        """
        self._first = min(self._first, at)
        links = self._transport.links()
        if links != self._links:
            self._links, self._since = links, at
        there = set().union(*links.values())
        late = at - self._since > _SETTLED_SECONDS or at - self._first > self._seconds
        return late or all(there <= to | {slot} for slot, to in links.items())


class KeepingUp:
    """Decides which local step comes next, so that a replica exchanges with the others when they do.

    A replica that was away would find no partner, since the others are at later rounds, and a replica that is
    slower than the others would make its partners wait. So it compares itself with the others: before each local
    step, or once in a round where it leaves out none. If more than half of them have begun an exchange that is far
    ahead, it goes on there:

    - More than `rounds_behind` rounds behind (`is_far_behind`), it takes over a state, as at its start: its own
      weights would pull the others back. Until it has one it takes part in no round.
    - Else, with `skip_local_steps`, a slow replica that would leave out more than a quarter of the steps between
      two exchanges leaves out all local steps before that exchange but the last. The weights stay its own, and
      rounds pull them towards the others.

    Local steps, learning rate and samples go by the number of the step. Samples of steps left out are not read.

    The speaker of the replica has it, for all ranks.
    """

    def __init__(
        self,
        transport: FederationTransport,
        noloco: NolocoSettings,
        federation: FederationSettings,
        steps: int | None = None,
    ) -> None:
        self._transport, self._noloco, self._federation = transport, noloco, federation
        self._steps = steps
        self._behind = federation.rounds_behind * noloco.fragments
        skips = federation.skip_local_steps
        self._few = noloco.local_steps // (4 * noloco.fragments) if skips else math.inf
        self._look_interval = 1 if skips else noloco.local_steps
        self._untrained = False

    def start(self, done: int) -> None:
        """Announce after how many local steps this replica begins, or goes on with the state of another."""
        self._untrained = done == 0
        self._announce(done)

    def next_step(self, step: int) -> int | None:
        """Return the local step (from 0) to take in place of `step`; None: take over a state before the next one.

        Raises UntrainedError if this replica began with fresh weights and the others have trained for long, or one
        of them is at its end.
        """
        due = self._due_now(step)
        if due is None:
            return step
        left_out = due - 1 - step
        if self._untrained and left_out >= _TRAINED_ROUNDS * self._noloco.local_steps:
            raise UntrainedError(
                "the others have trained already, and this replica begins with fresh weights, which would spoil "
                'theirs; start it again, with checkpoint.load "auto" where that is set: it then takes over the '
                "state of one of them"
            )
        self._untrained = False  # the others are as little trained
        if is_far_behind(self._last_exchange(step), self._last_exchange(due), self._behind):
            return None
        if left_out <= self._few:
            return step
        self._announce(step + left_out)
        return step + left_out

    def _due_now(self, step: int) -> int | None:
        """Return the local steps before the exchange that more than half of the others have begun.

        None where there are no others, or this is no local step at which a replica looks at them. Raises
        UntrainedError where another replica waits at its end, at a local step that only its caller's loop knows.
        """
        if step % self._look_interval:
            return None
        numbers = self._transport.begun().values()
        if self._steps is None and self._untrained and any(map(is_at_end, numbers)):
            raise UntrainedError(
                "another replica waits at its end, and this one begins with fresh weights, which would spoil the "
                "model of all; start it again from a checkpoint, or not at all"
            )
        # Where the end is may be known to the caller's loop only.
        end = AT_ITS_END if self._steps is None else LEFT
        begun = [number for number in numbers if 0 <= number < end]
        if not begun:
            return None
        due = self._due(statistics.median_low(begun))
        return due if self._steps is None else min(due, self._steps)

    def at_end(self, done: int) -> "AtItsEnd":
        """Announce the end of this replica, after `done` local steps, and look at the others from then on."""
        own = self._last_exchange(done)
        self._transport.partners.leave_out(AT_ITS_END + 1 + own)
        return AtItsEnd(self._transport, own, self._noloco.deadline_seconds, self._left_out)

    def _left_out(self, last: Mapping[int, int]) -> dict[int, str]:
        """Return why slots are not in the mean that have come: those that ended far behind the furthest.

        Args:
            last: the last exchange of each slot.
        """
        furthest = max(last.values())
        return {
            slot: f"ended at local step {self._due(exchange)}, more than federation.rounds_behind "
            f"({self._federation.rounds_behind}) rounds before the furthest at {self._due(furthest)}"
            for slot, exchange in last.items()
            if is_far_behind(exchange, furthest, self._behind)
        }

    def _due(self, exchange: int) -> int:
        """Return the local steps before an exchange; 0 for -1."""
        if exchange < 0:
            return 0
        fragments = self._noloco.fragments
        return due_after(*divmod(exchange, fragments), self._noloco.local_steps, fragments)

    def is_at_its_end(self, slot: int) -> bool:
        """Whether a slot averages at its end, or will as soon as its connection stands again."""
        return is_at_end(self._transport.seen()[slot].state.begun)

    def leave(self) -> None:
        """Announce that this replica is at its end and waits for none."""
        self._transport.partners.leave_out(LEFT)

    def _announce(self, done: int) -> None:
        """Tell the others that this replica skips the exchanges before this step, so that none waits for it."""
        self._transport.partners.leave_out(self._last_exchange(done))

    def _last_exchange(self, done: int) -> int:
        """Return the number of the last exchange before the next local step; -1 where there was none."""
        round_index, fragment = next_after(done, self._noloco.local_steps, self._noloco.fragments)
        return round_index * self._noloco.fragments + fragment - 1
