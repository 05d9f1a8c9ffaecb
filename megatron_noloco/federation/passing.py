"""A vector passed from one member to another, piece by piece: the giver gathers a piece when the taker wants it.

So both hold a few pieces at a time, a slow link is full, and a taker that was away asks for what is missing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from megatron_noloco.federation.codes import bytes_of, fill
from megatron_noloco.federation.gather import Leader
from megatron_noloco.federation.mesh import (
    Blob,
    LostError,
    Member,
    Mesh,
    Patience,
    RefusedError,
    StalledError,
)

_BACK_SECONDS = 60.0  # for a member that was lost to come back
_TURN_SECONDS = 3600.0  # for the first piece: other takers may have their turn before
_WINDOW = 4  # pieces that a taker asks for at a time
_MOST_LOSSES = 3  # in a row without a piece
_END = "end"  # the name of the piece that a taker wants when it has everything

Stop = Callable[[], str]
"""Returns why the passing is to end; "" while it goes on."""


def pass_on(
    mesh: Mesh,
    taker: Member,
    base: str,
    pieces: Iterable[Blob],
    stop: Stop,
    begin_by: Callable[[], float] | None = None,
) -> None:
    """Offer each piece when the taker wants it, until it has all. Raises LostError.

    Args:
        begin_by: returns until when the taker must want the first piece; None: as for the others, in a minute.
    """
    why = ""

    def wait_until_wanted(name: str, limit: Callable[[], float] | None = None) -> None:
        began = mesh.clock()

        def is_over() -> bool:
            nonlocal why
            why = stop()
            return bool(why) or (taker, name) in mesh.offers.takers(base)

        while not mesh.wait(is_over, mesh.clock() + 1.0):
            moved = max(began, mesh.moved.get(taker, began)) + _BACK_SECONDS
            if mesh.clock() > (moved if limit is None else limit()):
                raise StalledError("wants nothing")
        if why:
            raise RefusedError(why)

    try:
        for number, piece in enumerate(pieces):
            wait_until_wanted(f"{base}{number}", None if number else begin_by)
            mesh.offer(f"{base}{number}", piece)
            mesh.release(f"{base}{number - _WINDOW}")
        wait_until_wanted(base + _END)
    finally:
        mesh.withdraw(base)


def contents(transfer: Leader) -> Iterator[Blob]:
    """Yield the buckets of a transfer."""
    for at in range(len(transfer.buckets)):
        yield bytes_of(transfer.content(at).result())


class Passed:
    """What another member passes on, in order.

    Args:
        begin_by: returns until when to wait for the first piece; None: an hour, as others may have their turn
            before.
    """

    def __init__(
        self,
        mesh: Mesh,
        giver: Member,
        base: str,
        stop: Stop,
        begin_by: Callable[[], float] | None = None,
    ) -> None:
        turn = mesh.clock() + _TURN_SECONDS
        self._mesh, self._giver, self._base, self._stop = mesh, giver, base, stop
        self._begin_by, self._next = begin_by or (lambda: turn), 0

    def pieces(self, number: int) -> Iterator[Blob]:
        """Yield the next pieces. Raises LostError; a giver that was lost for less than a minute goes on."""
        mesh, last, losses = self._mesh, self._next + number, 0
        while self._next < last:
            patience = Patience(mesh, self._giver, None if self._next else self._begin_by)
            names = (f"{self._base}{at}" for at in range(self._next, last))
            try:
                for piece in mesh.fetch_all(self._giver, names, _WINDOW, patience, why_not=self._stop):
                    self._next, losses = self._next + 1, 0
                    yield piece
            except StalledError:
                losses += 1
                if not self._next or losses > _MOST_LOSSES or not self._is_back():
                    raise

    def into(self, transfer: Leader) -> None:
        """Hand a vector out. Raises LostError, UnequalError."""
        handed_out = []
        for at, piece in enumerate(self.pieces(len(transfer.buckets))):
            result = transfer.result(at)
            fill([result], piece)
            handed_out.append(transfer.hand_out(at, result))
        for future in handed_out:
            future.result()

    def end(self) -> None:
        """Let the giver know that everything has come."""
        with suppress(LostError):
            self._mesh.fetch(self._giver, self._base + _END)

    def _is_back(self) -> bool:
        mesh = self._mesh
        mesh.wait(lambda: mesh.reaches(self._giver) or bool(self._stop()), mesh.clock() + _BACK_SECONDS)
        return mesh.reaches(self._giver) and not self._stop()
