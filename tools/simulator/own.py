"""The block "simulator" of a run's JSON: what is simulated and the trainer does not have."""

from collections.abc import Sequence
from typing import Any, TypedDict

from tools.simulator.sparse import Sparsity


class Own(TypedDict):
    """Arguments of `Simulation`."""

    sparse: Sparsity | None
    texts: Sequence[str]


def take_own(raw: dict[str, Any]) -> Own:
    """Take the block out of a run's JSON, which is then the trainer's.

    It has "sparse" with "density" and perhaps "error_decay" for rounds by SparseLoCo, and "texts", a list of files
    and folders as `data.text` takes them, for text of replicas' own.
    """
    block = raw.pop("simulator", {})
    sparse = block.get("sparse")
    return {"sparse": Sparsity(**sparse) if sparse else None, "texts": block.get("texts", ())}
