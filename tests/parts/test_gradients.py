"""The norm of gradients that are longer than the copy that is made of them."""

import pytest
import torch

from megatron_noloco.engine import gradients
from megatron_noloco.engine.gradients import in_pieces


def test_the_norm_is_that_of_pieces_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_AT_ONCE", 10)
    short, padding, long = torch.randn(2, 5), torch.ones(3), torch.randn(3, 9)
    padding._zero_padding = True  # type: ignore[attr-defined]
    first, second = torch.nn.Parameter(short), torch.nn.Parameter(long)
    pieces, parameters = in_pieces([short, padding, long], [first, second])
    assert pieces[0] is short, "a short one is not cut, so that its norm keeps its bits"
    assert [piece.numel() for piece in pieces] == [10, 10, 10, 7]
    assert [id(parameter) for parameter in parameters] == [id(first), *[id(second)] * 3]
    assert torch.equal(torch.cat(pieces[1:]), long.view(-1))
