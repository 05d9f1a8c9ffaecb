"""DeepSpeed's checkpoint format without its savers.

`DeepSpeedEngine.save_checkpoint` opens and closes with a barrier over the whole world, that is over all
replicas, and reads pickles without restraint. The parts of it that gather and restore state are used as they
are; who writes, where and when is decided in training/checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megatron_noloco.engine.quiet import quiet

# All that DeepSpeed's files hold besides tensors and plain containers. Nothing else is unpickled.
_TRUSTED = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


class _Files(TorchCheckpointEngine):
    """Collects what DeepSpeed wants written, and reads files without executing what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: dict[str, Any] = {}

    def save(self, state_dict: Any, path: str) -> None:
        self.collected[Path(path).name] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals(_TRUSTED):
            return torch.load(path, map_location=map_location, weights_only=True)


class CheckpointableEngine(DeepSpeedEngine):
    """A DeepSpeed engine whose state can be taken and put back by one rank, without a collective."""

    def collect_state(self) -> dict[str, Any]:
        """File name -> state, for the files this rank writes; live tensors, not copies.

        The dp rank 0 of every stage and tp rank holds the module, learning-rate schedule and counters, every dp
        rank its part of the optimizer state.
        """
        files = self.checkpoint_engine = _Files()
        self._save_checkpoint("", "")
        self._save_zero_checkpoint("", "")
        return files.collected

    def restore_state(self, folder: Path) -> None:
        """Read back what `collect_state` named; every rank of the replica reads its own files in `folder`."""
        self.checkpoint_engine = _Files()
        with quiet():
            path, _ = self.load_checkpoint(str(folder.parent), tag=folder.name)
        assert path is not None, f"DeepSpeed found no model states in {folder}"

    def _copy_recovery_script(self, save_path: str) -> None:
        """DeepSpeed's zero_to_fp32.py does not know pipeline and tensor parallelism; `export` does."""
