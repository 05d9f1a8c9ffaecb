"""A round in weights that `fully_shard` divides, on a GPU whose stream is behind."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_noloco.attach.torch_module import Sharded


class FSDPModule(nn.Linear):
    event = "of the loop, after its optimizer's step"

    def reshard(self) -> None:
        self.gathered = False

    def set_post_optim_event(self, event: str) -> None:
        self.event = event


def test_next_forward_waits_for_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(record_event=lambda: "after the round")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    part = FSDPModule(2, 2)
    engine = Sharded.__new__(Sharded)  # of no DTensors
    engine.modules = [nn.Sequential(part)]
    engine.refresh()
    assert (part.event, part.gathered) == ("after the round", False)
