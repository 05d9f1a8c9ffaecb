"""What all jobs of a federation must have alike, and how two jobs that differ learn in what they do.

The number of a run follows from what all its jobs have alike. Jobs of different runs exchange nothing but the
names of what they compare, with a short digest of each value. So do two jobs of one kind, such as two of the
trainer, that differ in what only jobs of this kind know.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_DIGEST_CHARACTERS = 8
_MOST_NAMED = 8
_NAME = re.compile(r"[A-Za-z0-9_. ]{1,80}")  # it is written to the terminal of another job


class RunIdentity(NamedTuple):
    """What a job must have as the others have it, by name; values are anything that JSON can hold.

    Attributes:
        shared: what every job knows.
        kind: of the job.
        own: what only jobs of its kind know.
        batch: samples of its replica in a local step, in which jobs may differ; 0: not known.
    """

    shared: Mapping[str, Any]
    kind: str = ""
    own: Mapping[str, Any] = {}
    batch: int = 0

    @property
    def digests(self) -> dict[str, str]:
        """See `digests_of`."""
        return digests_of(self.shared) | digests_of(self.own)


def run_number(alike: Mapping[str, Any]) -> int:
    """Hash the values that all jobs of a run must share, as JSON has them."""
    return int.from_bytes(hashlib.sha256(_json(alike)).digest()[:8], "big") >> 1


def digests_of(alike: Mapping[str, Any]) -> dict[str, str]:
    """Return a short digest of each value by its name; blocks of settings are taken apart ("model.num_layers")."""
    return {
        name: hashlib.sha256(_json(value)).hexdigest()[:_DIGEST_CHARACTERS] for name, value in _leaves(alike)
    }


def differences(own: Mapping[str, str], theirs: Mapping[str, Any]) -> str:
    """Return the names of what differs between this job and one with these digests; "" where nothing does.

    A name that one of them lacks is of another kind of job, and no difference.
    """
    names = [name for name in sorted(own.keys() & theirs.keys()) if own[name] != theirs[name]]
    names = [name for name in names if _NAME.fullmatch(name)]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def refusal(slot: int | str, own_slot: int, names: str) -> str:
    """Return the line on another job that differs from this one in so named values."""
    return f"refused: replica {slot} differs from replica {own_slot} in {names}"


def _leaves(alike: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in alike.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield before + name, value


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
