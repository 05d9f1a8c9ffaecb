"""What the replicas of a run have written about themselves, while it goes on and afterwards."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_noloco.monitor.run_log import ReplicaLog
from megatron_noloco.monitor.writers import Row


class Written:
    """Of one run; `folders` says where."""

    def folders(self, replica: int) -> Iterable[Path]:
        """Those of a replica in which it writes metrics; there may be none yet."""
        raise NotImplementedError

    def step(self, replicas: Iterable[int]) -> int:
        """Of the replica that is furthest."""
        return max((int(self.last(replica, "step") or 0) for replica in replicas), default=0)

    def loss(self, replica: int) -> float | None:
        """Of its last evaluation, in nats per token."""
        return self.last(replica, "validation/loss")

    def last(self, replica: int, name: str) -> Any:
        """The newest value of a number."""
        return next((row[name] for row in reversed(self._rows(replica)) if name in row), None)

    def total(self, replica: int, name: str) -> int:
        """How often it happened; logs leave out what never did."""
        return int(self.last(replica, f"total/{name}") or 0)

    def longest_pause(self, replica: int) -> float:
        """Seconds for which training stood still in a round."""
        return max((row.get("round/pause_seconds", 0.0) for row in self._rows(replica)), default=0.0)

    def _rows(self, replica: int) -> list[Row]:
        logs = [ReplicaLog(folder) for folder in self.folders(replica)]
        for log in logs:
            log.update()
        return [row for log in logs for row in log.rows]
