"""Lines for the user on replicas that come, leave, or are lost."""

from collections.abc import Iterator, Mapping

from megatron_noloco.federation.links import Link

_VERBS = {  # of one replica, of several
    "come": ("has come", "have come"),
    "back": ("is back", "are back"),
    "left": ("has left", "have left"),
    "lost": ("is not heard any more", "are not heard any more"),
}
_MOST_NAMED = 8


class Attendance:
    """What the user was told of the other replicas.

    A replica whose link is lost is there until it was silent for as long as ends a link (`Link.is_silent`).
    """

    def __init__(self) -> None:
        self._told = dict[int, bool]()  # whether it is there, by slot

    def changes(self, links: Mapping[int, Link]) -> Iterator[str]:
        """Yield a line for each kind of change since the last call; four at most."""
        changed: dict[str, list[int]] = {kind: [] for kind in _VERBS}
        for slot, link in sorted(links.items()):
            was_there, has_left = self._told.get(slot, False), link.seen.status.phase == "left"
            if link.seen.present and not has_left and not was_there:
                changed["back" if slot in self._told else "come"].append(slot)
            elif was_there and (has_left or link.is_silent):
                changed["left" if has_left else "lost"].append(slot)
            else:
                continue
            self._told[slot] = not was_there
        replicas = 1 + sum(self._told.values())
        for kind, slots in changed.items():
            if slots:
                yield f"{_named(slots)} {_VERBS[kind][len(slots) > 1]} ({replicas} replica{'s' * (replicas > 1)})"


def _named(slots: list[int]) -> str:
    more = f" and {len(slots) - _MOST_NAMED} more" if len(slots) > _MOST_NAMED else ""
    return f"replica{'s' * (len(slots) > 1)} {', '.join(map(str, slots[:_MOST_NAMED]))}{more}"
