"""The metrics of all jobs in each job's folder, so that `watch` and `report` show the federation anywhere."""

import json
from contextlib import suppress
from pathlib import Path

from megatron_noloco.federation.network import FederationTransport
from megatron_noloco.federation.service import ServiceFailedError
from megatron_noloco.monitor.writers import OTHERS, Row, without_nan


class OtherJobs:
    """Tells the other jobs the rows of this one, and writes theirs below the folder of this replica.

    Only numbers of `metrics.jsonl` leave a job. What cannot be written is lost, as `ReplicaFiles` says for the
    same disk.
    """

    def __init__(self, transport: FederationTransport, folder: Path) -> None:
        self._transport, self._folder = transport, folder / OTHERS

    def write(self, row: Row) -> None:
        with suppress(ServiceFailedError):  # the main thread learns of it elsewhere
            self._transport.tell_row(json.dumps(row))
        self._keep()

    def close(self) -> None:
        self._keep()

    def _keep(self) -> None:
        for slot, text in self._transport.rows():
            with suppress(ValueError, RecursionError, OSError):
                line = json.dumps(without_nan(json.loads(text)))  # in a single line, whatever it was
                folder = self._folder / f"replica_{slot:02d}"
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(line + "\n")
