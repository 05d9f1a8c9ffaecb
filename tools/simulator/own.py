"""The block "simulator" of a run's JSON: what is simulated and the trainer does not have."""

from collections.abc import Sequence
from typing import Any, TypedDict

from tools.simulator.slow import Slow
from tools.simulator.sparse import Sparsity


class Own(TypedDict):
    """Arguments of `Simulation`."""

    slow: Slow | None
    sparse: Sparsity | None
    texts: Sequence[str]


def take_own(raw: dict[str, Any]) -> Own:
    """Take the block out of a run's JSON, which is then the trainer's.

    It has "slow" with arguments of `Slow`, "sparse" with "density" and perhaps "error_decay" for rounds by
    SparseLoCo, and "texts", a list of files and folders as `data.text` takes them, for text of replicas' own.
    """
    block = raw.pop("simulator", {})
    slow, sparse = block.get("slow"), block.get("sparse")
    return {
        "slow": Slow(**slow) if slow else None,
        "sparse": Sparsity(**sparse) if sparse else None,
        "texts": block.get("texts", ()),
    }
