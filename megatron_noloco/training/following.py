"""The other jobs of a federation, as `watch` sees them when the job of its folder has ended.

While a job runs, it writes the rows of the others below its folder (`separate_jobs.OtherJobs`), and where they
are. When it has ended, `watch` asks the others itself.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megatron_noloco.errors import UserError
from megatron_noloco.federation.keys import VISITOR, Identity, Keys
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.statuses import PeerStatus
from megatron_noloco.federation.visit import visit
from megatron_noloco.files import write_text
from megatron_noloco.monitor.writers import METRICS, OTHERS, parsed, read_row

_MEMBERS = "members.json"  # below OTHERS
_MOST_ADDRESSES = 64
_PAUSE_SECONDS = 5.0


def keep_rows(others: Path, rows: list[tuple[int, str]]) -> None:
    """Write rows of other jobs below a replica's folder. What is no row is left out. Raises OSError."""
    for slot, text in rows:
        if (row := read_row(text)) is not None:
            path = others / f"replica_{slot:02d}" / METRICS
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def keep_addresses(others: Path, run: int, known: Mapping[Member, PeerStatus], key_file: Path) -> None:
    """Write where the other jobs of a run are, and which key they know. Raises OSError."""
    addresses = [address for status in known.values() for address in status.addresses]
    others.mkdir(parents=True, exist_ok=True)
    content = {"run": run, "addresses": addresses[-_MOST_ADDRESSES:], "key_file": str(key_file.absolute())}
    write_text(others / _MEMBERS, json.dumps(content))


class Following:
    """Asks the other jobs of a run for their rows.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken, self._asked = dict[Member, int](), -_PAUSE_SECONDS

    def update(self) -> bool:
        """Write new rows of the other jobs, as their job would have; return whether a job has answered.

        Does nothing within seconds of the last call.
        """
        if time.monotonic() < self._asked + _PAUSE_SECONDS:
            return False
        self._asked = time.monotonic()
        for path in sorted(self._folder.glob(f"replica_*/{OTHERS}/{_MEMBERS}")):
            with suppress(UserError, OSError, ValueError, KeyError, TypeError):
                content = parsed(path.read_bytes())
                identity = _identity(content["key_file"])
                statuses, _ = visit(identity, int(content["run"]), list(content["addresses"]))
                keep_rows(
                    path.parent, [row for member in statuses for row in self._new(member, statuses[member])]
                )
                return True
        return False

    def _new(self, member: Member, status: PeerStatus) -> list[tuple[int, str]]:
        """Return rows that were not written yet; of a member that was not asked before the last row."""
        newest = max((number for number, _ in status.rows), default=0)
        taken = self._taken.get(member, newest - 1)
        self._taken[member] = max(taken, newest)
        return [(member.slot, text) for number, text in status.rows if number > taken]


def _identity(key_file: str) -> Identity:
    keys = Keys.read(Path(key_file))
    return keys.identity(VISITOR if keys.slot is None else keys.slot)
