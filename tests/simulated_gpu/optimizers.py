"""Changes of the tiny config that the tests of this folder need beside a GPU."""

from typing import Any

from tests.kit.tiny import MUON

# Of torch: DeepSpeed would compile its own.
TORCH_ADAM: dict[str, Any] = {"optimizer": {"params": {"torch_adam": True}}}
WITH_MUON = {"optimizer": {"type": "Muon", "params": {**MUON["optimizer"]["params"], "torch_adam": None}}}
