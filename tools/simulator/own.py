"""The block "simulator" of a run's JSON: what is simulated and the trainer does not have."""

from collections.abc import Sequence
from typing import Any, TypedDict

from tools.simulator.slow import Slow


class Own(TypedDict):
    """Arguments of `Simulation`."""

    slow: Slow | None
    texts: Sequence[str]


def take_own(raw: dict[str, Any]) -> Own:
    """Take the block out of a run's JSON, which is then the trainer's.

    It has "slow" with arguments of `Slow`, and "texts", a list of files and folders as `data.text` takes them, for
    text of replicas' own.
    """
    block = raw.pop("simulator", {})
    slow = block.get("slow")
    return {"slow": Slow(**slow) if slow else None, "texts": block.get("texts", ())}
