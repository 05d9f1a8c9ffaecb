"""A run on a GPU that was continued from its checkpoint is the run that was not interrupted."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kit.tiny import MUON, tiny, trained, write_config, write_text

pytestmark = pytest.mark.gpu

STEPS, SAVED = 6, 3


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without it, the gradients of an embedding and of attention are added up in any order."""
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)  # the session's is there
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def state(config: str) -> dict[str, Tensor]:
    run = trained(config)
    tensors = {**run.engine.tensors(), **run.peers.outer.state()}
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"bf16": {"enabled": True}, "model": {"hidden_dropout": 0.1}}, {"fp16": {"enabled": True}}, MUON],
    ids=["fp32", "bf16 with dropout", "fp16", "Muon"],
)
def test_resume_is_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    run = {
        "data": {"text": write_text(tmp_path)},
        "training": {"train_iters": STEPS, "output_dir": str(tmp_path / "run")},
        "checkpoint": {"save_interval": SAVED},
    }
    config = write_config(tmp_path, tiny(changes, tiny(run)))
    whole = state(config)
    (last,) = (tmp_path / "run" / "checkpoints").glob(f"*{STEPS}")
    shutil.rmtree(last)
    again = state(config)
    assert whole.keys() == again.keys()
    assert [name for name in whole if not torch.equal(whole[name], again[name])] == []
